"""Texts to calibrate with and to measure on: a file, the built-in one, or the data of a run; never the same part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlm.checkpoint.layout import RUN_FILE
from mlxlm.data import TokenDataset, texts
from mlxlm.data.builtin import python_reference
from mlxlm.errors import DataError
from mlxlm.tokenizer import Tokenizer

WINDOW = 512  # tokens of a calibration sequence, less where the model's context is shorter
CALIBRATION = 32_768  # tokens; GPTQ's paper takes 262,144, which a CPU can't, and more hardly helps it
EVALUATION = 8_192
_SPREAD = 16  # calibration windows come from a stretch of up to this many times as many tokens
_CHARACTERS = 4  # per token, about


@dataclass(frozen=True)
class Text:
    """Tokens of one text, and how many bytes all but the first of them stand for. `name` is for reports."""

    name: str
    tokens: np.ndarray
    bytes: int

    def windows(self, length: int, tokens: int) -> np.ndarray:
        """int32 `[N, length]`: up to `tokens` of them in windows spread evenly over the text.

        Raises DataError if it is shorter than one window of 16.
        """
        length = min(length, len(self.tokens))
        if length < 16:
            raise DataError(f"{self.name} has {len(self.tokens)} tokens, too few to calibrate with", "a longer text")
        there = len(self.tokens) // length
        count = max(1, min(there, tokens // length))
        starts = [i * there // count * length for i in range(count)]
        return np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int32)


def of_file(path: Path | str, tokenizer: Tokenizer, tokens: int) -> Text:
    """Up to `tokens` tokens from the beginning of whatever `mlxlm prepare` reads as text."""
    return _encoded(str(path), texts([path]), tokenizer, tokens)


def calibration_and_evaluation(
    root: Path | None, tokenizer: Tokenizer, calibrate: Path | str | None, evaluate: Path | str | None
) -> tuple[Text, Text]:
    """A text to calibrate with and another one to measure on.

    Given files are taken. Without any, a run (`root` has train.json) gives its training and its validation data, and
    another model the text that every Python carries, four fifths of its topics and the rest. Where only one to
    calibrate with is given, its last tenth is kept for measuring.
    """
    wanted = _SPREAD * CALIBRATION
    if evaluate is not None:
        measured = of_file(evaluate, tokenizer, EVALUATION)
        if calibrate is not None:
            return of_file(calibrate, tokenizer, wanted), measured
        return _without_files(root, tokenizer)[0], measured
    if calibrate is None:
        return _without_files(root, tokenizer)
    whole = of_file(calibrate, tokenizer, wanted)
    cut = len(whole.tokens) * 9 // 10
    kept = Text(f"{whole.name} (but its last tenth)", whole.tokens[:cut], _bytes(whole.tokens[:cut], tokenizer))
    held_out = whole.tokens[cut : cut + EVALUATION]
    return kept, Text(f"{whole.name} (from its last tenth)", held_out, _bytes(held_out, tokenizer))


def _without_files(root: Path | None, tokenizer: Tokenizer) -> tuple[Text, Text]:
    if root is not None and (root / RUN_FILE).is_file():
        from mlxlm.train import Run  # not for every model: it brings the optimizers

        run = Run.open(root)
        run.check_data()
        return (
            _of_data(TokenDataset.open(run.data, "train"), "training data of the run", _SPREAD * CALIBRATION),
            _of_data(TokenDataset.open(run.data, "validation"), "validation data of the run", EVALUATION),
        )
    topics = ["\n\n".join(m["content"] for m in messages) + "\n\n" for messages in python_reference()]
    cut = len(topics) * 4 // 5
    name = "Python's language reference ({})"
    return (
        _encoded(name.format("four fifths"), topics[:cut], tokenizer, _SPREAD * CALIBRATION),
        _encoded(name.format("the last fifth"), topics[cut:], tokenizer, EVALUATION),
    )


def _of_data(data: TokenDataset, name: str, tokens: int) -> Text:
    count = min(tokens, len(data))
    return Text(name, np.array(data.slice(0, count), np.int32), round(data.bytes * max(0, count - 1) / len(data)))


def _encoded(name: str, pieces: Iterable[str], tokenizer: Tokenizer, tokens: int) -> Text:
    """One text of the pieces, about as long as asked and no longer."""
    parts, size = [], 0
    for piece in pieces:
        parts.append(piece)
        size += len(piece)
        if size > _CHARACTERS * tokens:
            break
    ids = tokenizer.encode("".join(parts))[:tokens]
    if len(ids) < 2:
        raise DataError(f"{name} has too little text", "a longer text")
    return Text(name, np.array(ids, np.int32), _bytes(ids, tokenizer))


def _bytes(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Of the text of all tokens but the first."""
    whole, first = (len(tokenizer.decode(part).encode("utf-8")) for part in (ids, ids[:1]))
    return max(1, whole - first)

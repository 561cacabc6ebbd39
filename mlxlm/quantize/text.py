"""Texts to calibrate with and to measure on: a file, the built-in one, or the data of a run; never the same part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlm.checkpoint.locations import RUN_FILE
from mlxlm.data import Document, TokenDataset, read_documents
from mlxlm.data.builtin import python_reference
from mlxlm.data.text import split_pieces
from mlxlm.evaluate.windows import first_tokens
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError, MlxlmError

WINDOW = 512  # tokens of a calibration sequence, less where the model's context is shorter
CALIBRATION = 16_384  # tokens, some times as many as inputs of a layer; GPTQ's paper takes 262,144, too many for a CPU
EVALUATION = 8_192
_SPREAD = 16  # calibration windows come from a stretch of up to this many times as many tokens
_CHARACTERS = 4  # per token, about


@dataclass(frozen=True)
class CalibrationText:
    """Tokens to calibrate with. `name` is for reports."""

    name: str
    tokens: np.ndarray

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


@dataclass(frozen=True)
class EvalText:
    """Tokens to measure on, document by document, and how many bytes all but the first of each stand for."""

    name: str
    documents: list[list[int]]
    bytes: int

    @property
    def predicted(self) -> int:
        return sum(len(ids) - 1 for ids in self.documents)


def text_of_file(path: Path | str, tokenizer: Tokenizer, tokens: int) -> CalibrationText:
    """Up to `tokens` tokens from the beginning of whatever `mlxlm prepare` reads as text."""
    return _encoded(str(path), _documents(path), tokenizer, tokens)


def _documents(path: Path | str) -> Iterator[str]:
    """The text of each document, an empty line between two."""
    for count, document in enumerate(map(conversation_as_text, read_documents([path]))):
        if count:
            yield "\n\n"
        yield from document.pieces


def calibration_text(root: Path | None, tokenizer: Tokenizer, file: Path | str | None, whole: bool) -> CalibrationText:
    """What to calibrate with: `file`, whole or but its last tenth; else a run's training data (`root` has train.json),
    or for another model four fifths of the text that every Python carries."""
    tokens = _SPREAD * CALIBRATION
    if file is None and _is_run(root):
        return CalibrationText("training data of the run", _of_run(root, "train", tokens)[0])
    if file is None:
        topics = _topics()
        name = "Python's language reference (four fifths)"
        return _encoded(name, topics[: len(topics) * 4 // 5], tokenizer, tokens)
    text = text_of_file(file, tokenizer, tokens)
    return text if whole else _cut(text, tokenizer)[0]


def eval_text(
    root: Path | None, tokenizer: Tokenizer, file: Path | str | None, calibrated_on: Path | str | None
) -> EvalText:
    """What to measure on: `file`, else the last tenth of the file calibrated on, else a run's validation data, or the
    fifth of Python's text that `calibration_text` leaves."""
    if file is not None:
        return _measured(str(file), map(conversation_as_text, read_documents([file])), tokenizer)
    if calibrated_on is not None:
        return _cut(text_of_file(calibrated_on, tokenizer, _SPREAD * CALIBRATION), tokenizer)[1]
    if _is_run(root):
        tokens, size = _of_run(root, "validation", EVALUATION)
        return EvalText("validation data of the run", [tokens.tolist()], size)
    topics = _topics()
    text = "".join(topics[len(topics) * 4 // 5 :])
    document = Document("Python's language reference", split_pieces(iter((text,))))
    return _measured(f"{document.location} (the last fifth)", [document], tokenizer)


def conversation_as_text(document: Document) -> Document:
    """The same document, a conversation as the text of its messages."""
    if document.messages is None:
        return document
    return Document(document.location, iter(("\n\n".join(content for _, content in document.messages),)))


def _measured(name: str, texts: Iterable[Document], tokenizer: Tokenizer) -> EvalText:
    return _long_enough(EvalText(name, *first_tokens(tokenizer, texts, EVALUATION)))


def _long_enough(text: EvalText) -> EvalText:
    if not text.predicted:
        raise DataError(f"{text.name} has too little text", "a longer text")
    return text


def _cut(text: CalibrationText, tokenizer: Tokenizer) -> tuple[CalibrationText, EvalText]:
    at = len(text.tokens) * 9 // 10
    first, last = text.tokens[:at], text.tokens[at : at + EVALUATION].tolist()
    whole, begin = (len(tokenizer.decode(part).encode("utf-8")) for part in (last, last[:1]))
    rest = EvalText(f"{text.name} (from its last tenth)", [last], max(1, whole - begin))
    return CalibrationText(f"{text.name} (but its last tenth)", first), _long_enough(rest)


def _is_run(root: Path | None) -> bool:
    return root is not None and (root / RUN_FILE).is_file()


def _topics() -> list[str]:
    return ["\n\n".join(m["content"] for m in messages) + "\n\n" for messages in python_reference()]


def _of_run(root: Path, split: str, tokens: int) -> tuple[np.ndarray, int]:
    """Up to `tokens` of a run's data, and the bytes of all but the first, by the mean over all of it."""
    from mlxlm.train import Run  # not for every model: it brings the optimizers

    try:
        run = Run.open(root)
        run.check_data()
        data = TokenDataset.open(run.data, split)
    except MlxlmError as error:
        option = "--calibration-text" if split == "train" else "--eval-text"
        raise type(error)(error.message, f"{option} FILE instead of the run's own data") from error
    count = min(tokens, len(data))
    size = round(data.bytes * max(0, count - 1) / len(data))
    return np.array(data.slice(0, count), np.int32), size


def _encoded(name: str, pieces: Iterable[str], tokenizer: Tokenizer, tokens: int) -> CalibrationText:
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
    return CalibrationText(name, np.array(ids, np.int32))

"""Texts for calibration and evaluation: files, a run's data or a built-in text. The two never share a part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxlm.checkpoint.locations import is_run_folder, locate
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.data import Document, TokenDataset, read_documents
from mlxlm.data.builtin import python_reference
from mlxlm.data.text import conversation_as_text, split_pieces
from mlxlm.evaluate.loss import first_tokens
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError, MlxlmError, TokenizerError

WINDOW_TOKENS = 512  # of a calibration window, less if the model's context is shorter
CALIBRATION_TOKENS = 16_384  # several times a layer's width; GPTQ's paper takes 262,144, too many for a CPU
EVAL_TOKENS = 4_096  # two runs of the model over 1.5 times as many take longest of a quantization on a CPU
_MIN_WINDOW = 16  # tokens
_SPREAD = 16  # calibration windows are spread over up to this many times their tokens
_CHARS_PER_TOKEN = 4  # about


@dataclass(frozen=True)
class CalibrationText:
    """Tokens to calibrate on; `name` is for reports."""

    name: str
    tokens: np.ndarray

    def windows(self, length: int, tokens: int) -> np.ndarray:
        """Up to `tokens` tokens in windows spread evenly over the text, int32 `[N, length]`.

        Raises:
            DataError: The text is shorter than 16 tokens.
        """
        length = min(length, len(self.tokens))
        if length < _MIN_WINDOW:
            raise DataError(f"{self.name} has {len(self.tokens)} tokens, too few to calibrate on", "a longer text")
        available = len(self.tokens) // length
        count = max(1, min(available, tokens // length))
        starts = [i * available // count * length for i in range(count)]
        return np.stack([self.tokens[start : start + length] for start in starts]).astype(np.int32)


@dataclass(frozen=True)
class EvalText:
    """Tokens to evaluate on.

    Attributes:
        name: For reports.
        documents: Tokens of each document.
        bytes: Bytes of the text of all tokens but the first of each document.
    """

    name: str
    documents: list[list[int]]
    bytes: int

    @property
    def predicted(self) -> int:
        """Number of predicted tokens."""
        return sum(len(ids) - 1 for ids in self.documents)


@dataclass(frozen=True)
class QuantizationTexts:
    """The texts that the settings need, empty ones without a name for those that aren't needed.

    Attributes:
        calibration: Text to calibrate on.
        evaluation: Text to evaluate on.
        calibration_windows: The tokens to calibrate on, int32 `[N, T]`.
    """

    calibration: CalibrationText
    evaluation: EvalText
    calibration_windows: np.ndarray


def read_texts(source: WritableCheckpoint, settings: QuantizationSettings) -> QuantizationTexts:
    """Read the texts that the settings need.

    Raises:
        DataError: A text is too short, or a run's data can't be read.
        TokenizerError: The model has no tokenizer.
    """
    length = min(WINDOW_TOKENS, source.config.max_position_embeddings)
    windows = np.zeros(0, np.int32)
    calibration, evaluation = CalibrationText("", windows), EvalText("", [], 0)
    if not (settings.needs_calibration_text or settings.needs_eval_text):
        return QuantizationTexts(calibration, evaluation, windows)
    root = locate(source.path).root if source.path.is_dir() else None
    run = root if root is not None and is_run_folder(root) else None
    try:
        tokenizer = source.load_tokenizer()
    except TokenizerError as error:
        hint = f"{error.hint}; `method=rtn` without an evaluation needs none"
        raise TokenizerError(error.message, hint) from error
    if settings.needs_calibration_text:
        whole = not settings.needs_eval_text or settings.eval_text is not None
        calibration = calibration_text(run, tokenizer, settings.calibration_text, whole)
        windows = calibration.windows(length, CALIBRATION_TOKENS)
    if settings.needs_eval_text:
        evaluation = eval_text(run, tokenizer, settings.eval_text, settings.calibration_text)
    return QuantizationTexts(calibration, evaluation, windows)


def calibration_text(run: Path | None, tokenizer: Tokenizer, file: Path | str | None, whole: bool) -> CalibrationText:
    """The text to calibrate on.

    Args:
        run: The source's folder if it is a run, whose training data is the default.
        tokenizer: The source's tokenizer.
        file: A text file.
        whole: Whether to use all of `file`; else its last tenth is left for evaluation.
    """
    tokens = _SPREAD * CALIBRATION_TOKENS
    if file is not None:
        text = text_of_file(file, tokenizer, tokens)
        return text if whole else _split(text, tokenizer)[0]
    if run is not None:
        return CalibrationText("training data of the run", _run_tokens(run, "train", tokens)[0])
    return _tokenize("Python's language reference (first four fifths)", _builtin_topics()[0], tokenizer, tokens)


def eval_text(
    run: Path | None, tokenizer: Tokenizer, file: Path | str | None, calibrated_on: Path | str | None
) -> EvalText:
    """The text to evaluate on.

    The default is the last tenth of the file `calibrated_on`, else a run's validation data, else the fifth of the
    built-in text that `calibration_text` leaves.
    """
    if file is not None:
        return _first_tokens(str(file), map(conversation_as_text, read_documents([file])), tokenizer)
    if calibrated_on is not None:
        return _split(text_of_file(calibrated_on, tokenizer, _SPREAD * CALIBRATION_TOKENS), tokenizer)[1]
    if run is not None:
        tokens, size = _run_tokens(run, "validation", EVAL_TOKENS)
        return EvalText("validation data of the run", [tokens.tolist()], size)
    document = Document("Python's language reference", split_pieces(iter(("".join(_builtin_topics()[1]),))))
    return _first_tokens(f"{document.location} (last fifth)", [document], tokenizer)


def text_of_file(path: Path | str, tokenizer: Tokenizer, tokens: int) -> CalibrationText:
    """The first `tokens` tokens of a file of any kind that `read_documents` reads."""
    documents = (conversation_as_text(document).pieces for document in read_documents([path]))
    pieces = (piece for document in documents for piece in itertools.chain(["\n\n"], document))
    return _tokenize(str(path), itertools.islice(pieces, 1, None), tokenizer, tokens)


def _tokenize(name: str, pieces: Iterable[str], tokenizer: Tokenizer, tokens: int) -> CalibrationText:
    """The first `tokens` tokens of the joined pieces."""
    text = ""
    for piece in pieces:
        text += piece
        if len(text) > _CHARS_PER_TOKEN * tokens:
            break
    ids = tokenizer.encode(text)[:tokens]
    if len(ids) < 2:
        raise DataError(f"{name} has too little text", "a longer text")
    return CalibrationText(name, np.array(ids, np.int32))


def _first_tokens(name: str, documents: Iterable[Document], tokenizer: Tokenizer) -> EvalText:
    return _check_length(EvalText(name, *first_tokens(tokenizer, documents, EVAL_TOKENS)))


def _check_length(text: EvalText) -> EvalText:
    if not text.predicted:
        raise DataError(f"{text.name} has too little text", "a longer text")
    return text


def _split(text: CalibrationText, tokenizer: Tokenizer) -> tuple[CalibrationText, EvalText]:
    """The first nine tenths for calibration, the last tenth for evaluation."""
    at = len(text.tokens) * 9 // 10
    first, last = text.tokens[:at], text.tokens[at : at + EVAL_TOKENS].tolist()
    total_bytes, first_token_bytes = (len(tokenizer.decode(part).encode("utf-8")) for part in (last, last[:1]))
    rest = EvalText(f"{text.name} (last tenth)", [last], max(1, total_bytes - first_token_bytes))
    return CalibrationText(f"{text.name} (without its last tenth)", first), _check_length(rest)


def _builtin_topics() -> tuple[list[str], list[str]]:
    """The first four fifths of the built-in text's topics, and the others."""
    topics = ["\n\n".join(m["content"] for m in messages) + "\n\n" for messages in python_reference()]
    split = len(topics) * 4 // 5
    return topics[:split], topics[split:]


def _run_tokens(folder: Path, split: str, tokens: int) -> tuple[np.ndarray, int]:
    """Up to `tokens` tokens of a run's data, and the bytes of all but the first, by the mean over all data."""
    from mlxlm.train import Run  # only for runs: it imports the optimizers

    try:
        run = Run.open(folder)
        run.check_data()
        if run.settings.grpo is not None:
            raise DataError(f"{folder} was trained on prompts, which are no text to predict")
        data = TokenDataset.open(run.data, split)
    except MlxlmError as error:
        name = "calibration_text" if split == "train" else "eval_text"
        option = f"--{name.replace('_', '-')} FILE"
        raise type(error)(error.message, f"a file as {name} ({option}) instead of the run's data") from error
    count = min(tokens, len(data))
    size = round(data.bytes * max(0, count - 1) / len(data))
    return np.array(data.slice(0, count), np.int32), size

"""How well a model predicts a text of any length: each token once, in windows that slide over it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxlm.data import Document
from mlxlm.evaluate.losses import perplexity, sum_nll
from mlxlm.evaluate.windows import DocumentTokens, window_lengths, windows
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import CheckpointError, DataError

_TOGETHER = 2048  # tokens of the windows in one forward pass, up to twice as many: more make it no faster


@dataclass(frozen=True)
class TextLoss:
    """What `evaluate_text` found: sums over every token that was predicted.

    nats: the sum of -log p. tokens: how many. bytes, characters: of the text that they stand for (UTF-8, Unicode).
    documents: how many texts.
    """

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    characters: int = 0
    documents: int = 0

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Unlike a loss per token, this and bits per character can be compared between tokenizers."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        return self.nats / math.log(2) / self.characters if self.characters else math.nan

    def __add__(self, other: TextLoss) -> TextLoss:
        return TextLoss(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """The sums and the means; None for what is not a number."""
        means = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
        }
        return {**{name: value if math.isfinite(value) else None for name, value in means.items()}, **asdict(self)}


def evaluate_text(
    lm: LoadedModel, documents: Iterable[Document], *, context_length: int | None = None, stride: int | None = None
) -> TextLoss:
    """Predict each token of each document once, of every document by itself.

    A window of `context_length` tokens (default: the model's, at most 2048) moves on by `stride` (default: half of it), and
    what it reads anew is predicted: every token has `context_length` - `stride` tokens before it or more, or all there are.
    A smaller stride takes longer and mostly gives a lower loss, since tokens have more before them (Hugging Face,
    "Perplexity of fixed-length models"); not where a model uses distant tokens badly. A document begins with what the
    tokenizer puts in front of a text; where that is nothing, its first token is not predicted, and its bytes don't
    count. Memory: one window's tokens, and some pieces of text.

    Raises ConfigError for a context or stride that can't work, DataError for conversations, and where there is no token
    to predict, CheckpointError where the loss is not a number.
    """
    context_length, stride = window_lengths(lm.config.max_position_embeddings, context_length, stride)
    waiting = _Waiting(lm.model)
    size, characters, count = 0, 0, 0
    for document in documents:
        text = DocumentTokens(lm.tokenizer, document)
        for window, new in windows(text.chunks(), context_length, stride):
            waiting.add(window, new)
        size, characters, count = size + text.bytes, characters + text.characters, count + 1
    waiting.flush()
    if not waiting.tokens:
        raise DataError("the text has no token to predict", "a longer text")
    if not math.isfinite(waiting.nats):
        raise CheckpointError(f"{lm.path}: the model's loss is not a number", "a checkpoint without NaN")
    return TextLoss(waiting.nats, waiting.tokens, size, characters, count)


class _Waiting:
    """Windows of about one length until they fill a batch: padded behind, where no token of a window sees it."""

    def __init__(self, model):
        self._model = model
        self._windows: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
        self.nats = 0.0
        self.tokens = 0

    def add(self, window: list[int], new: int) -> None:
        # By powers of two of the length and of what is predicted: no row is more than half padding.
        kind = (len(window).bit_length(), new.bit_length())
        rows = self._windows.setdefault(kind, [])
        rows.append((window, new))
        if len(rows) << kind[0] >= 2 * _TOGETHER:  # each is shorter than 1 << kind[0]
            self._predict(self._windows.pop(kind))

    def flush(self) -> None:
        for rows in self._windows.values():
            self._predict(rows)
        self._windows.clear()

    def _predict(self, rows: list[tuple[list[int], int]]) -> None:
        columns = max(len(window) for window, _ in rows)
        tokens = np.zeros((len(rows), columns), np.int32)
        weights = np.zeros((len(rows), columns - 1), np.float32)
        for row, (window, new) in enumerate(rows):
            tokens[row, : len(window)] = window
            weights[row, len(window) - 1 - new : len(window) - 1] = 1
            self.tokens += new
        self.nats += sum_nll(self._model, tokens, weights, start=min(len(window) - 1 - new for window, new in rows))

"""Evaluates a model on texts of any length: loss, perplexity and bits per byte, in sliding windows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxlm.backend.mlx import nn
from mlxlm.data import Document
from mlxlm.evaluate.loss import DocumentTokens, perplexity, sum_nll, window_lengths, windows
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import CheckpointError, DataError

_BATCH_TOKENS = 2048  # in one forward pass, up to twice as many: more make it no faster


@dataclass(frozen=True)
class TextLoss:
    """Sums over every predicted token.

    Attributes:
        nats: Sum of the negative log-likelihood.
        tokens: Number of predicted tokens.
        bytes: UTF-8 bytes that they stand for.
        characters: Unicode characters that they stand for.
        documents: Number of texts.
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
        """exp(loss)."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte. Unlike the loss per token, it can be compared between tokenizers."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def bits_per_character(self) -> float:
        """Bits per Unicode character."""
        return self.nats / math.log(2) / self.characters if self.characters else math.nan

    def __add__(self, other: TextLoss) -> TextLoss:
        return TextLoss(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))

    def to_dict(self) -> dict[str, Any]:
        """The sums and the means; values that are not finite are None."""
        means = {name: getattr(self, name) for name in ("loss", "perplexity", "bits_per_byte", "bits_per_character")}
        return {**{name: value if math.isfinite(value) else None for name, value in means.items()}, **asdict(self)}


def evaluate_text(
    lm: LoadedModel, documents: Iterable[Document], *, context_length: int | None = None, stride: int | None = None
) -> TextLoss:
    """Predict each token of each document once, each document separately.

    A window moves over the document, and its new tokens are predicted: every token has at least `context_length` -
    `stride` tokens of context, or all that precede it. A smaller stride takes longer and mostly gives a lower loss,
    since tokens have more context (Hugging Face, "Perplexity of fixed-length models"). A document starts with the
    tokens that the tokenizer adds (usually BOS); if it adds none, the first token is not predicted, and its bytes don't
    count. Memory: one window's tokens, and some pieces of text.

    Args:
        lm: From `mlxlm.load`.
        documents: Texts, see `mlxlm.data.read_documents`.
        context_length: Tokens of a window. None: the model's context, at most 2048.
        stride: Tokens by which a window moves. None: half a window.

    Raises:
        ConfigError: The context length or stride can't work.
        DataError: A document is a conversation, or there is no token to predict.
        CheckpointError: The loss is NaN.
    """
    context_length, stride = window_lengths(lm.config.max_position_embeddings, context_length, stride)
    batcher = _WindowBatcher(lm.model)
    size, characters, count = 0, 0, 0
    for document in documents:
        text = DocumentTokens(lm.tokenizer, document)
        for window, new in windows(text.chunks(), context_length, stride):
            batcher.add(window, new)
        size, characters, count = size + text.bytes, characters + text.characters, count + 1
    batcher.flush()
    if not batcher.tokens:
        raise DataError("the text has no token to predict", "a longer text")
    if not math.isfinite(batcher.nats):
        raise CheckpointError(f"{lm.path}: the model's loss is not a number", "a checkpoint without NaN")
    return TextLoss(batcher.nats, batcher.tokens, size, characters, count)


class _WindowBatcher:
    """Collects windows of similar lengths until they fill a batch, right-padded, and sums their loss."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._windows: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
        self.nats = 0.0
        self.tokens = 0

    def add(self, window: list[int], new: int) -> None:
        # By powers of two of the length and of the number of predicted tokens: no row is more than half padding.
        bucket = (len(window).bit_length(), new.bit_length())
        rows = self._windows.setdefault(bucket, [])
        rows.append((window, new))
        if len(rows) << bucket[0] >= 2 * _BATCH_TOKENS:  # each is shorter than 1 << bucket[0]
            self._predict(self._windows.pop(bucket))

    def flush(self) -> None:
        for rows in self._windows.values():
            self._predict(rows)
        self._windows.clear()

    def _predict(self, rows: list[tuple[list[int], int]]) -> None:
        columns = max(len(window) for window, _ in rows)
        tokens = np.zeros((len(rows), columns), np.int32)
        loss_weights = np.zeros((len(rows), columns - 1), np.float32)
        for row, (window, new) in enumerate(rows):
            tokens[row, : len(window)] = window
            loss_weights[row, len(window) - 1 - new : len(window) - 1] = 1
            self.tokens += new
        start = min(len(window) - 1 - new for window, new in rows)
        self.nats += sum_nll(self._model, tokens, loss_weights, start=start)

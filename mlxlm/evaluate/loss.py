"""Loss, perplexity and bits per byte of prepared data, and of texts over sliding windows.

The windows are the same for `evaluate`, `compare` and `quantize`, so that their numbers agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx, nn
from mlxlm.data import Document, TokenDataset
from mlxlm.data.batches import validation_batches
from mlxlm.evaluate.adaptation import AdaptiveScorer
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.scoring import first_token_bytes
from mlxlm.kernels import cross_entropy
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError

_POSITIONS = 512  # whose logits a quantized head computes at a time: 256 MB for a vocabulary of 128k
MAX_WINDOW = 2048  # default limit, in tokens: a context of 128k would take much memory and hours
_PIECES = 16  # of text that are tokenized at a time
_BATCH_TOKENS = 2048  # in one forward pass, up to twice as many: more make it no faster


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def sum_nll(
    model: nn.Module,
    tokens: np.ndarray,
    loss_weights: np.ndarray,
    segment_ids: np.ndarray | None = None,
    *,
    start: int = 0,
) -> float:
    """The weighted sum of the negative log-likelihood of a batch's targets, in nats.

    The logits of a `Decoder` are never in memory as a whole; other models compute those of one row at a time.

    Args:
        model: Is called without a cache.
        tokens: int `[B, T + 1]`, see `mlxlm.data.Batch`.
        loss_weights: float32 `[B, T]`.
        segment_ids: int `[B, T]`; None: each row is one text.
        start: Targets before this column don't count.
    """
    inputs, targets, weights = (mx.array(x) for x in (tokens[:, :-1], tokens[:, start + 1 :], loss_weights[:, start:]))
    if isinstance(model, Decoder):
        options = {} if segment_ids is None else {"segment_ids": mx.array(segment_ids)}
        hidden = model.model(inputs, **options)[:, start:].flatten(0, 1)
        return _sum_nll_of_hidden(model, hidden, targets.flatten(), weights.flatten())
    rows = (model(inputs[i : i + 1])[0, start:] for i in range(len(inputs)))
    losses = (cross_entropy(logits, targets[i]) * weights[i] for i, logits in enumerate(rows))
    return math.fsum(_value(loss.sum()) for loss in losses)


def _sum_nll_of_hidden(model: Decoder, hidden: mx.array, targets: mx.array, weights: mx.array) -> float:
    """The same for hidden states `[N, hidden_size]`, with targets and weights `[N]`."""
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    if "scales" not in head:
        return _value(model.cross_entropy(hidden, targets, weights))
    parts = (slice(first, first + _POSITIONS) for first in range(0, len(hidden), _POSITIONS))
    return math.fsum(_value((cross_entropy(model.head(hidden[p]), targets[p]) * weights[p]).sum()) for p in parts)


def _value(scalar: mx.array) -> float:
    eval_arrays(scalar)
    return scalar.item()


def window_lengths(max_length: int, context_length: int | None = None, stride: int | None = None) -> tuple[int, int]:
    """Resolve the defaults of window length and stride.

    Args:
        max_length: The model's context, in tokens.
        context_length: Tokens of a window. None: the model's context, at most 2048.
        stride: Tokens from the start of one window to the start of the next. None: half a window.

    Raises:
        ConfigError: The context length or stride can't work.
    """
    context_length = min(max_length, MAX_WINDOW) if context_length is None else context_length
    if not 1 <= context_length <= max_length:
        problem = f"a context of {context_length} tokens doesn't fit the model's context of {max_length}"
        raise ConfigError(problem, f"from 1 to {max_length}")
    stride = max(1, context_length // 2) if stride is None else stride
    if not 1 <= stride <= context_length:
        problem = f"a stride of {stride} would skip tokens with a context of {context_length}"
        raise ConfigError(problem, f"1 to {context_length}")
    return context_length, stride


def windows(chunks: Iterable[list[int]], context_length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Yield windows of up to `context_length` + 1 tokens of one document, with the number of last tokens to predict.

    These are all but the first token in the first window, then the last `stride` of each, so that every token is
    predicted once.
    """
    buffer: list[int] = []
    predicted = 1  # tokens at the start of the buffer that are predicted, or have no context
    for ids in chunks:
        buffer += ids
        start = 0
        while len(buffer) - start > context_length:
            yield buffer[start : start + context_length + 1], context_length + 1 - predicted
            start += stride
            predicted = context_length + 1 - stride
        buffer = buffer[start:]
    if len(buffer) > predicted:
        yield buffer, len(buffer) - predicted


class DocumentTokens:
    """Token ids of a text.

    It starts with the tokens that the tokenizer adds, usually BOS; if it adds none, the first token is not predicted.

    Attributes:
        bytes: UTF-8 bytes of the predicted tokens read so far.
        characters: Unicode characters of the same.

    Raises:
        DataError: The document is a conversation.
    """

    def __init__(self, tokenizer: Tokenizer, document: Document):
        if document.messages is not None:
            hint = "text; for conversations, mlxlm prepare and a training run"
            raise DataError(f"{document.location} is a conversation", hint)
        self._tokenizer, self._document = tokenizer, document
        self.bytes = self.characters = 0

    def chunks(self) -> Iterator[list[int]]:
        """Yield the token ids, once."""
        start = self._tokenizer.prefix_token_ids
        yield start
        first, pieces = True, []
        for piece in self._document.pieces:
            pieces.append(piece)
            if len(pieces) == _PIECES:
                yield self._encode(pieces, first, bool(start))
                first, pieces = False, []
        if pieces:
            yield self._encode(pieces, first, bool(start))

    def exclude_after(self, ids: list[int], count: int) -> None:
        """Subtract the bytes and characters of all but the first `count` of `ids`, which are all ids read so far."""
        if self._tokenizer.has_byte_tokens:
            self._subtract(b"".join(map(self._tokenizer.token_bytes, ids[count:])))
            return
        text, prefix = (self._tokenizer.decode(part) for part in (ids, ids[:count]))
        self.bytes -= len(text.encode("utf-8")) - len(prefix.encode("utf-8"))
        self.characters -= len(text) - len(prefix)

    def _subtract(self, text: bytes) -> None:
        self.bytes -= len(text)
        self.characters -= len(text.decode("utf-8", "ignore"))

    def _encode(self, pieces: list[str], first: bool, predicted: bool) -> list[int]:
        self.bytes += sum(len(piece.encode("utf-8")) for piece in pieces)
        self.characters += sum(map(len, pieces))
        parts = self._tokenizer.encode_batch(pieces, continues=[not first or i > 0 for i in range(len(pieces))])
        ids = [id for part in parts for id in part]
        if first and ids and not predicted:
            self._subtract(first_token_bytes(self._tokenizer, ids[0]))
        return ids


def first_tokens(tokenizer: Tokenizer, documents: Iterable[Document], count: int) -> tuple[list[list[int]], int]:
    """The first `count` token ids of `documents`, one list per document, and the bytes of those that are predicted."""
    tokens: list[list[int]] = []
    size = 0
    for document in documents:
        text, ids = DocumentTokens(tokenizer, document), []
        for chunk in text.chunks():
            ids += chunk
            if len(ids) >= count:
                break
        text.exclude_after(ids, count)
        tokens.append(ids[:count])
        size += text.bytes
        count -= len(ids)
        if count <= 0:
            break
    return tokens, size


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_dataset`: `loss` in nats per token; `tokens` is the number of predicted tokens."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


def evaluate_dataset(
    model: nn.Module,
    data: TokenDataset,
    max_seq_length: int,
    batch_size: int = 8,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    mask_prompt: bool = False,
) -> Evaluation:
    """Predict each token of `data` once, in windows.

    Bits per byte = loss / ln 2 · (tokens / bytes of all of `data`): unlike the loss per token, it can be compared
    between tokenizers. Special tokens count as tokens and have no bytes; in conversations only the answers count.

    Args:
        model: Evaluated in evaluation mode, then set back to its mode.
        data: Prepared tokens.
        max_seq_length: Predicted tokens per window.
        batch_size: Windows per batch.
        max_tokens: Predict at most this many tokens, in windows spread evenly over the data.
        document_mask: See `mlxlm.data.batches.validation_batches`.
        mask_prompt: See `mlxlm.data.batches.validation_batches`.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0.0
    masks = {"document_mask": document_mask, "mask_prompt": mask_prompt}
    try:
        for batch in validation_batches(data, batch_size, max_seq_length, max_tokens, **masks):
            weights = (
                np.ones_like(batch.tokens[:, 1:], np.float32) if batch.loss_weights is None else batch.loss_weights
            )
            total += sum_nll(model, batch.tokens, weights, batch.segment_ids)
            count += float(weights.sum())
    finally:
        model.train(training)
    loss = total / count
    tokens = data.num_targets() if mask_prompt else len(data)
    return Evaluation(loss, loss / math.log(2) * tokens / data.bytes, int(count))


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
    lm: LoadedModel,
    documents: Iterable[Document],
    *,
    context_length: int | None = None,
    stride: int | None = None,
    adapt_learning_rate: float | None = None,
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
        adapt_learning_rate: Learn each window with this learning rate after it was predicted, see `AdaptiveScorer`,
            from the first document to the last. None: the weights stay as they are.

    Raises:
        ConfigError: The context length or stride can't work, or the weights can't be adapted.
        DataError: A document is a conversation, or there is no token to predict.
        CheckpointError: The loss is NaN.
    """
    context_length, stride = window_lengths(lm.config.max_position_embeddings, context_length, stride)
    if adapt_learning_rate is None:
        scorer: _WindowBatcher | AdaptiveScorer = _WindowBatcher(lm.model)
    else:
        scorer = AdaptiveScorer(lm, context_length, adapt_learning_rate)
    size, characters, count = 0, 0, 0
    for document in documents:
        text = DocumentTokens(lm.tokenizer, document)
        for window, new in windows(text.chunks(), context_length, stride):
            scorer.add(window, new)
        size, characters, count = size + text.bytes, characters + text.characters, count + 1
    scorer.flush()
    if not scorer.tokens:
        raise DataError("the text has no token to predict", "a longer text")
    if not math.isfinite(scorer.nats):
        raise CheckpointError(f"{lm.path}: the model's loss is not a number", "a checkpoint without NaN")
    return TextLoss(scorer.nats, scorer.tokens, size, characters, count)


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

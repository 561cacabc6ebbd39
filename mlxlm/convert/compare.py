"""How much two models differ: in tensors, configuration and size, in their outputs on a text, and layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.checkpoint.huggingface import ABOUT_FILES
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.checkpoint.load import LAYER_PREFIX, HiddenState, LayerwiseModel, load_checkpoint
from mlxlm.checkpoint.mlx_lm import MlxLmConfig, WritableCheckpoint
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import validate_quantization
from mlxlm.data import Document
from mlxlm.evaluate.loss import first_tokens, window_lengths, windows
from mlxlm.families import get_quantization_config
from mlxlm.kernels import log_softmax
from mlxlm.utils.errors import CheckpointError

_IGNORED = ("quantization",)  # how weights are stored, not what the model computes
TOLERANCE = 1e-3  # relative error; summation order in float32 causes far less, 4-bit weights far more
ROUNDING = 1e-5  # nats per token; float16 rounding of weights costs 1e-7 to 1e-6, 8-bit quantization 1e-4 to 1e-3
_BATCH_TOKENS = 2048  # that go through a layer at once
_MAX_LOGITS = 1 << 22  # of each model in memory at once; some ten arrays of their size are needed
C = TypeVar("C", Checkpoint, WritableCheckpoint)
LayerProgress = Callable[[int, int], None]
_Batches = list[tuple[mx.array, mx.array]]  # inputs [B, T], targets of the last N positions [B, N]
_LogitPairs = Iterator[tuple[mx.array, mx.array, mx.array]]  # logits of A and B [n, V], targets [n]


@dataclass(frozen=True)
class TensorDiff:
    """Differences of the files of two checkpoints A and B.

    Attributes:
        tensors: Relative error |B - A| / |A| of each tensor with the same shape in both, dequantized.
        only_a: Names of tensors that only A has.
        only_b: Names of tensors that only B has.
        shape_mismatches: Name -> the two shapes.
        config: Field -> the two values.
        nbytes_a: Bytes of all tensors of A as stored.
        nbytes_b: The same of B.
        bits_per_weight_a: Average over all parameters of A.
        bits_per_weight_b: The same of B.
    """

    tensors: dict[str, float]
    only_a: list[str]
    only_b: list[str]
    shape_mismatches: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    config: dict[str, tuple[Any, Any]]
    nbytes_a: int
    nbytes_b: int
    bits_per_weight_a: float
    bits_per_weight_b: float

    @property
    def equal(self) -> bool:
        """Whether all weights are equal, however they are stored."""
        return not (any(self.tensors.values()) or self.only_a or self.only_b or self.shape_mismatches)

    def to_dict(self) -> dict[str, Any]:
        """The differences as JSON values."""
        return asdict(self)


def tensor_diff(a: AnyCheckpoint, b: AnyCheckpoint, progress: LayerProgress = lambda done, total: None) -> TensorDiff:
    """Compare two checkpoints tensor by tensor, one of each in memory. `progress(done, total)` counts tensors."""
    tensors_a, tensors_b = dequantized_tensors(a), dequantized_tensors(b)
    shared = [name for name in tensors_a if name in tensors_b]
    errors, shape_mismatches = {}, {}
    for done, name in enumerate(shared, start=1):
        if tensors_a[name].shape != tensors_b[name].shape:
            shape_mismatches[name] = (tensors_a[name].shape, tensors_b[name].shape)
        else:
            errors[name] = relative_error([(tensors_a[name].read(), tensors_b[name].read())])
        progress(done, len(shared))
    sizes = [sum(tensor.nbytes for tensor in checkpoint.tensors.values()) for checkpoint in (a, b)]
    counts = [sum(math.prod(tensor.shape) for tensor in tensors.values()) for tensors in (tensors_a, tensors_b)]
    return TensorDiff(
        tensors=errors,
        only_a=[name for name in tensors_a if name not in tensors_b],
        only_b=[name for name in tensors_b if name not in tensors_a],
        shape_mismatches=shape_mismatches,
        config=config_diff(a, b),
        nbytes_a=sizes[0],
        nbytes_b=sizes[1],
        bits_per_weight_a=8 * sizes[0] / max(counts[0], 1),
        bits_per_weight_b=8 * sizes[1] / max(counts[1], 1),
    )


def dequantized_tensors(checkpoint: AnyCheckpoint) -> LazyTensors:
    """The checkpoint's tensors, with quantized matrices in float32.

    If only mlx_lm runs the architecture and only mlx_lm has the quantization, tensors are as stored.
    """
    if isinstance(checkpoint, WritableCheckpoint):
        quantization = checkpoint.quantization
        return checkpoint.tensors if quantization is None else dequantize_tensors(checkpoint.tensors, quantization)
    quantization = get_quantization_config(checkpoint.hf_config)
    if quantization is None or any(validate_quantization(quantization)):
        return checkpoint.tensors
    return dequantize_tensors(checkpoint.tensors, quantization)


def to_float32(checkpoint: C) -> C:
    """The same weights in float32, so that rounding of activations isn't mistaken for a change of the weights."""
    tensors = {name: tensor.astype(mx.float32) for name, tensor in dequantized_tensors(checkpoint).items()}
    return checkpoint.with_tensors(tensors)


def relative_error(pairs: Iterable[tuple[mx.array, mx.array]]) -> float:
    """|B - A| / |A| over all pairs (A, B) of arrays, in float32; |B| if A is zero."""
    difference = size = 0.0
    for a, b in pairs:
        x, y = a.astype(mx.float32), b.astype(mx.float32)
        squares = mx.square(y - x).sum(), mx.square(x).sum()
        mx.eval(squares)
        difference, size = difference + squares[0].item(), size + squares[1].item()
    return math.sqrt(difference / size) if size else math.sqrt(difference)


def config_diff(a: AnyCheckpoint, b: AnyCheckpoint) -> dict[str, tuple[Any, Any]]:
    """Fields of the configurations that differ; fields of config.json if mlxlm doesn't support the architecture."""
    if not (isinstance(a, Checkpoint) and isinstance(b, Checkpoint)):
        names = sorted({*a.hf_config, *b.hf_config} - {*_IGNORED, *ABOUT_FILES})
        return {n: (a.hf_config.get(n), b.hf_config.get(n)) for n in names if a.hf_config.get(n) != b.hf_config.get(n)}
    pairs = {f.name: (getattr(a.config, f.name), getattr(b.config, f.name)) for f in fields(ModelConfig)}
    return {name: pair for name, pair in pairs.items() if name not in _IGNORED and pair[0] != pair[1]}


@dataclass(frozen=True)
class Comparison:
    """Outputs of a model B compared with those of a model A on the same text.

    Attributes:
        tokens: Number of predicted tokens.
        context_length: Tokens of a window.
        stride: Tokens from the start of one window to the start of the next.
        kl: Mean KL(A || B), nats per token.
        top1_agreement: Share of tokens for which both models have the same most likely next token.
        loss_a: Cross-entropy of A, nats per token.
        loss_b: The same of B.
        bits_per_byte_a: Cross-entropy of A in bits per byte of text; None if the number of bytes isn't known.
        bits_per_byte_b: The same of B.
        max_logit_error: Largest absolute difference of two logits.
        layers: Relative error |B - A| / |A| of the hidden states after the embedding and after each layer, by name;
            empty if the models have different sizes or run only as a whole.
        first_different_layer: The first of `layers` above `tolerance`.
        tolerance: A relative error.
    """

    tokens: int
    context_length: int
    stride: int
    kl: float
    top1_agreement: float
    loss_a: float
    loss_b: float
    bits_per_byte_a: float | None
    bits_per_byte_b: float | None
    max_logit_error: float
    layers: dict[str, float] = field(repr=False)
    first_different_layer: str | None
    tolerance: float

    @property
    def identical(self) -> bool:
        """Whether all logits and hidden states are equal."""
        return self.max_logit_error == 0 and not any(self.layers.values())

    @property
    def equal_to_rounding(self) -> bool:
        """Whether the difference is no more than summation order or float16 weights cause."""
        return self.kl < ROUNDING

    def worst_layers(self, n: int = 3) -> list[str]:
        """The layers that add most to the error, worst first: by the growth from the layer before."""
        before, growth = 0.0, {}
        for name, error in self.layers.items():
            growth[name] = error - before
            before = error
        return [name for name in sorted(growth, key=lambda name: growth[name], reverse=True)[:n] if growth[name] > 0]

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {**asdict(self), "identical": self.identical, "worst_layers": self.worst_layers()}


def compare(
    a: AnyCheckpoint,
    b: AnyCheckpoint,
    documents: Sequence[Sequence[int]],
    *,
    text_bytes: int | None = None,
    context_length: int | None = None,
    stride: int | None = None,
    tolerance: float = TOLERANCE,
    progress: LayerProgress = lambda done, total: None,
) -> Comparison:
    """Run two models on the same tokens and compare their outputs.

    Both run layer by layer, with one layer of each in memory. Models of mlx_lm run as a whole. Logits are computed in
    pieces, so that memory doesn't depend on the vocabulary.

    Args:
        a: The first model.
        b: The second model.
        documents: Tokens of each document. A document is read by itself in windows, as
            `mlxlm.evaluate.loss.evaluate_text` does; its first token is not predicted.
        text_bytes: Bytes of the text of all predicted tokens, for bits per byte.
        context_length: Tokens of a window, by default the models' context, at most 2048.
        stride: Tokens from one window to the next, by default half a window.
        tolerance: Relative error above which a layer counts as different.
        progress: Called as `progress(done, total)` after each layer.

    Raises:
        CheckpointError: The vocabularies have different sizes, an id is outside them, or values are not finite.
    """
    layers: dict[str, float] = {}
    configs: list[ModelConfig | MlxLmConfig]
    run: Callable[[_Batches], _LogitPairs]
    if isinstance(a, Checkpoint) and isinstance(b, Checkpoint):
        configs, run = [a.config, b.config], partial(_layer_by_layer, a, b, errors=layers, progress=progress)
    else:
        loaded = [load_checkpoint(a), load_checkpoint(b)]
        configs = [config for _, config in loaded]
        run = partial(_whole_models, [model for model, _ in loaded], progress=progress)
    _check_documents(a, b, documents, *(config.vocab_size for config in configs))
    max_length = min(config.max_position_embeddings for config in configs)
    context_length, stride = window_lengths(max_length, context_length, stride)
    pairs = run(_batches(documents, context_length, stride))
    totals, max_error, n = np.zeros(4), 0.0, 0
    for logits_a, logits_b, targets in pairs:
        sums, error = _sums(logits_a.astype(mx.float32), logits_b.astype(mx.float32), targets)
        totals, max_error, n = totals + sums, max(max_error, error), n + targets.size
    kl, loss_a, loss_b, agreement = (totals / n).tolist()
    for checkpoint, loss in ((a, loss_a), (b, loss_b)):
        if not math.isfinite(loss):
            raise CheckpointError(f"{checkpoint.path}: logits are not finite")
    tokens_per_byte = n / math.log(2) / text_bytes if text_bytes else None
    return Comparison(
        tokens=n,
        context_length=context_length,
        stride=stride,
        kl=kl,
        top1_agreement=agreement,
        loss_a=loss_a,
        loss_b=loss_b,
        bits_per_byte_a=tokens_per_byte and loss_a * tokens_per_byte,
        bits_per_byte_b=tokens_per_byte and loss_b * tokens_per_byte,
        max_logit_error=max_error,
        layers=layers,
        first_different_layer=next((name for name, error in layers.items() if error > tolerance), None),
        tolerance=tolerance,
    )


def tokenize_for_both(
    a: AnyCheckpoint, b: AnyCheckpoint, documents: Callable[[], Iterable[Document]], count: int
) -> tuple[list[list[int]], int]:
    """The first `count` tokens of `documents()`, and the bytes of the predicted ones.

    Raises:
        CheckpointError: The two tokenizers give different ids, so that the models can't be compared.
    """
    tokens, other = (first_tokens(c.load_tokenizer(), documents(), count) for c in (a, b))
    if tokens[0] != other[0]:
        problem = f"the tokenizers of {a.path} and {b.path} tokenize the text differently"
        raise CheckpointError(problem, "two models with one tokenizer")
    return tokens


def _check_documents(
    a: AnyCheckpoint, b: AnyCheckpoint, documents: Sequence[Sequence[int]], vocab_a: int, vocab_b: int
) -> None:
    """Raise CheckpointError unless both models can read these documents."""
    if vocab_a != vocab_b:
        problem = f"{a.path} has a vocabulary of {vocab_a} tokens and {b.path} one of {vocab_b}"
        raise CheckpointError(problem, "two models with one tokenizer")
    if not any(len(tokens) > 1 for tokens in documents):
        raise CheckpointError("the text has fewer than two tokens", "a longer text")
    for tokens in documents:
        if not all(0 <= token < vocab_a for token in tokens):
            problem = f"the text has ids outside the vocabulary of {vocab_a} tokens (up to {max(tokens)})"
            raise CheckpointError(problem, "the models' own tokenizer")


def _batches(documents: Sequence[Sequence[int]], context_length: int, stride: int) -> _Batches:
    """Windows of equal length in batches."""
    rows_by_shape: dict[tuple[int, int], list[list[int]]] = {}
    for tokens in documents:
        for window, new in windows([list(tokens)], context_length, stride):
            rows_by_shape.setdefault((len(window), new), []).append(window)
    batches = []
    for (length, new), rows in rows_by_shape.items():
        batch_size = max(1, _BATCH_TOKENS // length)
        for first in range(0, len(rows), batch_size):
            ids = mx.array(rows[first : first + batch_size])
            batches.append((ids[:, :-1], ids[:, -new:]))
    return batches


def _sums(logits_a: mx.array, logits_b: mx.array, targets: mx.array) -> tuple[np.ndarray, float]:
    """Sums over tokens of KL, the losses of A and B, and equal top tokens; and the largest error of a logit.

    Logits are `[n, V]` in float32, targets `[n]`.
    """
    log_a, log_b = log_softmax(logits_a), log_softmax(logits_b)
    losses = [-mx.take_along_axis(log, targets[:, None], axis=-1).sum() for log in (log_a, log_b)]
    agreed = (logits_a.argmax(axis=-1) == logits_b.argmax(axis=-1)).sum()
    sums = mx.stack([kl_divergence(log_a, log_b).sum(), *losses, agreed.astype(mx.float32)])
    max_error = mx.abs(logits_a - logits_b).max()
    mx.eval(sums, max_error)
    return np.array(sums, dtype=np.float64), max_error.item()


def kl_divergence(log_p: mx.array, log_q: mx.array) -> mx.array:
    """The terms of KL(p || q) from log-probabilities, p·log(p/q) - p + q, each at least 0.

    The sum of -p + q is 0. Without it, positive and negative terms cancel, which leaves only float32 rounding errors of
    a small divergence.
    """
    p, change = mx.exp(log_p), log_q - log_p
    small = p * (mx.expm1(change) - change)  # exact if q is near p, infinite if q >> p
    return mx.maximum(mx.where(mx.abs(change) < 0.5, small, mx.exp(log_q) - p - p * change), 0)


def _whole_models(models: Sequence[nn.Module], batches: _Batches, progress: LayerProgress) -> _LogitPairs:
    """Logits of two models that can't run layer by layer."""
    for done, (inputs, targets) in enumerate(batches, start=1):
        for row, target in zip(inputs, targets, strict=True):
            logits_a, logits_b = (model(row[None])[0, -target.size :] for model in models)
            yield logits_a, logits_b, target
        progress(done, len(batches))


def _layer_by_layer(
    a: Checkpoint, b: Checkpoint, batches: _Batches, errors: dict[str, float], progress: LayerProgress
) -> _LogitPairs:
    """Logits of two models, a layer at a time; adds the relative error after each layer to `errors`."""
    models = [LayerwiseModel(a), LayerwiseModel(b)]
    depths = [model.config.num_hidden_layers for model in models]
    comparable = a.config.hidden_size == b.config.hidden_size and depths[0] == depths[1]
    num_layers = max(depths)
    states = [list(model.embeddings(inputs for inputs, _ in batches)) for model in models]
    names = ["model.embed_tokens", *(f"{LAYER_PREFIX}.{index}" for index in range(num_layers))]
    for step, name in enumerate(names):
        for side, model in enumerate(models):
            if 0 < step <= depths[side]:
                block = model.load_layer(step - 1)
                for i, state in enumerate(states[side]):
                    states[side][i] = model.run(block, step - 1, i, state)
                    mx.eval(states[side][i])
                del block
        if comparable:
            errors[name] = relative_error((_merge(x), _merge(y)) for x, y in zip(*states, strict=True))
            if not math.isfinite(errors[name]):
                broken = b if all(mx.isfinite(_merge(state)).all().item() for state in states[0]) else a
                raise CheckpointError(f"{broken.path}: values after {name} are not finite")
        mx.clear_cache()  # buffers of the previous layer
        progress(step + 1, num_layers + 2)
    heads = [model.head() for model in models]
    piece = max(1, _MAX_LOGITS // a.config.vocab_size)
    for state_a, state_b, (_, targets) in zip(*states, batches, strict=True):
        flat_a, flat_b = (_flatten(state, targets.shape[1]) for state in (state_a, state_b))
        flat_targets = targets.flatten()
        for start in range(0, flat_targets.size, piece):
            rows = slice(start, start + piece)
            logits_a, logits_b = (
                head(*(None if part is None else part[:, rows] for part in state))[0]
                for head, state in zip(heads, (flat_a, flat_b), strict=True)
            )
            yield logits_a, logits_b, flat_targets[rows]
    progress(num_layers + 2, num_layers + 2)


def _merge(state: HiddenState) -> mx.array:
    residual, hidden_states = state
    return residual if hidden_states is None else residual + hidden_states


def _flatten(state: HiddenState, new: int) -> HiddenState:
    """The last `new` positions, `[B, T, hidden]` -> `[1, B·new, hidden]`: norm and head are applied per position."""
    residual, hidden = (None if part is None else part[:, -new:].reshape(1, -1, part.shape[-1]) for part in state)
    return residual, hidden

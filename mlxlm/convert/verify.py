"""Verify an output: compare its tensors and logits with the source."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import psutil

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.gguf.affine import EXACT_BITS, GROUP_SIZE
from mlxlm.checkpoint.gguf.k_quants import USE_IMPORTANCE
from mlxlm.checkpoint.lazy_tensor import LazyTensor, bitwise_equal
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.convert.compare import Comparison, compare, dequantized_tensors, to_float32
from mlxlm.convert.metadata import SAMPLE_TEXT, Check, check_metadata
from mlxlm.utils.errors import CheckpointError, TokenizerError

_AFFINE = "8 bits"  # MLX's affine format, for types of GGUF files that it can't represent
# The largest KL divergence (nats per token) that rounding to a type may cost. These bounds detect errors, not low
# quality: a misplaced matrix or a wrong rotary base costs whole nats in a trained model.
MAX_KL = {
    "F32": 1e-5, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.05, "Q4_0": 1.0, "Q4_1": 1.0, "MXFP4": 1.0, "Q2_K": 5.0,
    "Q3_K": 3.0, "Q4_K": 1.0, "Q5_0": 0.5, "Q5_1": 0.5, "Q5_K": 0.5, "Q6_K": 0.2, _AFFINE: 0.05,
}  # fmt: skip

# llama.cpp's types: weights of a block; the largest error of a weight as a share of its block's largest one; and that
# error for scales below float16's normal range, in units of 2^-25. The share is half a step of 1/127, or a whole one of
# 1/8 or 1/16 at the end of the range; 2^-11 is the scale's rounding. For K-quants it is twice the sum of half a step
# and the rounding of a group's scale and minimum (or a whole step for Q3_K, of 1/4 at the end of the range).
_ROUNDING = {
    "Q8_0": (32, 0.5 / 127 + 2**-11, 128),
    "Q4_0": (32, 1 / 8 + 2**-11, 8),
    "Q4_1": (32, 2 / 15 + 2**-10, 16),
    "MXFP4": (32, 1 / 4, 0),
    "Q5_0": (32, 1 / 16 + 2**-11, 16),
    "Q5_1": (32, 1 / 31 + 2**-10, 32),
    "Q2_K": (256, 4 * (0.5 / 3 + 1 / 15), 15 * 4),
    "Q3_K": (256, 2 * (1 / 4 + 0.5 / 32), 32 * 4),
    "Q4_K": (256, 4 * (0.5 / 15 + 1 / 63), 63 * 16),
    "Q5_K": (256, 4 * (0.5 / 31 + 1 / 63), 63 * 32),
    "Q6_K": (256, 2 * (0.5 / 32 + 0.5 / 128), 128 * 32),
}
# The largest squared relative error of a tensor: importance weights can make that of single weights large. That of a
# tensor with its rows in another order is about 2.
_MAX_SQUARED_ERROR = 0.5
_NORMS_PLUS_ONE = "norms plus one in F32"  # llama.cpp's convention for Gemma

Progress = Callable[[str, int, int], None]


def verify(
    source: WritableCheckpoint,
    written: WritableCheckpoint,
    label: str,
    progress: Progress = lambda phase, done, total: None,
    has_importance: bool = False,
) -> list[Check]:
    """Compare an output with its source.

    If every weight is equal bit for bit, the logits must be too. If weights were rounded, each must be its source
    rounded to its type, and the KL divergence of the logits at most `MAX_KL` of that type. Configuration and tokenizer
    must be equal, see `check_metadata`.

    Args:
        source: The source.
        written: The output, opened again.
        label: The output's name in errors.
        progress: Called as `progress(phase, done, total)`.
        has_importance: Whether weights were rounded with importance weights.

    Raises:
        CheckpointError: The first tensor, field or layer that differs by more.
    """
    rounded = _check_tensors(source, written, label, progress, has_importance)
    checks = [Check("tensors", "within rounding" if rounded else "equal", _rounding(rounded))]
    checks += check_metadata(source, written, label)
    if isinstance(source, ModuleCheckpoint) and (reason := _too_large(written)):  # others run layer by layer
        return [*checks, Check("logits", "skipped", reason)]
    ids, wide = comparison_tokens(source), (to_float32(source), to_float32(written))
    comparison = compare(*wide, [ids], progress=partial(progress, "comparing logits"))
    return [*checks, _check_logits(comparison, rounded, label)]


def comparison_tokens(checkpoint: WritableCheckpoint) -> list[int]:
    """Tokens to compare logits on: those of `SAMPLE_TEXT`, or pseudorandom ones without a tokenizer."""
    size = checkpoint.config.vocab_size
    try:
        ids = checkpoint.load_tokenizer().encode(SAMPLE_TEXT)
    except TokenizerError:
        ids = [(7919 * i + 31) % size for i in range(128)]
    return [i for i in ids if i < size][: checkpoint.config.max_position_embeddings]


def _check_tensors(
    source: WritableCheckpoint, written: WritableCheckpoint, label: str, on_progress: Progress, has_importance: bool
) -> set[str]:
    """The types that weights were rounded to, empty if all are equal; CheckpointError for any other change."""
    before, after = dequantized_tensors(source), dequantized_tensors(written)
    # Some formats have no tied embeddings.
    tied, tied_after = (c.config.tie_word_embeddings if isinstance(c, Checkpoint) else None for c in (source, written))
    if tied and not tied_after:
        before = {**before, "lm_head.weight": before["model.embed_tokens.weight"]}
    unmatched = [name for name in before if name not in after] + [name for name in after if name not in before]
    if unmatched:
        raise CheckpointError(f"{label}: {unmatched[0]} is in only one of source and output")
    rounded = set()
    for done, (name, tensor) in enumerate(before.items(), start=1):
        if (shape := after[name].shape) != tensor.shape:
            raise CheckpointError(f"{label}: {name} is {list(shape)} and was {list(tensor.shape)} in {source.path}")
        result = _changed(tensor, after[name], has_importance)
        if result is None:
            raise CheckpointError(f"{label}: {name} differs from {source.path}")
        if result:
            rounded.add(result)
        on_progress("comparing tensors", done, len(before))
    return rounded


def _rounding(rounded: set[str]) -> str:
    types = sorted(rounded - {_NORMS_PLUS_ONE})
    parts = ["rounded to " + ", ".join(types)] if types else []
    return "; ".join([*parts, _NORMS_PLUS_ONE] if _NORMS_PLUS_ONE in rounded else parts) or "to the bit"


def _changed(source: LazyTensor, written: LazyTensor, has_importance: bool = False) -> str | None:
    """The type that values were rounded to, or `_NORMS_PLUS_ONE`; "" if none changed, None for any other change."""
    a, b = source.read(), written.read()
    if a.dtype == b.dtype and bitwise_equal(a, b):
        return ""
    x, y = a.astype(mx.float32), b.astype(mx.float32)
    if mx.array_equal(x, y).item():
        return ""
    if has_importance and written.stored_dtype in USE_IMPORTANCE:
        near = mx.square(y - x).sum() <= _MAX_SQUARED_ERROR * mx.square(x).sum()
        return written.stored_dtype if near.item() else None
    if written.stored_dtype in _ROUNDING:
        size, share, subnormal = _ROUNDING[written.stored_dtype]
        blocks, error = mx.abs(x).reshape(-1, size), mx.abs(y - x).reshape(-1, size)
        limit = blocks.max(axis=-1, keepdims=True) * share + subnormal * 2**-25
        return written.stored_dtype if (error <= limit).all().item() else None
    if mx.array_equal(a.astype(b.dtype).astype(mx.float32), y).item():
        return written.stored_dtype
    if written.stored_dtype == "U32" and source.stored_dtype not in EXACT_BITS:
        return _AFFINE if _is_rounded_to_8_bits(x.reshape(-1, GROUP_SIZE), y.reshape(-1, GROUP_SIZE)) else None
    near = b.dtype == mx.float32 and x.ndim == 1 and (mx.abs(y - x) <= 2**-22 * mx.maximum(1, mx.abs(x))).all().item()
    return _NORMS_PLUS_ONE if near else None


def _is_rounded_to_8_bits(groups: mx.array, rounded: mx.array) -> bool:
    """Whether each value is off by at most a step, at the end of the range; `mx.quantize` has no steps below 1e-7."""
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    limit = (high - low) * (1.001 / 255) + 2**-22 * mx.maximum(mx.abs(low), mx.abs(high)) + 1e-7
    return (mx.abs(rounded - groups) <= limit).all().item()


def _check_logits(comparison: Comparison, rounded: set[str], label: str) -> Check:
    limit = max((MAX_KL.get(kind, MAX_KL["F32"]) for kind in rounded), default=MAX_KL["F32"])
    detail = f"KL {comparison.kl:.2g} nats/token, top-1 agreement {100 * comparison.top1_agreement:.1f} %"
    if comparison.identical:
        return Check("logits", "equal", f"to the bit over {comparison.tokens} tokens")
    if comparison.kl > limit or (not rounded and comparison.first_different_layer):
        # Without rounding, sums are in the same order: what differs is the configuration.
        first = comparison.first_different_layer or next(iter(comparison.worst_layers(1)), "the output head")
        raise CheckpointError(f"{label}: its logits differ from the source's, from {first} on ({detail})")
    return Check("logits", "within rounding", detail)


def parameter_count(checkpoint: WritableCheckpoint) -> int:
    """Number of parameters."""
    return sum(math.prod(tensor.shape) for tensor in dequantized_tensors(checkpoint).values())


def _too_large(checkpoint: WritableCheckpoint) -> str | None:
    """Why two models can't run as wholes; None if both fit in memory in float32."""
    needed = 8 * parameter_count(checkpoint)
    room = min(psutil.virtual_memory().available, platform.total_memory())
    if needed < 0.7 * room:
        return None
    return f"the two models need {needed / 1e9:.1f} GB in float32, {room / 1e9:.1f} GB are free"

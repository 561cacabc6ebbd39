"""How much two checkpoints differ in tensors, configuration and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import validate_quantization
from mlxlm.families import get_quantization_config

_IGNORED = ("quantization",)  # how weights are stored, not what the model computes


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


def tensor_diff(a: AnyCheckpoint, b: AnyCheckpoint, progress: Callable[[int, int], None] | None = None) -> TensorDiff:
    """Compare two checkpoints tensor by tensor, one of each in memory. `progress(done, total)` counts tensors."""
    tensors_a, tensors_b = dequantized_tensors(a), dequantized_tensors(b)
    shared = [name for name in tensors_a if name in tensors_b]
    errors, shape_mismatches = {}, {}
    for done, name in enumerate(shared, start=1):
        if tensors_a[name].shape != tensors_b[name].shape:
            shape_mismatches[name] = (tensors_a[name].shape, tensors_b[name].shape)
        else:
            errors[name] = relative_error([(tensors_a[name].read(), tensors_b[name].read())])
        if progress is not None:
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
    if isinstance(checkpoint, Checkpoint):
        return dequantize_tensors(checkpoint.tensors, checkpoint.config.quantization or {})
    quantization = get_quantization_config(checkpoint.hf_config)
    if quantization is None or any(validate_quantization(quantization)):
        return checkpoint.tensors
    return dequantize_tensors(checkpoint.tensors, quantization)


def to_float32(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights in float32, so that rounding of activations isn't mistaken for a change of the weights."""
    tensors = {name: tensor.astype(mx.float32) for name, tensor in dequantized_tensors(checkpoint).items()}
    return replace(checkpoint, tensors=tensors, config=checkpoint.config.with_changes(quantization=None))


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
        names = sorted({*a.hf_config, *b.hf_config} - {*_IGNORED, "quantization_config"})
        return {n: (a.hf_config.get(n), b.hf_config.get(n)) for n in names if a.hf_config.get(n) != b.hf_config.get(n)}
    pairs = {f.name: (getattr(a.config, f.name), getattr(b.config, f.name)) for f in fields(ModelConfig)}
    return {name: pair for name, pair in pairs.items() if name not in _IGNORED and pair[0] != pair[1]}

"""How far two checkpoints are apart as files: tensors, configuration, size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import validate_quantization
from mlxlm.families import get_quantization_config

_APART = ("quantization",)  # how it is stored, not what it is


@dataclass(frozen=True)
class TensorDiff:
    """tensors: relative error |B - A| / |A| of each tensor that both have in one shape, dequantized. only_a, only_b:
    names that one of them has; reshaped: name -> the two shapes. config: field -> the two values.
    nbytes_*: all tensors as stored. bits_per_weight_*: of all parameters.
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
        """Whether every weight is equal to the bit (of the value, not of its storage)."""
        return not (any(self.tensors.values()) or self.only_a or self.only_b or self.shape_mismatches)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tensor_diff(a: Checkpoint, b: Checkpoint, progress: Callable[[int, int], None] | None = None) -> TensorDiff:
    """Compare two checkpoints tensor by tensor, one of each in memory. `progress(done, total)` counts tensors."""
    tensors_a, tensors_b = dequantized_tensors(a), dequantized_tensors(b)
    shared = [name for name in tensors_a if name in tensors_b]
    errors, shape_mismatches = {}, {}
    for done, name in enumerate(shared, start=1):
        if tensors_a[name].shape != tensors_b[name].shape:
            shape_mismatches[name] = (tensors_a[name].shape, tensors_b[name].shape)
        else:
            errors[name] = relative_error(tensors_a[name], tensors_b[name])
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


def dequantized_tensors(checkpoint: Checkpoint) -> LazyTensors:
    """The checkpoint's tensors, quantized matrices in float32.

    An architecture that only mlx_lm has may be quantized in a way that only mlx_lm has, too: then it stays as it is.
    """
    if checkpoint.config is not None:
        return dequantize_tensors(checkpoint.tensors, checkpoint.config.quantization or {})
    quantization = get_quantization_config(checkpoint.hf_config)
    if quantization is None or any(validate_quantization(quantization)):
        return checkpoint.tensors
    return dequantize_tensors(checkpoint.tensors, quantization)


def to_float32(checkpoint: Checkpoint) -> Checkpoint:
    """The same weights in float32, so that rounding while computing isn't taken for a change of the files."""
    tensors = {name: tensor.astype(mx.float32) for name, tensor in dequantized_tensors(checkpoint).items()}
    return replace(checkpoint, tensors=tensors, config=checkpoint.config.with_changes(quantization=None))


def relative_error(a: LazyTensor, b: LazyTensor) -> float:
    """|B - A| / |A|, 0 only where all values are equal; |B| where A is zero."""
    x, y = a.read().astype(mx.float32), b.read().astype(mx.float32)
    apart, size = mx.linalg.norm((y - x).flatten()), mx.linalg.norm(x.flatten())
    mx.eval(apart, size)
    return apart.item() / size.item() if size.item() else apart.item()


def config_diff(a: Checkpoint, b: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Fields of the configuration with other values; of a file's own where mlxlm doesn't read the architecture."""
    if a.config is None or b.config is None:
        names = sorted({*a.hf_config, *b.hf_config} - {*_APART, "quantization_config"})
        return {n: (a.hf_config.get(n), b.hf_config.get(n)) for n in names if a.hf_config.get(n) != b.hf_config.get(n)}
    pairs = {f.name: (getattr(a.config, f.name), getattr(b.config, f.name)) for f in fields(ModelConfig)}
    return {name: pair for name, pair in pairs.items() if name not in _APART and pair[0] != pair[1]}

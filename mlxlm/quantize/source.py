"""The model that is quantized, with its weights in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.huggingface import check_tokenizer
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, max_abs
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.utils.errors import CheckpointError

DTYPES_16BIT = (mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Source:
    """A model to quantize.

    Attributes:
        checkpoint: As it was opened, quantized or not.
        dtype: float16 or bfloat16, for everything that isn't quantized.
        checkpoint_16bit: The same checkpoint, dequantized, with floating-point tensors in `dtype`.
        parameters: Number of parameters.
    """

    checkpoint: WritableCheckpoint
    dtype: mx.Dtype
    checkpoint_16bit: WritableCheckpoint
    parameters: int

    def with_tensors(self, plan: QuantizationPlan, tensors: LazyTensors) -> WritableCheckpoint:
        """The checkpoint with tensors that were quantized by `plan`."""
        return self.checkpoint.with_tensors(tensors, plan.quantization_config())


def open_source(source: Path | str, adapter: Path | str | None = None) -> Source:
    """Open a checkpoint, with an adapter or without, and choose its 16-bit dtype.

    Raises:
        CheckpointError: The model can't be run.
        TokenizerError: It has a tokenizer that can't be read.
    """
    checkpoint = open_module_checkpoint(source, adapter)
    check_tokenizer(checkpoint)  # before hours of work
    tensors = dequantized_tensors(checkpoint)
    dtype = output_dtype(tensors)
    checkpoint_16bit = checkpoint.with_tensors(cast_to_16bit(tensors, dtype, checkpoint.keeps_dtype))
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return Source(checkpoint, dtype, checkpoint_16bit, parameters)


def output_dtype(tensors: LazyTensors) -> mx.Dtype:
    """The 16-bit dtype for a model: that of most of its values.

    For a float32 model float16 if it can represent all values, since it has three more bits of precision, else
    bfloat16; this reads the tensors once, one at a time.

    Raises:
        CheckpointError: A float32 tensor has NaN or infinite values.
    """
    sizes = dict.fromkeys(DTYPES_16BIT, 0)
    float32_tensors = []
    for name, tensor in tensors.items():
        if tensor.dtype in sizes:
            sizes[tensor.dtype] += tensor.nbytes
        elif mx.issubdtype(tensor.dtype, mx.floating):
            float32_tensors.append((name, tensor))
    if any(sizes.values()):
        return max(sizes, key=lambda dtype: sizes[dtype])
    largest = max((_max_abs(name, tensor.read()) for name, tensor in float32_tensors), default=0.0)
    return mx.float16 if largest < mx.finfo(mx.float16).max else mx.bfloat16


def cast_to_16bit(
    tensors: LazyTensors, dtype: mx.Dtype, keeps_dtype: Callable[[str], bool] = lambda name: False
) -> dict[str, LazyTensor]:
    """The tensors with every floating-point one in `dtype`, except those for whose names `keeps_dtype` is true.

    Reading one whose values are not finite, or beyond the dtype's range, raises CheckpointError.
    """
    stored_dtype = {mx.float16: "F16", mx.bfloat16: "BF16"}[dtype]

    def cast(name: str, tensor: LazyTensor) -> LazyTensor:
        if not mx.issubdtype(tensor.dtype, mx.floating) or keeps_dtype(name):
            return tensor

        def read() -> mx.array:
            value = tensor.read()
            largest = _max_abs(name, value)
            if largest > mx.finfo(dtype).max:
                raise CheckpointError(f"{name} has values up to {largest:g}, too large for 16 bits")
            return value.astype(dtype)

        return LazyTensor(tensor.shape, dtype, stored_dtype, 2 * math.prod(tensor.shape), read)

    return {name: cast(name, tensor) for name, tensor in tensors.items()}


def _max_abs(name: str, value: mx.array) -> float:
    """The largest magnitude. Raises CheckpointError for NaN or infinity."""
    largest = max_abs(value)
    if not largest < math.inf:
        raise CheckpointError(f"{name} has values that are not finite", "an earlier checkpoint")
    return largest

"""Functions that are one operation of a graph on a GPU, and many on a CPU.

While launches are recorded (`tests/launches.py`), each is one operation on a simulated GPU, too: `mx.depends` of zeros
on the inputs and on an array that holds the name. Such a graph has the right structure and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce, wraps
from types import ModuleType
from typing import Any

from tests.simulated_gpu.install import SimulatedGPU

PREFIX = "mlx:"
_DECODE_DIMS, _PREFILL_DIMS = (64, 96, 128, 256), (64, 72, 80, 96, 128)


def primitive(
    mx: ModuleType, name: str, inputs: Sequence[Any], outputs: Sequence[tuple[Sequence[int], Any]], *arguments: Any
) -> list[Any]:
    """Arrays of these shapes and dtypes, as the results of one operation of a graph."""
    zeros = [mx.zeros(shape, dtype) for shape, dtype in outputs]
    mx.eval.__wrapped__(zeros)
    description = mx.array(list(" ".join([PREFIX + name, *map(str, arguments)]).encode()), mx.uint8)
    return list(mx.depends(zeros, [*inputs, description]))


def replace_functions(mx: ModuleType, gpu: SimulatedGPU) -> None:
    """Let these functions of `mlx.core` be one operation each while `gpu.recording`."""

    def promoted(*arrays: Any) -> Any:
        return reduce(mx.result_type, (x.dtype for x in arrays if x is not None))

    def norm(name: str) -> Callable[..., Any]:
        def normalize(_: Any, x: Any, *parameters: Any, **options: Any) -> Any:
            arrays = [a for a in (*parameters, *options.values()) if isinstance(a, mx.array)]
            x = x.astype(promoted(x, *arrays))
            return primitive(mx, name, [x, *arrays], [(x.shape, x.dtype)])[0]

        return normalize

    def rope(_: Any, a: Any, dims: int, *, offset: Any, freqs: Any = None, **options: Any) -> Any:
        inputs = [a, offset if isinstance(offset, mx.array) else mx.array(offset, mx.int32)]
        inputs += [] if freqs is None else [freqs.astype(mx.float32)]
        return primitive(mx, "RoPE", inputs, [(a.shape, a.dtype)], dims)[0]

    def attention(original: Any, q: Any, k: Any, v: Any, *, mask: Any = None, sinks: Any = None, **options: Any) -> Any:
        (B, H, T, D), S, fused = q.shape, k.shape[2], q.shape[3] == v.shape[3]
        if T > 8:
            fused = fused and D in _PREFILL_DIMS
        else:
            fused = fused and D in _DECODE_DIMS and T <= S and T * H // k.shape[1] <= 32
        if not fused:
            return original(q, k, v, mask=mask, sinks=sinks, **options)
        dtype = promoted(q, k, v)
        inputs = [x.astype(dtype) for x in (q, k, v)]
        if isinstance(mask, mx.array):
            mask = mask if mask.dtype == mx.bool_ else mask.astype(dtype)
            inputs.append(mx.broadcast_to(mask, (B, H, T, S)))
        inputs += [] if sinks is None else [sinks.astype(dtype)]
        return primitive(mx, "ScaledDotProductAttention", inputs, [(q.shape, dtype)])[0]

    def quantize(_: Any, w: Any, group_size: int = 64, bits: int = 4, mode: str = "affine") -> Any:
        assert mode == "affine"
        scales = (*w.shape[:-1], w.shape[-1] // group_size), w.dtype
        packed = (*w.shape[:-1], w.shape[-1] * bits // 32), mx.uint32
        return tuple(primitive(mx, "Quantize", [w], [packed, scales, scales]))

    def dequantize(
        _: Any, w: Any, scales: Any, biases: Any, group_size: int = 64, bits: int = 4, mode: str = "affine"
    ) -> Any:
        assert mode == "affine"
        shape = *w.shape[:-1], w.shape[-1] * 32 // bits
        return primitive(mx, "Quantize", [w, scales, biases], [(shape, scales.dtype)])[0]

    def replace(module: Any, name: str, function: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs) if gpu.recording else original(*args, **kwargs)

        setattr(module, name, call)

    for name, function in (("rms_norm", norm("RMSNorm")), ("layer_norm", norm("LayerNorm")), ("rope", rope)):
        replace(mx.fast, name, function)
    replace(mx.fast, "scaled_dot_product_attention", attention)
    replace(mx, "quantize", quantize)
    replace(mx, "dequantize", dequantize)

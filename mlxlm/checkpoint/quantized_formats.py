"""Weights that other programs quantized: GPTQ, AWQ, compressed-tensors, FP8, bitsandbytes and MXFP4.

Integers with a scale and a zero point for each group of neighboring inputs become MLX's affine format, repacked when
they are read: `(code - zero point) * scale` is `code * scale + bias`. Every other matrix is dequantized when it is
read, in float32. MXFP4, in which OpenAI publishes the experts of GPT-OSS, is a format of MLX. The names and layouts
of the parts are those of the program that wrote them, `quant_method` in config.json: `gptq`
(https://github.com/ModelCloud/GPTQModel), `awq` (https://github.com/casper-hansen/AutoAWQ, layout GEMM),
`compressed-tensors` (https://github.com/vllm-project/compressed-tensors), `fp8` and `fbgemm_fp8` (transformers), and
`bitsandbytes` (https://github.com/bitsandbytes-foundation/bitsandbytes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, dtype_sizes
from mlxlm.checkpoint.quantized_module import (
    FLOATS,
    HINT,
    Integers,
    QuantizedModule,
    config_groups,
    decode,
    look_up,
    scale_blocks,
    to_numpy,
    to_words,
)
from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_count, is_number
from mlxlm.config.quantization import Format, quantization_settings
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import parse_json_object

# Parts of a quantized module besides its weight and bias; scales of activations and caches aren't needed.
_PART = re.compile(
    r"(.+)\.(qweight|qzeros|scales|g_idx"
    r"|weight_(?:packed|shape|scale|scale_inv|zero_point|g_idx|format)|SCB"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
    r"|(?:input|output|activation|q|k|v)_(?:scale|zero_point)|input_scale_ub)"
)
_MAX_QUANT_STATE = 4096  # bytes of bitsandbytes' JSON, about 200
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def read_quantized(
    tensors: LazyTensors, settings: Mapping[str, Any], source: str
) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """Replace the parts of quantized modules by MLX's packed weights, scales and biases, or by a dequantized weight.

    Dequantized weights are float32 on a CPU, else of the dtype that most other tensors have.

    Args:
        tensors: A file's tensors.
        settings: config.json's `quantization_config`; its `quant_method` is one of `families.SUPPORTED_QUANT_METHODS`.
        source: Name of the file or folder, for errors.

    Returns:
        The tensors, and MLX's `quantization` of those that are packed; None if all are dequantized.

    Raises:
        CheckpointError: Names the module and the part that is missing, has another shape or dtype, or has a layout that
            isn't supported.
    """
    if settings["quant_method"] == "mxfp4":
        return _read_mxfp4(tensors, source)
    parts: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
    result = {name: tensor for name, tensor in tensors.items() if not _PART.fullmatch(name)}
    for module, own in parts.items():
        if (weight := result.pop(f"{module}.weight", None)) is not None:
            own["weight"] = weight
    sizes = dtype_sizes(tensor for tensor in result.values() if tensor.dtype in FLOATS)
    dtype = mx.float32 if ON_CPU or not sizes else getattr(mx, sizes.most_common(1)[0][0])
    read_weight = _METHODS[settings["quant_method"]]
    formats: dict[str, Format] = {}
    for name, own in parts.items():
        values = read_weight(QuantizedModule(source, name, own, settings, dtype))
        if isinstance(values, Integers) and (group_size := values.group_size()) is not None:
            formats[name] = Format(values.bits, group_size)
            result |= {f"{name}.{part}": tensor for part, tensor in values.packed(group_size).items()}
        elif values is not None:
            result[f"{name}.weight"] = values.dequantized() if isinstance(values, Integers) else values
    return result, quantization_settings(formats) if formats else None


def _read_mxfp4(tensors: LazyTensors, source: str) -> tuple[dict[str, LazyTensor], dict[str, Any] | None]:
    """MXFP4: stacks of matrices as `NAME_blocks`, two values in a byte, the first in its lower half, and `NAME_scales`.

    MLX has the same bits in words. The weights are named NAME; `families.gpt_oss` lists what is called so.
    """
    result, format = dict(tensors), Format.of("mxfp4")
    names = [name for name in tensors if name.endswith("_blocks")]
    for name in names:
        blocks, stem = result.pop(name), name.removesuffix("_blocks")
        scales = result.get(f"{stem}_scales")
        if len(blocks.shape) != 4 or blocks.shape[-1] * 2 != format.group_size or blocks.dtype != mx.uint8:
            raise CheckpointError(
                f"{source}: {name} is {list(blocks.shape)}, it must be [experts, out, groups, 16] bytes"
            )
        if scales is None or scales.shape != blocks.shape[:-1] or scales.dtype != mx.uint8:
            raise CheckpointError(f"{source}: {stem}_scales must be {list(blocks.shape[:-1])} bytes, for {name}")
        *rows, groups, _ = blocks.shape
        words = blocks.transform(lambda value: value.view(mx.uint32).flatten(-2), (*rows, groups * 4), mx.uint32)
        result[stem] = replace(words, stored_dtype="MXFP4")
    return result, format.to_dict() if names else None


def without_zero_biases(tensors: LazyTensors, config: ModelConfig) -> dict[str, LazyTensor]:
    """Leave out biases of zeros that the model doesn't have; AutoGPTQ writes one for each quantized matrix."""
    biasless = {
        f"model.layers.{layer}.{matrix.module}.bias"
        for layer, kind in enumerate(config.layer_sublayers)
        for sublayer in kind
        for matrix in sublayer.matrices
        if not matrix.bias
    }
    return {name: t for name, t in tensors.items() if name not in biasless or mx.any(t.read() != 0).item()}


_Weight = LazyTensor | Integers | None  # None: the module has only scales of activations


def _gptq(m: QuantizedModule) -> _Weight:
    """Codes are packed along the inputs, `[in * bits / 32, out]`, zero points along the outputs."""
    if "qweight" not in m.parts:
        return m.parts.get("weight")
    layout = m.settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise m.error(f": GPTQ's checkpoint_format {layout!r} isn't supported", "gptq or gptq_v2")
    qweight = m.part("qweight", mx.int32)
    packed, out = qweight.shape
    index = m.parts.get("g_idx")
    width = math.prod(index.shape) if index else packed * 32 // m.count(m.settings, "bits")
    bits = m.bits(packed, width, (2, 4, 8))
    scales = m.part("scales", *FLOATS)
    groups = scales.shape[0]
    m.part("scales", *FLOATS, shape=(max(groups, 1), out))
    m.bits(qzeros_words := out * bits // 32, out, (bits,))
    qzeros = m.part("qzeros", mx.int32, shape=(groups, qzeros_words))
    read_index = m.group_index("g_idx", groups, width)
    # The first version stores zero points minus one, with a subtraction from whole words.
    offset = sum(1 << shift for shift in range(0, 32, bits)) if layout == "gptq" else 0

    return Integers(
        m,
        (out, width),
        bits,
        f"GPTQ_INT{bits}",
        codes=lambda: np.ascontiguousarray(to_words(qweight).T),
        scales=lambda: to_numpy(scales).T,
        zeros=lambda: decode(to_words(qzeros) + np.uint32(offset), bits).T,
        groups=groups,
        index=read_index,
    )


def _awq(m: QuantizedModule) -> _Weight:
    """Codes and zero points are packed along the outputs, eight in a word, in the order `_AWQ_ORDER`."""
    if "qweight" not in m.parts:
        return m.parts.get("weight")
    layout = str(m.settings.get("version") or m.settings.get("format") or "gemm").lower()
    if layout != "gemm" or m.settings.get("bits", 4) != 4:
        raise m.error(f": AWQ's layout {layout} with {m.settings.get('bits', 4)} bits isn't supported", "gemm, 4 bits")
    qweight = m.part("qweight", mx.int32)
    width, packed = qweight.shape
    scales = m.part("scales", *FLOATS)
    groups, out = scales.shape[0], packed * 8
    m.part("scales", *FLOATS, shape=(max(groups, 1), out))
    qzeros = m.part("qzeros", mx.int32, shape=(groups, packed))
    read_index = m.group_index("g_idx", groups, width)
    m.bits(width // 8, width, (4,))

    def codes() -> np.ndarray:
        words = to_words(qweight).reshape(width // 8, 8, packed)  # 8 inputs become one word
        shifts = np.arange(0, 32, 4, dtype=np.uint32)[:, None]
        result = np.empty((width // 8, packed, 8), np.uint32)
        for position, column in enumerate(_AWQ_ORDER):
            result[..., column] = np.bitwise_or.reduce((words >> np.uint32(4 * position) & 15) << shifts, axis=1)
        return np.ascontiguousarray(result.reshape(width // 8, out).T)

    def zeros() -> np.ndarray:
        values = decode(to_words(qzeros), 4).reshape(groups, packed, 8)
        return values[..., np.argsort(_AWQ_ORDER)].reshape(groups, out).T

    return Integers(
        m,
        (out, width),
        4,
        "AWQ_INT4",
        codes=codes,
        scales=lambda: to_numpy(scales).T,
        zeros=zeros,
        groups=groups,
        index=read_index,
    )


def _compressed_tensors(m: QuantizedModule) -> _Weight:
    """Packed integers (`weight_packed`), int8 or FP8 with scales."""
    for group in (m.settings, *config_groups(m.settings)):
        if (layout := group.get("format") or "mixed-precision") not in _COMPRESSED_FORMATS:
            raise m.error(f": compressed-tensors' format {layout!r} isn't supported", HINT)
    if m.settings.get("transform_config"):
        raise m.error(": compressed-tensors' transform_config isn't supported", HINT)
    if "weight_packed" in m.parts:
        return _packed(m)
    if "weight_scale" not in m.parts:
        return m.parts.get("weight")
    weight = m.part("weight", mx.int8, mx.uint8)
    if weight.dtype == mx.uint8:
        return _fp8_weight(m, "weight_scale")
    scales = m.grid("weight_scale", weight.shape, *FLOATS)
    zeros = m.grid("weight_zero_point", weight.shape, mx.int8) if "weight_zero_point" in m.parts else None
    if zeros and zeros.shape != scales.shape:
        raise m.error(f".weight_zero_point is {list(zeros.shape)}, the scales are {list(scales.shape)}")

    def compute() -> np.ndarray:
        codes = to_numpy(weight).astype(np.float32)
        return scale_blocks(codes, scales.read(), zeros.read() if zeros else None, scales.block)

    return m.weight(weight.shape, "INT8", compute)


def _packed(m: QuantizedModule) -> Integers:
    """Codes are packed along the inputs, zero points along the outputs; both have half of their range added."""
    packed = m.part("weight_packed", mx.int32)
    rows = packed.shape[0]
    shape = to_numpy(m.part("weight_shape", mx.int64, mx.int32, shape=(2,))).tolist()
    if shape[0] != rows or not is_count(shape[1]):
        raise m.error(f".weight_shape is {shape}, and weight_packed has {rows} rows")
    width = shape[1]
    bits = m.bits(packed.shape[1], width, (2, 4, 8))
    scales = m.grid("weight_scale", (rows, width), *FLOATS)
    groups = scales.shape[1]
    read_index = m.group_index("weight_g_idx", groups, width)
    zeros = None
    if "weight_zero_point" in m.parts:
        zeros = m.part("weight_zero_point", mx.int32, shape=(-(-rows * bits // 32), groups))

    def read_scales() -> np.ndarray:
        return np.broadcast_to(scales.read(), (rows, groups))

    def read_zeros() -> np.ndarray:
        if zeros is None:
            return np.full((rows, groups), 1 << (bits - 1), np.float32)
        return decode(np.ascontiguousarray(to_words(zeros).T), bits).T[:rows]

    return Integers(
        m,
        (rows, width),
        bits,
        f"PACKED_INT{bits}",
        codes=lambda: to_words(packed),
        scales=read_scales,
        zeros=read_zeros,
        groups=groups,
        index=read_index,
    )


def _fp8(m: QuantizedModule) -> LazyTensor | None:
    """FP8 (E4M3) with a scale for all, each row or each block; both names of it are factors of the weight."""
    name = next((name for name in ("weight_scale_inv", "weight_scale") if name in m.parts), None)
    return m.parts.get("weight") if name is None else _fp8_weight(m, name)


def _fp8_weight(m: QuantizedModule, scale_name: str) -> LazyTensor:
    weight = m.part("weight", mx.uint8)
    if weight.stored_dtype != "F8_E4M3":
        raise m.error(f".weight is of type {weight.stored_dtype}, it must be F8_E4M3")
    scales = m.grid(scale_name, weight.shape, *FLOATS, mx.uint8, block=m.block)

    def compute() -> np.ndarray:
        values = scales.read()
        if scales.tensor.dtype == mx.uint8:  # F8_E8M0: exponents of powers of two
            values = np.exp2(values.astype(np.float32) - 127)
        table = np.array(mx.from_fp8(mx.arange(256, dtype=mx.uint8), dtype=mx.float32))
        return scale_blocks(table[to_numpy(weight)], values, block=scales.block)

    return m.weight(weight.shape, "F8_E4M3", compute)


def _bitsandbytes(m: QuantizedModule) -> LazyTensor | None:
    """int8 with the largest magnitude of each row, or 4-bit indices of a table with that of each block."""
    if "SCB" in m.parts:
        weight = m.part("weight", mx.int8)
        largest = m.part("SCB", *FLOATS, shape=weight.shape[:1])
        layout = m.parts.get("weight_format")

        def compute() -> np.ndarray:
            if layout is not None and to_numpy(layout).any():
                raise m.error(": bitsandbytes' int8 layout isn't supported", "one that is stored by rows")
            return scale_blocks(to_numpy(weight).astype(np.float32), to_numpy(largest)[:, None] / np.float32(127))

        return m.weight(weight.shape, "INT8", compute)
    state_name = next((name for name in m.parts if name.startswith("weight.quant_state.")), None)
    return m.parts.get("weight") if state_name is None else _bitsandbytes_4bit(m, state_name)


def _bitsandbytes_4bit(m: QuantizedModule, state_name: str) -> LazyTensor:
    """The first of two values is in the upper half of a byte; with double quantization, scales are quantized, too."""
    state_part = m.part(state_name, mx.uint8, rank=1)
    if state_part.nbytes > _MAX_QUANT_STATE:
        raise m.error(f".{state_name} has {state_part.nbytes} bytes, more than any model's")
    state = parse_json_object(to_numpy(state_part).tobytes(), f"{m.source}: {m.name}.{state_name}", CheckpointError)
    shape, block = state.get("shape"), m.count(state, "blocksize")
    if not (isinstance(shape, list) and len(shape) == 2 and all(map(is_count, shape))):
        raise m.error(f".{state_name} has shape {shape!r}, it must be two positive numbers")
    size = math.prod(shape)
    blocks = -(-size // block)
    weight = m.part("weight", mx.uint8, shape=(-(-size // 2), 1))
    code = m.part("weight.quant_map", mx.float32, shape=(16,))
    absmax = m.part("weight.absmax", mx.float32, mx.uint8, shape=(blocks,))
    nested = absmax.dtype == mx.uint8
    if nested:
        nested_block, offset = m.count(state, "nested_blocksize"), state.get("nested_offset")
        if not is_number(offset):
            raise m.error(f".{state_name} has nested_offset {offset!r}, it must be a number")
        nested_map = m.part("weight.nested_quant_map", mx.float32, shape=(256,))
        nested_absmax = m.part("weight.nested_absmax", mx.float32, shape=(-(-blocks // nested_block),))

    def compute() -> np.ndarray:
        scales = to_numpy(absmax)
        if nested:
            factors = np.repeat(to_numpy(nested_absmax), nested_block)[:blocks]
            scales = to_numpy(nested_map)[scales] * factors + np.float32(offset)
        values, byte = to_numpy(code), np.arange(256)
        table = np.stack([values[byte >> 4], values[byte & 15]], axis=1)
        flat = look_up(table, to_numpy(weight).reshape(1, -1))[0, :size]
        whole = size // block * block
        flat[:whole].reshape(-1, block)[...] *= scales[: whole // block, None]
        flat[whole:] *= scales[-1]
        return flat.reshape(shape)

    return m.weight((shape[0], shape[1]), state_name.rpartition("__")[2].upper(), compute)


_METHODS: dict[str, Callable[[QuantizedModule], _Weight]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
}

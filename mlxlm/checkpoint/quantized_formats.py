"""Weights that other programs quantized: GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes.

Each quantized matrix is dequantized when it is read, one at a time: `(code - zero point) * scale`, computed in float32.
The names and layouts of its parts are those of the program that wrote them, `quant_method` in config.json:
`gptq` (https://github.com/ModelCloud/GPTQModel), `awq` (https://github.com/casper-hansen/AutoAWQ, layout GEMM),
`compressed-tensors` (https://github.com/vllm-project/compressed-tensors), `fp8` and `fbgemm_fp8` (transformers), and
`bitsandbytes` (https://github.com/bitsandbytes-foundation/bitsandbytes).

NumPy decodes the packed values with a table of 256 rows: for a 4096 x 4096 matrix of 4 bits that takes 30 ms, MLX needs
200 ms on a CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, dtype_sizes
from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_count, is_number
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.json_files import parse_json_object

# Parts of a quantized module besides its weight and bias; scales of activations and caches aren't needed.
_PART = re.compile(
    r"(.+)\.(qweight|qzeros|scales|g_idx"
    r"|weight_(?:packed|shape|scale|scale_inv|zero_point|g_idx|format)|SCB"
    r"|weight\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))"
    r"|(?:input|output|activation|q|k|v)_(?:scale|zero_point)|input_scale_ub)"
)
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)
_CHUNK_ROWS = 256
_MAX_QUANT_STATE = 4096  # bytes of bitsandbytes' JSON, about 200
_HINT = "its unquantized original, and mlxlm quantize"
_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


def dequantize_formats(tensors: LazyTensors, settings: Mapping[str, Any], source: str) -> dict[str, LazyTensor]:
    """Replace the parts of quantized modules by their weights, which are dequantized when they are read.

    Weights are float32 on a CPU, else of the dtype that most other tensors have.

    Args:
        tensors: A file's tensors.
        settings: config.json's `quantization_config`; its `quant_method` is one of `families.DEQUANTIZED_METHODS`.
        source: Name of the file or folder, for errors.

    Raises:
        CheckpointError: Names the module and the part that is missing, has another shape or dtype, or has a layout that
            isn't supported.
    """
    parts: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], {})[match[2]] = tensor
    others = {name: tensor for name, tensor in tensors.items() if not _PART.fullmatch(name)}
    for module, own in parts.items():
        if (weight := others.pop(f"{module}.weight", None)) is not None:
            own["weight"] = weight
    sizes = dtype_sizes(tensor for tensor in others.values() if tensor.dtype in _FLOATS)
    dtype = mx.float32 if ON_CPU or not sizes else getattr(mx, sizes.most_common(1)[0][0])
    read_weight = _METHODS[settings["quant_method"]]
    for module, own in parts.items():
        if (weight := read_weight(_Module(source, module, own, settings, dtype))) is not None:
            others[f"{module}.weight"] = weight
    return others


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


@dataclass(frozen=True)
class _Grid:
    """Scales `[grid rows, grid columns]` of blocks of `height x width` values; the last ones may be cut off."""

    tensor: LazyTensor
    shape: tuple[int, int]
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        return _numpy(self.tensor).reshape(self.shape)


@dataclass(frozen=True)
class _Module:
    """One module of a file: its parts by name, and how its weight is described."""

    source: str
    name: str
    parts: LazyTensors
    settings: Mapping[str, Any]
    dtype: mx.Dtype

    def error(self, problem: str, hint: str | None = None) -> CheckpointError:
        return CheckpointError(f"{self.source}: {self.name}{problem}", hint)

    def part(self, name: str, *dtypes: mx.Dtype, shape: tuple[int, ...] | None = None, rank: int = 2) -> LazyTensor:
        """A part, after checking its dtype, and its shape or number of dimensions."""
        tensor = self.parts.get(name)
        if tensor is None:
            raise self.error(f" has no {name}")
        if (len(tensor.shape) != rank) if shape is None else (tensor.shape != shape):
            expected = f"{rank} dimensions" if shape is None else str(list(shape))
            raise self.error(f".{name} is {list(tensor.shape)}, it must have {expected}")
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("mlx.core.") for dtype in dtypes)
            raise self.error(f".{name} is of type {tensor.stored_dtype}, it must be {expected}")
        return tensor

    def weight(self, shape: tuple[int, ...], stored_dtype: str, compute: Callable[[], np.ndarray]) -> LazyTensor:
        """The weight, float32 `[out, in]` as `compute` returns it, in the module's dtype."""

        def read() -> mx.array:
            value = mx.array(compute()).astype(self.dtype)
            mx.eval(value)  # a lazy array would keep the float32 values
            return value

        return LazyTensor(shape, self.dtype, stored_dtype, sum(part.nbytes for part in self.parts.values()), read)

    def count(self, values: Mapping[str, Any], name: str) -> int:
        """A positive number of the settings."""
        if not is_count(value := values.get(name)):
            raise self.error(f": {name} is {value!r}, it must be a positive number")
        return value

    def bits(self, packed: int, width: int, allowed: tuple[int, ...]) -> int:
        """Bits of each of `width` values in `packed` words of 32 bits."""
        bits = packed * 32 // max(width, 1)
        if bits not in allowed or bits * width != packed * 32:
            choice = ", ".join(map(str, allowed))
            raise self.error(f" has {packed} words for {width} inputs, which are not {choice} bits for each", _HINT)
        return bits

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks that share a scale, if the settings name them."""
        block = self.settings.get("weight_block_size")
        for group in _groups(self.settings):
            weights = group.get("weights")
            block = block or (weights.get("block_structure") if isinstance(weights, Mapping) else None)
        if block is None:
            return None
        if not (isinstance(block, list) and len(block) == 2 and all(map(is_count, block))):
            raise self.error(f" has blocks of {block!r}, they must be two positive numbers")
        return block[0], block[1]

    def grid(self, name: str, shape: tuple[int, ...], *dtypes: mx.Dtype, block: tuple[int, int] | None = None) -> _Grid:
        """The scales of a matrix of this shape: one for all, for each row, for each group of columns, or each block."""
        tensor = self.part(name, *dtypes, rank=len(self.parts[name].shape) if name in self.parts else 2)
        rows, columns = shape
        grid = {(): (1, 1), (1,): (1, 1), (rows,): (rows, 1)}.get(tensor.shape, tensor.shape)
        if block and grid not in ((1, 1), (rows, 1)):
            fits = grid == (-(-rows // block[0]), -(-columns // block[1]))
        else:
            fits = len(grid) == 2 and all(grid) and not rows % grid[0] and not columns % grid[1]
            block = (rows // grid[0], columns // grid[1]) if fits else None
        if not fits or block is None:
            raise self.error(f".{name} is {list(tensor.shape)}, which doesn't fit a weight of {list(shape)}")
        return _Grid(tensor, (grid[0], grid[1]), block)

    def group_index(self, name: str, groups: int, width: int) -> Callable[[], np.ndarray | None]:
        """A function that reads the group of each column; None if they are in order and of equal size."""
        if name not in self.parts:
            if width % groups:
                raise self.error(f" has {groups} groups for {width} inputs")
            return lambda: None
        part = self.part(name, mx.int32, mx.int64, shape=(width,))

        def read() -> np.ndarray | None:
            index = _numpy(part)
            if index.min() < 0 or index.max() >= groups:
                raise self.error(f".{name} has values that are not from 0 to {groups - 1}")
            in_order = width % groups == 0 and np.array_equal(index, np.arange(width) // (width // groups))
            return None if in_order else index

        return read


def _gptq(m: _Module) -> LazyTensor | None:
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
    scales = m.part("scales", *_FLOATS)
    groups = scales.shape[0]
    m.part("scales", *_FLOATS, shape=(max(groups, 1), out))
    m.bits(qzeros_words := out * bits // 32, out, (bits,))
    qzeros = m.part("qzeros", mx.int32, shape=(groups, qzeros_words))
    read_index = m.group_index("g_idx", groups, width)
    # The first version stores zero points minus one, with a subtraction from whole words.
    offset = sum(1 << shift for shift in range(0, 32, bits)) if layout == "gptq" else 0

    def compute() -> np.ndarray:
        codes = _decode(np.ascontiguousarray(_words(qweight).T), bits)
        zeros = _decode(_words(qzeros) + np.uint32(offset), bits)
        return _scale(codes, _numpy(scales).T, zeros.T, index=read_index())

    return m.weight((out, width), f"GPTQ_INT{bits}", compute)


def _awq(m: _Module) -> LazyTensor | None:
    """Codes and zero points are packed along the outputs, eight in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    if "qweight" not in m.parts:
        return m.parts.get("weight")
    layout = str(m.settings.get("version") or m.settings.get("format") or "gemm").lower()
    if layout != "gemm" or m.settings.get("bits", 4) != 4:
        raise m.error(f": AWQ's layout {layout} with {m.settings.get('bits', 4)} bits isn't supported", "gemm, 4 bits")
    qweight = m.part("qweight", mx.int32)
    width, packed = qweight.shape
    scales = m.part("scales", *_FLOATS)
    groups, out = scales.shape[0], packed * 8
    m.part("scales", *_FLOATS, shape=(max(groups, 1), out))
    qzeros = m.part("qzeros", mx.int32, shape=(groups, packed))
    m.group_index("", groups, width)

    def decode(tensor: LazyTensor) -> np.ndarray:
        words = _words(tensor)
        ordered = np.empty((*words.shape, 4), np.uint8)
        for i in range(4):
            ordered[..., i] = (words >> (4 * i) & 15) | (words >> (4 * i + 12) & 240)
        return np.ascontiguousarray(_decode(ordered.reshape(words.shape[0], -1), 4).T)

    return m.weight((out, width), "AWQ_INT4", lambda: _scale(decode(qweight), _numpy(scales).T, decode(qzeros)))


def _compressed_tensors(m: _Module) -> LazyTensor | None:
    """Packed integers (`weight_packed`), int8 or FP8 with scales."""
    for group in (m.settings, *_groups(m.settings)):
        if (layout := group.get("format") or "mixed-precision") not in _COMPRESSED_FORMATS:
            raise m.error(f": compressed-tensors' format {layout!r} isn't supported", _HINT)
    if m.settings.get("transform_config"):
        raise m.error(": compressed-tensors' transform_config isn't supported", _HINT)
    if "weight_packed" in m.parts:
        return _packed(m)
    if "weight_scale" not in m.parts:
        return m.parts.get("weight")
    weight = m.part("weight", mx.int8, mx.uint8)
    if weight.dtype == mx.uint8:
        return _fp8_weight(m, "weight_scale")
    scales = m.grid("weight_scale", weight.shape, *_FLOATS)
    zeros = m.grid("weight_zero_point", weight.shape, mx.int8) if "weight_zero_point" in m.parts else None
    if zeros and zeros.shape != scales.shape:
        raise m.error(f".weight_zero_point is {list(zeros.shape)}, the scales are {list(scales.shape)}")

    def compute() -> np.ndarray:
        codes = _numpy(weight).astype(np.float32)
        return _scale(codes, scales.read(), zeros.read() if zeros else None, scales.block)

    return m.weight(weight.shape, "INT8", compute)


def _packed(m: _Module) -> LazyTensor:
    """Codes are packed along the inputs, zero points along the outputs; both have half of their range added."""
    packed = m.part("weight_packed", mx.int32)
    rows = packed.shape[0]
    shape = _numpy(m.part("weight_shape", mx.int64, mx.int32, shape=(2,))).tolist()
    if shape[0] != rows or not is_count(shape[1]):
        raise m.error(f".weight_shape is {shape}, and weight_packed has {rows} rows")
    width = shape[1]
    bits = m.bits(packed.shape[1], width, (2, 4, 8))
    scales = m.grid("weight_scale", (rows, width), *_FLOATS)
    groups = scales.shape[1]
    read_index = m.group_index("weight_g_idx", groups, width)
    zeros = None
    if "weight_zero_point" in m.parts:
        zeros = m.part("weight_zero_point", mx.int32, shape=(-(-rows * bits // 32), groups))

    def compute() -> np.ndarray:
        codes = _decode(_words(packed), bits)
        if zeros is None:
            zero_points = np.full(scales.shape, 1 << (bits - 1), np.float32)
        else:
            zero_points = _decode(np.ascontiguousarray(_words(zeros).T), bits).T[:rows]
        return _scale(codes, scales.read(), zero_points, scales.block, read_index())

    return m.weight((rows, width), f"PACKED_INT{bits}", compute)


def _fp8(m: _Module) -> LazyTensor | None:
    """FP8 (E4M3) with a scale for all, each row or each block; both names of it are factors of the weight."""
    name = next((name for name in ("weight_scale_inv", "weight_scale") if name in m.parts), None)
    return m.parts.get("weight") if name is None else _fp8_weight(m, name)


def _fp8_weight(m: _Module, scale_name: str) -> LazyTensor:
    weight = m.part("weight", mx.uint8)
    if weight.stored_dtype != "F8_E4M3":
        raise m.error(f".weight is of type {weight.stored_dtype}, it must be F8_E4M3")
    scales = m.grid(scale_name, weight.shape, *_FLOATS, mx.uint8, block=m.block)

    def compute() -> np.ndarray:
        values = scales.read()
        if scales.tensor.dtype == mx.uint8:  # F8_E8M0: exponents of powers of two
            values = np.exp2(values.astype(np.float32) - 127)
        table = np.array(mx.from_fp8(mx.arange(256, dtype=mx.uint8), dtype=mx.float32))
        return _scale(table[_numpy(weight)], values, block=scales.block)

    return m.weight(weight.shape, "F8_E4M3", compute)


def _bitsandbytes(m: _Module) -> LazyTensor | None:
    """int8 with the largest magnitude of each row, or 4-bit indices of a table with that of each block."""
    if "SCB" in m.parts:
        weight = m.part("weight", mx.int8)
        largest = m.part("SCB", *_FLOATS, shape=weight.shape[:1])
        layout = m.parts.get("weight_format")

        def compute() -> np.ndarray:
            if layout is not None and _numpy(layout).any():
                raise m.error(": bitsandbytes' int8 layout isn't supported", "one that is stored by rows")
            return _scale(_numpy(weight).astype(np.float32), _numpy(largest)[:, None] / np.float32(127))

        return m.weight(weight.shape, "INT8", compute)
    state_name = next((name for name in m.parts if name.startswith("weight.quant_state.")), None)
    return m.parts.get("weight") if state_name is None else _bitsandbytes_4bit(m, state_name)


def _bitsandbytes_4bit(m: _Module, state_name: str) -> LazyTensor:
    """The first of two values is in the upper half of a byte; with double quantization, scales are quantized, too."""
    state_part = m.part(state_name, mx.uint8, rank=1)
    if state_part.nbytes > _MAX_QUANT_STATE:
        raise m.error(f".{state_name} has {state_part.nbytes} bytes, more than any model's")
    state = parse_json_object(_numpy(state_part).tobytes(), f"{m.source}: {m.name}.{state_name}", CheckpointError)
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
        scales = _numpy(absmax)
        if nested:
            factors = np.repeat(_numpy(nested_absmax), nested_block)[:blocks]
            scales = _numpy(nested_map)[scales] * factors + np.float32(offset)
        values, byte = _numpy(code), np.arange(256)
        table = np.stack([values[byte >> 4], values[byte & 15]], axis=1)
        flat = _look_up(table, _numpy(weight).reshape(1, -1))[0, :size]
        whole = size // block * block
        flat[:whole].reshape(-1, block)[...] *= scales[: whole // block, None]
        flat[whole:] *= scales[-1]
        return flat.reshape(shape)

    return m.weight((shape[0], shape[1]), state_name.rpartition("__")[2].upper(), compute)


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' groups of modules with the same settings."""
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _numpy(tensor: LazyTensor) -> np.ndarray:
    """Read a tensor, 16-bit floats as float32."""
    value = tensor.read()
    return np.array(value.astype(mx.float32) if tensor.dtype in _FLOATS else value, copy=False)


def _words(tensor: LazyTensor) -> np.ndarray:
    return _numpy(tensor).view(np.uint32)


def _decode(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers of 2, 4 or 8 bits in each row, the lowest bits first, as float32."""
    shifts = np.arange(0, 8, bits)
    table = (np.arange(256)[:, None] >> shifts & (1 << bits) - 1).astype(np.float32)
    return _look_up(table, words.view(np.uint8))


def _look_up(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The rows of a table `[256, 1, 2 or 4]` for each byte of `indices` `[rows, columns]`, in one row each."""
    wide = {1: np.float32, 2: np.float64, 4: np.complex128}[table.shape[1]]  # NumPy is 8 times faster with one item
    return np.ascontiguousarray(table, np.float32).view(wide)[:, 0][indices].view(np.float32)


def _scale(
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    block: tuple[int, int] | None = None,
    index: np.ndarray | None = None,
) -> np.ndarray:
    """`(codes - zeros) * scales`, computed in place.

    Args:
        codes: float32 `[rows, columns]`.
        scales: `[grid rows, grid columns]`, one for each block of `codes`.
        zeros: Zero points of the same blocks.
        block: Rows and columns of a block, of which the last ones may be cut off. None: groups of columns in each row.
        index: `[columns]`: the column of `scales` for each column; None if they are in order.
    """
    (rows, columns), (down, across) = codes.shape, scales.shape
    if index is not None:
        for start in range(0, rows, _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            if zeros is not None:
                codes[part] -= zeros[part][:, index]
            codes[part] *= scales[part][:, index]
        return codes
    height, width = block or (1, columns // across)
    if (down * height, across * width) == (rows, columns):
        blocks = codes.reshape(down, height, across, width)
        if zeros is not None:
            blocks -= zeros[:, None, :, None]
        blocks *= scales[:, None, :, None]
        return codes
    for i in range(down):
        part = slice(i * height, (i + 1) * height)
        if zeros is not None:
            codes[part] -= np.repeat(zeros[i], width)[:columns]
        codes[part] *= np.repeat(scales[i], width)[:columns]
    return codes


_METHODS: dict[str, Callable[[_Module], LazyTensor | None]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
}

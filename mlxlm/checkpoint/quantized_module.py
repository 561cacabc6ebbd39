"""A module that another program than MLX quantized: checks of its parts, and the ways to its weight.

NumPy decodes packed values with a table of 256 rows: for a 4096 x 4096 matrix of 4 bits that takes 30 ms, MLX needs
200 ms on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config.numbers import is_count
from mlxlm.config.quantization import GROUP_SIZES
from mlxlm.utils.errors import CheckpointError

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
HINT = "its unquantized original, and mlxlm quantize"
_CHUNK_ROWS = 256


@dataclass(frozen=True)
class Grid:
    """Scales `[grid rows, grid columns]` of blocks of `height x width` values; the last ones may be cut off."""

    tensor: LazyTensor
    shape: tuple[int, int]
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        """Read the scales."""
        return to_numpy(self.tensor).reshape(self.shape)


@dataclass(frozen=True)
class QuantizedModule:
    """One module of a file: its parts by name, and how its weight is described."""

    source: str
    name: str
    parts: LazyTensors
    settings: Mapping[str, Any]
    dtype: mx.Dtype

    def error(self, problem: str, hint: str | None = None) -> CheckpointError:
        """An error that begins with the file and the module."""
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
            raise self.error(f" has {packed} words for {width} values, which are not {choice} bits for each", HINT)
        return bits

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks that share a scale, if the settings name them."""
        block = self.settings.get("weight_block_size")
        for group in config_groups(self.settings):
            weights = group.get("weights")
            block = block or (weights.get("block_structure") if isinstance(weights, Mapping) else None)
        if block is None:
            return None
        if not (isinstance(block, list) and len(block) == 2 and all(map(is_count, block))):
            raise self.error(f" has blocks of {block!r}, they must be two positive numbers")
        return block[0], block[1]

    def grid(self, name: str, shape: tuple[int, ...], *dtypes: mx.Dtype, block: tuple[int, int] | None = None) -> Grid:
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
        return Grid(tensor, (grid[0], grid[1]), block)

    def group_index(self, name: str, groups: int, width: int) -> Callable[[], np.ndarray | None]:
        """A function that reads the group of each column; None if they are in order and of equal size."""
        if name not in self.parts:
            if width % groups:
                raise self.error(f" has {groups} groups for {width} inputs")
            return lambda: None
        part = self.part(name, mx.int32, mx.int64, shape=(width,))

        def read() -> np.ndarray | None:
            index = to_numpy(part)
            if index.min() < 0 or index.max() >= groups:
                raise self.error(f".{name} has values that are not from 0 to {groups - 1}")
            in_order = width % groups == 0 and np.array_equal(index, np.arange(width) // (width // groups))
            return None if in_order else index

        return read


@dataclass(frozen=True)
class Integers:
    """A matrix `[out, in]` of integers, with scales and zero points `[out, groups]` of groups of inputs.

    Attributes:
        module: Its module.
        shape: Its shape.
        bits: Bits of an integer: 2, 3, 4 or 8.
        stored_dtype: Name of its type.
        codes: Reads the integers, packed in rows of 32-bit words, the lowest bits first.
        scales: Reads the scales.
        zeros: Reads the zero points.
        groups: Number of groups.
        index: Reads the group of each input; None if they are in order and of equal size.
    """

    module: QuantizedModule
    shape: tuple[int, int]
    bits: int
    stored_dtype: str
    codes: Callable[[], np.ndarray]
    scales: Callable[[], np.ndarray]
    zeros: Callable[[], np.ndarray]
    groups: int
    index: Callable[[], np.ndarray | None]

    def group_size(self) -> int | None:
        """The largest of MLX's group sizes that divides the groups; None if it has no such layout.

        Reads the groups of the inputs: with GPTQ's `desc_act`, they are in the order of activations.
        """
        size = self.shape[1] // self.groups
        sizes = [mlx_size for mlx_size in GROUP_SIZES if size % mlx_size == 0]
        return max(sizes) if sizes and self.index() is None else None

    def packed(self, group_size: int) -> dict[str, LazyTensor]:
        """The parts of MLX's affine format; in float32, scales and biases are exact."""
        rows, width = self.shape
        repeats, scale_shape = width // self.groups // group_size, (rows, width // group_size)

        def factors(read: Callable[[], np.ndarray]) -> Callable[[], mx.array]:
            return lambda: mx.array(np.repeat(read(), repeats, axis=1))

        def biases() -> np.ndarray:
            return -self.zeros() * self.scales()

        nbytes = sum(part.nbytes for part in self.module.parts.values())
        read_codes, words = self.codes, (rows, width * self.bits // 32)
        return {
            "weight": LazyTensor(words, mx.uint32, self.stored_dtype, nbytes, lambda: mx.array(read_codes())),
            "scales": LazyTensor(scale_shape, mx.float32, "F32", 0, factors(self.scales)),
            "biases": LazyTensor(scale_shape, mx.float32, "F32", 0, factors(biases)),
        }

    def dequantized(self) -> LazyTensor:
        """The weight."""

        def compute() -> np.ndarray:
            return scale_blocks(decode(self.codes(), self.bits), self.scales(), self.zeros(), index=self.index())

        reason = f"in groups of {self.shape[1] // self.groups}" if self.index() is None else "in act-order"
        return self.module.weight(self.shape, f"{self.stored_dtype} {reason}", compute)


def config_groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """compressed-tensors' groups of modules with the same settings."""
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def to_numpy(tensor: LazyTensor) -> np.ndarray:
    """Read a tensor, 16-bit floats as float32."""
    value = tensor.read()
    return np.array(value.astype(mx.float32) if tensor.dtype in FLOATS else value, copy=False)


def to_words(tensor: LazyTensor) -> np.ndarray:
    """Read 32-bit integers as unsigned ones."""
    return to_numpy(tensor).view(np.uint32)


def decode(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers of 2, 3, 4 or 8 bits in each row, the lowest bits first, as float32."""
    if bits == 3:  # three bytes have eight integers: a table of 12 bits has four of them
        low, middle, high = (words.view(np.uint8)[:, i::3].astype(np.uint16) for i in range(3))
        halves = np.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], axis=2)
        table = (np.arange(4096)[:, None] >> np.arange(0, 12, 3) & 7).astype(np.float32)
        return look_up(table, halves.reshape(len(words), -1))
    shifts = np.arange(0, 8, bits)
    table = (np.arange(256)[:, None] >> shifts & (1 << bits) - 1).astype(np.float32)
    return look_up(table, words.view(np.uint8))


def look_up(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The rows of a table `[N, 1, 2 or 4]` for each of `indices` `[rows, columns]`, in one row each."""
    wide = {1: np.float32, 2: np.float64, 4: np.complex128}[table.shape[1]]  # NumPy is 8 times faster with one item
    return np.ascontiguousarray(table, np.float32).view(wide)[:, 0][indices].view(np.float32)


def scale_blocks(
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
                codes[part] -= np.take(zeros[part], index, axis=1)
            codes[part] *= np.take(scales[part], index, axis=1)
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

"""Launches: arrays to bytes and back, the limits that a GPU has, and what is observed."""

from __future__ import annotations

import ctypes
import math
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .build import Compiled, compiled, runtime, symbolizer
from .fault import Fault
from .kernel import Kernel
from .signature import Parameter, Signature

MAX_THREADS = 1024
SECONDS = 60.0  # of processor time that a launch may take, of all threads of this process
_ONE_AT_A_TIME = threading.Lock()  # the runtime has one state, and ctypes lets other threads run meanwhile


@dataclass(frozen=True)
class Launch:
    """What one launch did. Bytes are of device memory; inputs of fewer than 8 elements are not in it."""

    kernel: str
    threads: int
    groups: int
    read: int  # by every load of every thread
    written: int
    unique_read: int  # distinct addresses in the launch
    unique_written: int
    loaded: int  # distinct addresses per threadgroup, summed: the traffic of groups with perfect caches
    stored: int
    threadgroup_memory: int  # bytes per threadgroup
    threadgroup_loads: int  # loads from threadgroup memory, by every thread
    products: int  # 8x8 matrix products, by every SIMD group
    barriers: int  # threadgroup barriers, by every threadgroup


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("granule", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
    ]


_INPUT, _OUTPUT, _INITIALIZED_OUTPUT, _CONSTANT, _LAYOUT = range(5)
_COUNTS = (
    "read", "written", "unique_read", "unique_written", "loaded", "stored", "threadgroup_memory", "threadgroup_loads",
    "products", "barriers", "groups",
)  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _COUNTS),
        ("place", ctypes.c_int64),
        ("other_place", ctypes.c_int64),
        ("message", ctypes.c_char * 1000),
    ]


def launch(
    kernel: Kernel,
    generated: Signature,
    inputs: Sequence[mx.array],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    init_value: float | None,
    seed: int,
) -> tuple[list[mx.array], Launch]:
    """Run a kernel and wait for it.

    Args:
        kernel: The kernel.
        generated: Its signature for these arguments.
        inputs: Input arrays.
        grid: Number of threads.
        threadgroup: Threads per threadgroup.
        outputs: Shape and dtype of each output.
        init_value: What the outputs contain before the launch. None: nothing, and reading them is an error.
        seed: Selects the order of the threads and the layout of strided inputs.

    Returns:
        The output arrays, and what the launch did.

    Raises:
        Fault: An error in the kernel.
    """
    group = _group_size(kernel, grid, threadgroup)
    code = compiled(kernel, generated)

    mx.eval(inputs)
    rng = np.random.default_rng(seed)
    contiguous = kernel.ensure_row_contiguous
    arrays = {name: _in_memory(a, contiguous, rng) for name, a in zip(kernel.input_names, inputs, strict=True)}
    results = {
        name: _to_numpy(mx.full(shape, mx.array(init_value or 0.0).astype(dtype))).copy()
        for name, (shape, dtype) in zip(kernel.output_names, outputs, strict=True)
    }
    buffers = (_Buffer * len(generated.parameters))()
    data = [results[p.of] if p.of in results else _argument(p, *arrays[p.of]) for p in generated.parameters]
    for buffer, parameter, values in zip(buffers, generated.parameters, data, strict=True):
        if parameter.what != "data":
            buffer.kind = _LAYOUT
        elif parameter.of in results:
            buffer.kind = _OUTPUT if init_value is None else _INITIALIZED_OUTPUT
        else:
            buffer.kind = _INPUT if "device" in parameter.type.split() else _CONSTANT
        buffer.name, buffer.data = parameter.name.encode(), values.ctypes.data
        buffer.bytes, buffer.granule = values.nbytes, values.itemsize
        if parameter.what == "data" and parameter.of in arrays:
            memory, view = arrays[parameter.of]
            buffer.start = view.__array_interface__["data"][0] - memory.ctypes.data

    seen = _Report()
    three = ctypes.c_uint32 * 3
    arguments = (code.entry, buffers, len(buffers), three(*grid), three(*group))
    with _ONE_AT_A_TIME:
        failed = runtime().hx_launch(*arguments, ctypes.c_uint64(seed), ctypes.c_double(SECONDS), ctypes.byref(seen))
    if failed:
        raise Fault(_explain(kernel, code, seen))
    counts = {name: getattr(seen, name) for name in _COUNTS}
    report = Launch(kernel=kernel.name, threads=math.prod(grid), **counts)
    return [_to_mlx(results[n], dtype) for n, (_, dtype) in zip(kernel.output_names, outputs, strict=True)], report


def _group_size(kernel: Kernel, grid: Sequence[int], threadgroup: Sequence[int]) -> list[int]:
    """The size of a threadgroup as MLX dispatches it."""
    if min(grid) < 1 or min(threadgroup) < 1:
        raise Fault(f"{kernel.name}: grid {tuple(grid)} and threadgroup {tuple(threadgroup)} must be positive")
    if math.prod(grid) >= 2**32:
        raise Fault(f"{kernel.name}: a grid of {tuple(grid)} has 2^32 threads or more")
    if (threads := math.prod(threadgroup)) > MAX_THREADS:  # the message of MLX
        raise ValueError(
            f"Thread group size ({threads}) is greater than  the maximum allowed threads per threadgroup "
            f"({MAX_THREADS})."
        )
    return [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _to_mlx(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


def _in_memory(array: mx.array, contiguous: bool, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(memory, view): the bytes that a kernel gets, and the array as a strided view of them.

    A kernel that takes inputs as they lie gets a layout by lot, of those that transposing, slicing and broadcasting
    make: axes in any order, padded rows, steps, negative strides, stride 0 along an axis without change. What is
    between the elements is NaN (all bits set), so that an index that forgets a stride shows.
    """
    values = _to_numpy(array)
    if contiguous or values.size == 0 or values.ndim == 0:
        memory = np.ascontiguousarray(values)
        return memory, memory
    kept = values
    for axis in range(values.ndim):
        first = kept.take([0], axis)
        if rng.integers(2) and (kept == first).all():
            kept = first
    order = rng.permutation(values.ndim)
    stored = [kept.shape[axis] for axis in order]
    step = int(rng.integers(1, 3))
    extents = [n + int(rng.integers(3)) for n in stored[:-1]] + [stored[-1] * step]
    memory = np.frombuffer(b"\xff" * (math.prod(extents) * values.itemsize), values.dtype).reshape(extents).copy()
    inside = memory[(*(slice(n) for n in stored[:-1]), slice(None, None, step))].transpose(np.argsort(order))
    view = inside[tuple(slice(None, None, 1 - 2 * int(rng.integers(2))) for _ in range(values.ndim))]
    view[...] = kept
    return memory, np.broadcast_to(view, values.shape)


def _argument(parameter: Parameter, memory: np.ndarray, view: np.ndarray) -> np.ndarray:
    if parameter.what == "shape":
        return np.array(view.shape, np.int32)
    if parameter.what == "strides":
        return np.array(view.strides, np.int64) // view.itemsize
    return np.array(view.ndim, np.int32) if parameter.what == "ndim" else memory


def _explain(kernel: Kernel, code: Compiled, seen: _Report) -> str:
    text = f"{kernel.name}: {seen.message.decode(errors='replace')}"
    if place := _line(code, seen.place):
        text += f"; at {place}"
    if other := _line(code, seen.other_place):
        text += f", the other access at {other}"
    return text


def _line(code: Compiled, offset: int) -> str:
    """file:line of a place in the code, if a symbolizer is installed."""
    tool = symbolizer()
    if offset < 0 or tool is None:
        return ""
    command = [tool, "-e", str(code.path), "-i", hex(offset - 1)]  # the call itself, not where it returns to
    lines = subprocess.run(command, capture_output=True, encoding="utf-8").stdout.split()
    places = [p.rsplit("/", 1)[-1] for p in lines if ":" in p and "??" not in p]
    ours = [":".join(p.split(":")[:2]) for p in places if not p.startswith(("metal_", "entry", "signature"))]
    return ours[0] if ours else ""

"""Launches a compiled kernel: passes arrays to the runtime, and turns its report into results or an error."""

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
SECONDS = 60.0  # CPU time of this process after which a launch is stopped
_LOCK = threading.Lock()  # the runtime has global state, and ctypes releases the GIL


@dataclass(frozen=True)
class Launch:
    """Counts of one launch. Bytes are of device memory, without inputs of fewer than 8 elements.

    Attributes:
        kernel: Name of the kernel.
        threads: Number of threads.
        groups: Number of threadgroups.
        read: Bytes of all loads of all threads.
        written: Bytes of all stores.
        unique_read: Bytes at distinct addresses that were read.
        unique_written: The same for stores.
        loaded: Bytes at distinct addresses per threadgroup, summed over the threadgroups.
        stored: The same for stores.
        threadgroup_memory: Bytes of threadgroup memory per threadgroup.
        threadgroup_loads: Number of loads from threadgroup memory by all threads.
        products: Number of 8x8 matrix products by all SIMD groups.
        barriers: Number of threadgroup barriers of all threadgroups.
    """

    kernel: str
    threads: int
    groups: int
    read: int
    written: int
    unique_read: int
    unique_written: int
    loaded: int
    stored: int
    threadgroup_memory: int
    threadgroup_loads: int
    products: int
    barriers: int


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("granule", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
    ]


_INPUT, _OUTPUT, _CONSTANT, _LAYOUT = range(4)
_COUNTS = (
    "read", "written", "unique_read", "unique_written", "loaded", "stored", "threadgroup_memory", "threadgroup_loads",
    "products", "barriers", "groups",
)  # fmt: skip


class _Report(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in _COUNTS),
        ("pc", ctypes.c_int64),
        ("other_pc", ctypes.c_int64),
        ("message", ctypes.c_char * 1000),
    ]


def launch(
    kernel: Kernel,
    generated: Signature,
    inputs: Sequence[mx.array],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
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
        seed: Random seed for the order of the threads and the layout of the inputs.

    Returns:
        The output arrays, and counts of the launch.

    Raises:
        Fault: An error in the kernel.
    """
    __tracebackhide__ = True  # pytest's traceback ends at the call of the kernel
    group = _group_size(kernel, grid, threadgroup)
    code = compiled(kernel, generated)

    mx.eval(inputs)
    rng = np.random.default_rng(seed)
    contiguous = kernel.ensure_row_contiguous
    arrays = {name: _in_memory(a, contiguous, rng) for name, a in zip(kernel.input_names, inputs, strict=True)}
    results = {
        name: _to_numpy(mx.zeros(shape, dtype)).copy()
        for name, (shape, dtype) in zip(kernel.output_names, outputs, strict=True)
    }
    buffers = (_Buffer * len(generated.parameters))()
    data = [results[p.of] if p.of in results else _argument(p, *arrays[p.of]) for p in generated.parameters]
    for buffer, parameter, values in zip(buffers, generated.parameters, data, strict=True):
        if parameter.what != "data":
            buffer.kind = _LAYOUT
        elif parameter.of in results:
            buffer.kind = _OUTPUT
        else:
            buffer.kind = _INPUT if "device" in parameter.type.split() else _CONSTANT
        buffer.name, buffer.data = parameter.name.encode(), values.ctypes.data
        buffer.bytes, buffer.granule = values.nbytes, values.itemsize
        if parameter.what == "data" and parameter.of in arrays:
            memory, view = arrays[parameter.of]
            buffer.start = view.__array_interface__["data"][0] - memory.ctypes.data

    found = _Report()
    three = ctypes.c_uint32 * 3
    arguments = (code.entry, buffers, len(buffers), three(*grid), three(*group))
    with _LOCK:
        failed = runtime().hx_launch(*arguments, ctypes.c_uint64(seed), ctypes.c_double(SECONDS), ctypes.byref(found))
    if failed:
        raise Fault(_message(kernel, code, found))
    counts = {name: getattr(found, name) for name in _COUNTS}
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
    """Return the memory to pass to the kernel, and the array as a strided view of it.

    Unless MLX makes inputs contiguous, the layout is random, as after transposing, slicing and broadcasting: permuted
    axes, padded rows, steps, negative strides, and stride 0 along axes of equal values. The gaps are NaN (all bits
    set), so that a kernel which ignores strides gives a wrong result.
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


def _message(kernel: Kernel, code: Compiled, found: _Report) -> str:
    text = f"{kernel.name}: {found.message.decode(errors='replace')}"
    if line := _line(code, found.pc):
        text += f", at {line}"
    if other := _line(code, found.other_pc):
        text += f" (the other thread: {other})"
    return text


def _line(code: Compiled, pc: int) -> str:
    """Source file and line of a return address in the kernel, if a symbolizer is installed."""
    tool = symbolizer()
    if pc < 0 or tool is None:
        return ""
    command = [tool, "-e", str(code.path), "-i", hex(pc - 1)]  # an address in the call instruction
    lines = subprocess.run(command, capture_output=True, encoding="utf-8").stdout.split()
    places = [p.rsplit("/", 1)[-1] for p in lines if ":" in p and "??" not in p]
    ours = [":".join(p.split(":")[:2]) for p in places if not p.startswith(("metal_", "entry", "signature"))]
    return ours[0] if ours else ""

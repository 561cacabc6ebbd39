"""Counts the kernels that MLX launches on Metal for a graph of lazy arrays, without a GPU.

    with recording():
        launches = count_launches(model(tokens, cache=cache))

The graph is that of a simulated GPU (`tests/simulated_gpu`), which is built like on a GPU: `mx.compile` fuses the same
operations, and while `recording`, functions that have a kernel on a GPU and are many operations on a CPU stand for one.
How many kernels an operation launches is read from its `eval_gpu` in MLX 0.32.2, `mlx/backend/metal` and
`mlx/backend/gpu`, whose files are named below. Some depend on the layout of the inputs; so the layouts are followed
through the graph, as NumPy arrays with the same strides that have no memory of their own.

Not counted: copies that MLX makes of scalars and offsets on the CPU, which are no launches, and what is evaluated while
the graph is built.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx
import numpy as np
from numpy.lib.stride_tricks import as_strided

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.kernels import dispatch
from tests.simulated_gpu import install
from tests.simulated_gpu.gpu_primitives import PREFIX

VIEWS = """
    Broadcast BroadcastAxes Copy CustomTransforms Depends ExpandDims Load NumberOfElements Slice Split Squeeze
    StopGradient Transpose View
""".split()  # gpu/primitives.cpp: all call `eval`, which shares the buffer; Load is evaluated on the CPU
RESHAPES = ("Flatten", "Reshape", "Unflatten")
# unary.cpp, binary.cpp, ternary.cpp: one kernel for any strides
ELEMENTWISE = """
    Abs Add ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTan2 ArcTanh BitwiseAnd BitwiseInvert BitwiseOr BitwiseXor Ceil Cos
    Cosh Divide DivMod Equal Erf ErfInv Exp Expm1 Floor Greater GreaterEqual LeftShift Less LessEqual Log Log10 Log1p
    Log2 LogAddExp LogicalAnd LogicalNot LogicalOr Maximum Minimum Multiply NaNEqual Negative NotEqual Power Remainder
    RightShift Round Rsqrt Select Sigmoid Sign Sin Sinh Sqrt Square Subtract Tan Tanh
""".split()
# One kernel for any layout of the inputs: copy.cpp, primitives.cpp, indexing.cpp
SINGLE = "Arange ArgReduce AsType Full Gather GatherAxis RandomBits".split()
SORTS = ("ArgPartition", "ArgSort", "Partition", "Sort")
REDUCTIONS = ("And", "Max", "Min", "Or", "Prod", "Sum")
SCANS = ("CumLogaddexp", "CumMax", "CumMin", "CumProd", "CumSum")


class Array(NamedTuple):
    """An array of the graph.

    Args:
        layout: Its shape and strides, as an array of int8 without memory.
        itemsize: Bytes of an element.
        buffer: Elements of the buffer that it shares.
    """

    layout: np.ndarray
    itemsize: int
    buffer: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def row_contiguous(self) -> bool:
        return self.layout.flags.c_contiguous

    @property
    def contiguous(self) -> bool:
        """Whether the elements have no gaps between them, in whichever order."""
        end = 1
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.layout.strides, strict=True) if n > 1):
            if stride != end:
                return False
            end = stride * n
        return True

    @property
    def last_contiguous(self) -> bool:
        return self.layout.ndim > 0 and self.layout.strides[-1] == 1

    @property
    def is_matrix(self) -> bool:
        """`ensure_row_contiguous_matrix` in quantized.cpp: whether rows follow each other."""
        return self.layout.strides[-2:] == (self.shape[-1], 1)[-self.layout.ndim :]


@contextmanager
def recording() -> Iterator[None]:
    """Context manager in which graphs are built on a simulated GPU to be counted. Their values are zeros.

    A compiled function that was traced before keeps operations for the CPU. The first use of a kernel isn't checked.
    """
    with patch.multiple(dispatch, check_on_first_use=lambda *_: None, _choices={}, _failures={}):
        install.current.recording = True
        try:
            yield
        finally:
            install.current.recording = False


def count_launches(*outputs: Any) -> Counter[str]:
    """Count the kernels by operation that compute these trees of arrays.

    Whatever the graph begins with must have been evaluated, else its launches are counted, too.
    """
    counts: Counter[str] = Counter()
    for name, number in operations(*outputs):
        counts[name] += number
    return +counts


def operations(*outputs: Any) -> Iterator[tuple[str, int]]:
    """Yield each operation of a graph and its launches, in an order of evaluation."""
    nodes = _describe([x for _, x in tree_flatten(outputs) if isinstance(x, mx.array)])
    users = Counter(i for node in nodes for i in node.get("inputs", ()))
    arrays: dict[int, Array] = {}
    texts: dict[int, str] = {}
    kept: set[int] = set()  # held by more than the operations of this graph
    owners: dict[int, int] = {}  # of the buffers of views
    for node in nodes:
        for described in [node["leaf"]] if "leaf" in node else node["outputs"]:
            if described["references"] > users[described["id"]]:
                kept.add(described["id"])
    for node in nodes:
        if leaf := node.get("leaf"):
            arrays[leaf["id"]] = _array(leaf, _layout(leaf["shape"], leaf.get("strides")))
            texts[leaf["id"]] = bytes(leaf.get("data", ())).decode("ascii", "replace")
            continue
        name, arguments, ids, results = node["name"].split()[0], node["arguments"], node["inputs"], node["outputs"]
        users.subtract(ids)
        if name == "Depends" and texts.get(ids[-1], "").startswith(PREFIX):
            name, *arguments = texts[ids[-1]].removeprefix(PREFIX).split()
            ids = ids[len(results) : -1]
        inputs = [arrays[i] for i in ids]
        donatable = [
            not users[i] and not users[owners.get(i, i)] and kept.isdisjoint((i, owners.get(i, i))) for i in ids
        ]
        for result in reversed(results):
            layout, count = _evaluate(name, arguments, inputs, donatable, result["shape"], result["itemsize"])
            arrays[result["id"]] = _array(result, layout)
            if inputs and count == 0:
                arrays[result["id"]] = arrays[result["id"]]._replace(buffer=inputs[0].buffer)
                owners[result["id"]] = owners.get(ids[0], ids[0])
        yield ("Compiled" if name.startswith("Compiled") else name), count if prod(results[0]["shape"]) else 0


def _array(described: dict[str, Any], layout: np.ndarray) -> Array:
    return Array(layout, described["itemsize"], layout.size)


def _layout(shape: list[int], strides: list[int] | None = None) -> np.ndarray:
    if strides is None:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return as_strided(np.zeros(1, np.int8), shape, strides)


def _evaluate(
    name: str, arguments: list[Any], inputs: list[Array], donatable: list[bool], shape: list[int], itemsize: int
) -> tuple[np.ndarray, int]:
    """Return the layout of the result, and how many kernels compute it."""
    x = inputs[0] if inputs else None
    rows = _layout(shape)
    if name in VIEWS:
        return _view(name, arguments, x, shape), 0
    if name in RESHAPES:  # copy.cpp: reshape_gpu
        try:
            return x.layout.reshape(shape, copy=False), 0
        except ValueError:
            return rows, 1
    if name.startswith("Compiled") or name in ELEMENTWISE or name == "AsType":
        sized = [a.layout for a in inputs if list(a.shape) == shape]
        alike = sized and sized[0].size > 1 and all(a.strides == sized[0].strides for a in sized)
        whole = alike and Array(sized[0], itemsize, 1).contiguous
        return (sized[0] if whole else rows), 1
    if name in SINGLE:
        return rows, 1
    if name == "Contiguous":  # gpu/primitives.cpp: it shares a buffer that is up to 16 kB larger
        shares = x.row_contiguous and x.buffer * x.itemsize <= prod(shape) * itemsize + 16384
        return rows, 0 if shares else 1
    if name in SORTS:
        return rows, _sort(x, arguments[0])
    if name in REDUCTIONS:
        return rows, _reduce(x, arguments, prod(shape))
    if name in SCANS:  # scan.cpp
        return (x.layout if x.contiguous else rows), 1 if x.contiguous else 2
    if name in ("Softmax", "LogSumExp"):  # softmax.cpp, logsumexp.cpp: rows of more than 4096 in a loop, in one kernel
        return rows, 1 if x.contiguous and x.last_contiguous else 2
    if name == "Concatenate":  # slicing.cpp: concatenate_gpu
        return rows, sum(a.layout.size > 0 for a in inputs)
    if name == "Pad":  # gpu/slicing.cpp: pad_gpu
        return rows, 2
    if name in ("Scatter", "ScatterAxis"):  # indexing.cpp
        return rows, _copy(x, donatable[0], x.row_contiguous) + 1
    if name == "SliceUpdate":  # indexing.cpp
        return rows, _copy(x, donatable[0], x.contiguous) + 1
    if name == "DynamicSliceUpdate":  # gpu/primitives.cpp; slicing.cpp: compute_dynamic_offset
        return rows, _copy(x, donatable[0], x.contiguous) + 2
    if name == "DynamicSlice":
        return rows, 2
    if name == "SearchSorted":  # sort.cpp
        return rows, 1 + (not inputs[1].row_contiguous)
    if name in ("Matmul", "AddMM"):
        return rows, _matmul(name, inputs, shape)
    if name in ("QuantizedMatmul", "GatherQMM"):
        return rows, _quantized_matmul(name, arguments, inputs, shape)
    if name == "Quantize":  # quantized.cpp: quantize_impl
        return rows, 1 + sum(not a.row_contiguous for a in inputs)
    if name == "RMSNorm" or name == "LayerNorm":  # normalization.cpp
        step = x.layout.strides[-2] if x.layout.ndim > 1 and x.shape[-2] > 1 else 0
        return rows, 1 if x.contiguous and x.last_contiguous and step in (0, x.shape[-1]) else 2
    if name == "RoPE":
        return rows, _rope(x, int(arguments[0]), donatable[0])
    if name == "ScaledDotProductAttention":
        return rows, _attention(inputs)
    if name == "CustomKernel":  # custom_kernel.cpp; `ensure_row_contiguous` is the argument
        return rows, 1 + (arguments[1] == "True") * sum(not a.row_contiguous for a in inputs)
    raise NotImplementedError(f"launches of {name} {arguments} for {[a.shape for a in inputs]}")


def _view(name: str, arguments: list[int], x: Array | None, shape: list[int]) -> np.ndarray:
    if x is None or name == "View" and x.shape[-1:] != tuple(shape[-1:]) or name == "NumberOfElements":
        return _layout(shape)
    if name == "Transpose":
        return x.layout.transpose(arguments)
    if name in ("Broadcast", "BroadcastAxes"):
        return np.broadcast_to(x.layout, shape)
    if name in ("ExpandDims", "Squeeze"):
        return x.layout.reshape(shape, copy=False)
    if name in ("Slice", "Split"):
        steps = arguments or [1] * len(shape)
        return as_strided(x.layout, shape, [s * step for s, step in zip(x.layout.strides, steps, strict=True)])
    return x.layout


def _copy(x: Array, donatable: bool, as_it_is: bool) -> int:
    """`copy_gpu` in copy.cpp: a buffer that nobody else needs is written in place, if its order stays."""
    return 0 if donatable and as_it_is and x.layout.size > 1 else 1


def _sort(x: Array, axis: int) -> int:
    """`gpu_merge_sort` in sort.cpp: blocks of 2,048 are sorted, and merged in pairs; each merge is two kernels."""
    size = x.shape[axis]
    block = 1024 if x.itemsize > 4 else 2048
    blocks = ceil(size / block)
    return 1 if blocks <= 1 else 1 + 2 * (blocks - 1).bit_length() + 1


def _reduce(x: Array, axes: list[int], results: int) -> int:
    """`Reduce::eval_gpu` in reduce.cpp, and `get_reduction_plan` in common/reduce.cpp."""
    if x.layout.size == results:
        return 1
    if len(axes) == x.layout.ndim and x.contiguous:  # all_reduce_dispatch
        return 1 if x.layout.size <= 4096 else 2
    reduced = [(x.layout.strides[a], x.shape[a]) for a in axes if x.shape[a] > 1]
    stride = min(reduced)[0]
    if stride == 1:  # row_reduce_general_dispatch
        return 1
    copies = 0 if x.row_contiguous else 1
    stride = prod(x.shape[max(a for a in axes if x.shape[a] > 1) + 1 :])
    size = prod(n for _, n in reduced)
    if size < 32:  # strided_reduce_general_dispatch
        return copies + 1
    two_passes = stride < 32 and size >= 1024 or size > 256 and results / 32 < 1024
    return copies + (2 if two_passes else 1)


def _matmul(name: str, inputs: list[Array], shape: list[int]) -> int:
    """`Matmul::eval_gpu`, `AddMM::eval_gpu` and `steel_matmul_axpby` in matmul.cpp."""
    a, b = inputs[-2:] if name == "Matmul" else inputs[:2]
    M, N, K = shape[-2] if len(shape) > 1 else 1, shape[-1], a.shape[-1]
    copies = _transposed_copy(a, M == 1) + _transposed_copy(b, N == 1)
    batch = prod(shape) // (M * N)
    if batch > 1 and b.layout.ndim == 2 and a.row_contiguous:
        M, batch = M * batch, 1
    if name == "Matmul" and M == N == batch == 1 and a.row_contiguous and b.row_contiguous:
        return 3  # dot_product: products, their sum, and a copy
    if min(M, N) == 1:
        return copies + 1  # gemv
    tiles = ceil(M / 16) * ceil(N / 16)
    split = batch == 1 and tiles <= (2048 if _size() in "sd" else 1024) and K // 16 >= 8 and K >= max(M, N)
    return copies + (2 if split and _generation() < 17 else 1)


def _transposed_copy(x: Array, is_vector: bool) -> int:
    """`check_transpose` in matmul.cpp."""
    if x.layout.ndim < 2:
        return 0
    (step, last), (n, k) = x.layout.strides[-2:], x.shape[-2:]
    return 0 if last == 1 and (not is_vector or step == k) or step == 1 and (not is_vector or last == n) else 1


def _quantized_matmul(name: str, arguments: list[int], inputs: list[Array], shape: list[int]) -> int:
    """`QuantizedMatmul::eval_gpu` and `GatherQMM::eval_gpu` in quantized.cpp."""
    if name == "GatherQMM":
        return 1 + sum(not a.is_matrix for a in inputs[:-2])
    group_size, _, transpose = arguments
    x, w = inputs[:2]
    copies = sum(not a.is_matrix for a in inputs)
    K, N = x.shape[-1], shape[-1]
    M = x.layout.size // K if w.layout.ndim == 2 and x.row_contiguous else x.shape[-2]
    if not transpose:  # qvm_split_k sums its parts in a kernel of its own
        return copies + (2 if M < 4 and K >= 1024 else 1)
    if M < _qmv_batch_limit(K, N) or prod(shape) > M * N:
        return copies + 1
    align = max(group_size, 32)  # qmm_splitk
    parts = min(max(1, 512 // (ceil(N / 32) * ceil(M / 32))), K // align)
    while parts > 1 and K % (parts * align):
        parts -= 1
    return copies + (2 if parts > 1 else 1)


def _qmv_batch_limit(D: int, O: int) -> int:
    """`get_qmv_batch_limit` in quantized.cpp."""
    if _size() == "d":
        limits = (32, 18, 12)
    else:
        limits = (33, 25, 13) if _generation() >= 17 else (13, 15, 13) if _generation() >= 15 else (14, 10, 6)
    return limits[0 if max(D, O) <= 2048 else 1 if max(D, O) <= 4096 else 2]


def _rope(x: Array, dims: int, donatable: bool) -> int:
    """`RoPE::eval_gpu` in rope.cpp."""
    if dims < x.shape[-1]:
        return 1 + _copy(x, donatable, x.row_contiguous)
    if x.row_contiguous or x.layout.ndim == 3 or all(n == 1 for n in x.shape[:-3]):
        return 1
    B, N, T, D = x.shape
    return 1 if x.layout.strides[:3] == (T * N * D, D, N * D) else 2


def _attention(inputs: list[Array]) -> int:
    """`ScaledDotProductAttention::eval_gpu` in scaled_dot_product_attention.cpp."""
    q, k, v, *masks = inputs
    if q.shape[2] > 8:
        return 1 + sum(not a.last_contiguous for a in inputs)

    def keeps_queries() -> bool:
        B, H, _, D = q.shape
        strides, axis = q.layout.strides, 1 if B == 1 else 0
        alone = 1 in (B, H) and strides[3] == 1 and strides[2] == D * q.shape[axis] and strides[axis] == D
        return q.row_contiguous or alone

    def keeps(a: Array) -> bool:
        single = 1 in a.shape[:2]
        return a.last_contiguous and (single or a.layout.strides[0] == a.layout.strides[1] * a.shape[1])

    copies = (not keeps_queries()) + (not keeps(k)) + (not keeps(v))
    if 1 not in q.shape[:2]:
        copies += sum(not (m.row_contiguous or m.layout.strides[0] == m.layout.strides[1] * m.shape[1]) for m in masks)
    S = k.shape[2]
    two_passes = _size() in "sd" and S >= 1024 or k.shape[1] < q.shape[1] and S >= 4096
    return copies + (2 if two_passes else 1)


def _size() -> str:
    """The last letter of the architecture: g and p (base), s (Max), d (Ultra)."""
    return mx.device_info()["architecture"][-1]


def _generation() -> int:
    """The number in the architecture, 13 for M1."""
    return int("".join(filter(str.isdigit, mx.device_info()["architecture"])))


def _describe(outputs: list[mx.array]) -> list[dict[str, Any]]:
    addresses = (ctypes.c_void_p * len(outputs))(*map(id, outputs))
    return [json.loads(line) for line in _library().describe_graph(addresses, len(outputs)).splitlines()]


@cache
def _library() -> ctypes.CDLL:
    """Compile graph.cpp, in two seconds."""
    (folder,) = mlx.__path__
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "graph.so")
        command = [
            "c++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{folder}/include",
            Path(__file__).with_name("graph.cpp"),
        ]
        command += ["-o", path, f"-L{folder}/lib", "-lmlx", f"-Wl,-rpath,{folder}/lib"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    library.describe_graph.restype = ctypes.c_char_p
    return library

"""Counts the kernels that MLX launches on Metal for a graph of lazy arrays, without a GPU.

    with recording():
        launches = count_launches(model(tokens, cache=cache))

The graph is that of a simulated GPU (`tests/simulated_gpu`), which is built like on a GPU: `mx.compile` fuses the same
operations, and while `recording`, functions that have a kernel on a GPU and are many operations on a CPU stand for one.
How many kernels an operation launches is read from its `eval_gpu` in MLX 0.32.2, `mlx/backend/metal` and
`mlx/backend/gpu`, whose files are named below. Some depend on the layout of the inputs; so the layouts are followed
through the graph, as NumPy arrays with the same strides that have no memory of their own.

Not counted: what is evaluated while the graph is built.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import mlx
import numpy as np
from numpy.lib.stride_tricks import as_strided

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_map
from mlxlm.cache import KVOptions, make_cache
from mlxlm.cache.factory import DEFAULT
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.config import ModelConfig
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.sampling import Sampler, sample_batch
from mlxlm.kernels import dispatch
from mlxlm.model import Decoder
from tests.simulated_gpu import install
from tests.simulated_gpu.gpu_primitives import PREFIX

# Which kernels an operation launches: the files are those of mlx/backend/metal, unless they say otherwise.
VIEWS = (  # gpu/primitives.cpp: they share the buffer; Load runs on the CPU
    "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Load", "NumberOfElements",
    "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "View",
)  # fmt: skip
RESHAPES = ("Flatten", "Reshape", "Unflatten")
ELEMENTWISE = (  # unary.cpp, binary.cpp, ternary.cpp and copy.cpp: one kernel for any strides
    "Abs", "Add", "ArcCos", "ArcCosh", "ArcSin", "ArcSinh", "ArcTan", "ArcTan2", "ArcTanh", "AsType", "BitwiseAnd",
    "BitwiseInvert", "BitwiseOr", "BitwiseXor", "Ceil", "Cos", "Cosh", "Divide", "DivMod", "Equal", "Erf", "ErfInv",
    "Exp", "Expm1", "Floor", "Greater", "GreaterEqual", "LeftShift", "Less", "LessEqual", "Log", "Log10", "Log1p",
    "Log2", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum", "Minimum", "Multiply", "NaNEqual",
    "Negative", "NotEqual", "Power", "Remainder", "RightShift", "Round", "Rsqrt", "Select", "Sigmoid", "Sign", "Sin",
    "Sinh", "Sqrt", "Square", "Subtract", "Tan", "Tanh",
)  # fmt: skip
SINGLE = ("Arange", "ArgReduce", "Full", "Gather", "GatherAxis", "RandomBits")  # primitives.cpp, indexing.cpp, copy.cpp
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
        """Whether the buffer has no gaps: elements may be in any order, and repeated by a broadcast."""
        end = 1
        for stride, n in sorted((s, n) for n, s in zip(self.shape, self.layout.strides, strict=True) if n > 1 and s):
            if stride != end:
                return False
            end = stride * n
        return True

    @property
    def is_whole(self) -> bool:
        """Whether it is contiguous without a broadcast."""
        return self.contiguous and all(n == 1 or s for n, s in zip(self.shape, self.layout.strides, strict=True))

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
    """Count the kernels by operation that compute these trees of arrays, those of `metal_kernels/` by name.

    "copy" stands for copies of an operation's inputs.

    Whatever the graph begins with must have been evaluated, else its launches are counted, too.
    """
    counts, _ = _follow(_describe([x for _, x in tree_flatten(outputs) if isinstance(x, mx.array)]))
    return +counts


def strides(x: mx.array) -> tuple[int, ...]:
    """The strides that an array has, or will have."""
    nodes = _describe([x])
    _, arrays = _follow(nodes)
    last = nodes[-1]
    return arrays[last["leaf"]["id"] if "leaf" in last else last["outputs"][0]["id"]].layout.strides


def _follow(nodes: list[dict[str, Any]]) -> tuple[Counter[str], dict[int, Array]]:
    """Follow a graph in an order of evaluation. Return the launches by operation, and the arrays by id."""
    described = [x for node in nodes for x in ([node["leaf"]] if "leaf" in node else node["outputs"])]
    users = Counter(i for node in nodes for i in node.get("inputs", ()))
    kept = {x["id"] for x in described if x["references"] > users[x["id"]]}  # by more than this graph
    counts: Counter[str] = Counter()
    arrays: dict[int, Array] = {}
    texts: dict[int, str] = {}
    owners: dict[int, int] = {}  # of the buffers of views

    def donatable(i: int) -> bool:
        return not any(users[x] or x in kept for x in (i, owners.get(i, i)))

    for node in nodes:
        if leaf := node.get("leaf"):
            arrays[leaf["id"]] = _array(leaf, _layout(leaf["shape"], leaf.get("strides")))
            texts[leaf["id"]] = bytes(leaf.get("data", ())).decode("ascii", "replace")
            continue
        name = "Compiled" if node["name"].startswith("Compiled") else node["name"].split()[0]
        arguments, ids, results = node["arguments"], node["inputs"], node["outputs"]
        users.subtract(ids)
        if name == "Depends" and texts.get(ids[-1], "").startswith(PREFIX):
            name, *arguments = texts[ids[-1]].removeprefix(PREFIX).split()
            ids = ids[len(results) : -1]
        inputs, donated = [arrays[i] for i in ids], [donatable(i) for i in ids]
        for result in results:
            layout, kernels, copies = _evaluate(name, arguments, inputs, donated, result["shape"], result["itemsize"])
            arrays[result["id"]] = _array(result, layout)
            if inputs and not kernels + copies:
                arrays[result["id"]] = arrays[result["id"]]._replace(buffer=inputs[0].buffer)
                owners[result["id"]] = owners.get(ids[0], ids[0])
        if prod(results[0]["shape"]):
            counts.update({arguments[0] if name == "CustomKernel" else name: kernels, "copy": copies})
    return counts, arrays


def _array(described: dict[str, Any], layout: np.ndarray) -> Array:
    return Array(layout, described["itemsize"], layout.size)


def _layout(shape: list[int], strides: list[int] | None = None) -> np.ndarray:
    if strides is None:
        strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return as_strided(np.zeros(1, np.int8), shape, strides)


def _evaluate(
    name: str, arguments: list[Any], inputs: list[Array], donatable: list[bool], shape: list[int], itemsize: int
) -> tuple[np.ndarray, int, int]:
    """Return the layout of a result, how many kernels compute it, and how many copy inputs for them."""
    x = inputs[0] if inputs else None
    rows = _layout(shape)
    if name in VIEWS:
        return _view(name, arguments, x, shape), 0, 0
    if name in RESHAPES:  # copy.cpp: reshape_gpu
        strides = _reshaped_strides(x, shape)
        return _layout(shape, strides), 0, int(strides is None)
    if name in ELEMENTWISE or name == "Compiled":  # common/compiled.cpp: compiled_allocate_outputs
        sized = [a for a in inputs if (a.shape if name == "Compiled" else any(a.layout.strides) and a.layout.size > 1)]
        keeps = bool(sized) and all(list(a.shape) == shape for a in sized)
        if len(sized) == 1:
            keeps = keeps and sized[0].contiguous
        else:
            flags = [a.layout.flags for a in sized]
            keeps = keeps and (all(f.c_contiguous for f in flags) or all(f.f_contiguous for f in flags))
        return (sized[0].layout if keeps else rows), 1, 0
    if name in SINGLE:
        return rows, 1, 0
    if name == "Contiguous":  # gpu/primitives.cpp: it shares a buffer that is up to 16 kB larger
        shared = x.row_contiguous and x.buffer * x.itemsize <= prod(shape) * itemsize + 16384
        return rows, 0, 0 if shared else 1
    if name in SORTS:
        return rows, _sort(x, arguments[0]), 0
    if name in REDUCTIONS:
        return rows, *_reduce(x, arguments, prod(shape))
    if name in SCANS:  # scan.cpp
        return (x.layout, 1, 0) if x.contiguous else (rows, 1, 1)
    if name in ("Softmax", "LogSumExp"):  # softmax.cpp, logsumexp.cpp
        return rows, 1, 0 if x.contiguous and x.last_contiguous else 1
    if name == "Concatenate":  # slicing.cpp: concatenate_gpu
        return rows, sum(a.layout.size > 0 for a in inputs), 0
    if name == "Pad":  # gpu/slicing.cpp: pad_gpu fills, then copies
        return rows, 2, 0
    if name in ("Scatter", "ScatterAxis"):  # indexing.cpp
        return rows, 1, _unless_donated(x, donatable[0], x.row_contiguous)
    if name == "SliceUpdate":  # indexing.cpp
        return rows, 1, _unless_donated(x, donatable[0], x.is_whole)
    if name == "DynamicSliceUpdate":  # gpu/primitives.cpp; slicing.cpp: compute_dynamic_offset is a kernel
        return rows, 2, _unless_donated(x, donatable[0], x.is_whole)
    if name == "DynamicSlice":
        return rows, 2, 0
    if name == "SearchSorted":  # sort.cpp
        return rows, 1, int(not inputs[1].row_contiguous)
    if name in ("Matmul", "AddMM"):
        return rows, *_matmul(name, inputs, shape)
    if name == "QuantizedMatmul":
        return rows, _quantized_matmul(*arguments, *inputs[:2], shape), sum(not a.is_matrix for a in inputs)
    if name == "GatherQMM":
        return rows, 1, sum(not a.is_matrix for a in inputs[:-2])
    if name == "Quantize":  # quantized.cpp: quantize_impl
        return rows, 1, sum(not a.row_contiguous for a in inputs)
    if name in ("RMSNorm", "LayerNorm"):  # normalization.cpp
        step = x.layout.strides[-2] if x.layout.ndim > 1 and x.shape[-2] > 1 else 0
        return rows, 1, 0 if x.contiguous and x.last_contiguous and step in (0, x.shape[-1]) else 1
    if name == "RoPE":
        return rows, 1, _rope_copies(x, int(arguments[0]), donatable[0])
    if name == "ScaledDotProductAttention":
        return rows, *_attention(*inputs)
    if name == "CustomKernel":  # custom_kernel.cpp
        return rows, 1, sum(not a.row_contiguous for a in inputs) if arguments[1] == "True" else 0
    raise NotImplementedError(f"launches of {name} {arguments} for {[a.shape for a in inputs]}")


def _view(name: str, arguments: list[int], x: Array | None, shape: list[int]) -> np.ndarray:
    """`eval` in common/common.cpp, common/broadcasting.cpp and common/slicing.cpp. An axis of size 1 has a stride, too:
    `ensure_row_contiguous_matrix` compares it.
    """
    if x is None or name == "NumberOfElements" or name == "View" and x.shape[-1] != shape[-1]:
        return _layout(shape)
    strides = list(x.layout.strides)
    if name == "Transpose":
        strides = [strides[axis] for axis in arguments]
    elif name in ("Broadcast", "BroadcastAxes"):
        padded = [1] * (len(shape) - len(strides)) + list(x.shape)
        strides = [0] * (len(shape) - len(strides)) + strides
        strides = [0 if n == 1 else stride for n, stride in zip(padded, strides, strict=True)]
    elif name == "ExpandDims":
        for axis in arguments:
            strides.insert(axis, 1)
    elif name == "Squeeze":
        strides = [stride for axis, stride in enumerate(strides) if axis not in arguments]
    elif name == "Slice":
        strides = [stride * step for stride, step in zip(strides, arguments, strict=True)]
    return _layout(shape, strides)


def _reshaped_strides(x: Array, shape: list[int]) -> list[int] | None:
    """`prepare_reshape` in common/common.cpp: the strides of a view of this shape, None if it must be a copy.

    Leading axes of size 1 are left out as in MLX 0.32.4.
    """
    if x.row_contiguous:
        return list(_layout(shape).strides)
    groups: list[list[int]] = []  # sizes and strides of axes that follow each other in memory
    for n, stride in zip(x.shape, x.layout.strides, strict=True):
        if n == 1:
            continue
        if groups and groups[-1][1] == n * stride:
            groups[-1] = [groups[-1][0] * n, stride]
        else:
            groups.append([n, stride])
    strides: list[int] = []
    for n in shape:
        if groups and groups[0][0] % n == 0:
            groups[0][0] //= n
            strides.append(groups[0][0] * groups[0][1])
            if groups[0][0] == 1:
                del groups[0]
        elif n == 1:
            strides.append(strides[-1])
        else:
            return None
    return strides


def _unless_donated(x: Array, donatable: bool, keeps_layout: bool) -> int:
    """`copy_gpu` in copy.cpp: the copies before a result is written into an input that nobody else needs."""
    return 0 if donatable and keeps_layout and x.layout.size > 1 else 1


def _sort(x: Array, axis: int) -> int:
    """`gpu_merge_sort` in sort.cpp: blocks are sorted, and merged in pairs by two kernels per round; then copied."""
    blocks = ceil(x.shape[axis] / (1024 if x.itemsize > 4 else 2048))
    return 1 if blocks <= 1 else 2 + 2 * (blocks - 1).bit_length()


def _reduce(x: Array, axes: list[int], results: int) -> tuple[int, int]:
    """`Reduce::eval_gpu` in reduce.cpp, and `get_reduction_plan` in common/reduce.cpp. Kernels, and copies.

    Of layouts that aren't contiguous, all but those with rows to reduce are assumed to be copied.
    """
    if x.layout.size == results:
        return 1, 0
    if len(axes) == x.layout.ndim and x.is_whole:  # all_reduce_dispatch
        return 1 if x.layout.size <= 4096 else 2, 0
    axes = [axis for axis in axes if x.shape[axis] > 1]
    if min(x.layout.strides[axis] for axis in axes) == 1:  # row_reduce_general_dispatch
        return 1, 0
    stride, size = prod(x.shape[max(axes) + 1 :]), prod(x.shape[axis] for axis in axes)
    long_column = stride < 32 and size >= 1024  # strided_reduce_general_dispatch
    two_passes = size >= 32 and (long_column or size > 256 and results < 32 * 1024)
    return 2 if two_passes else 1, int(not x.row_contiguous)


def _matmul(name: str, inputs: list[Array], shape: list[int]) -> tuple[int, int]:
    """`Matmul::eval_gpu`, `AddMM::eval_gpu` and `steel_matmul_axpby` in matmul.cpp. Kernels, and copies."""
    a, b = inputs[:2]
    M, N, K = shape[-2], shape[-1], a.shape[-1]
    copies = _is_copied(a, M == 1) + _is_copied(b, N == 1)
    batch = prod(shape[:-2])
    if a.row_contiguous and b.layout.size == K * N:
        M, batch = M * batch, 1
    if name == "Matmul" and M == N == batch == 1 and a.row_contiguous and b.row_contiguous:
        return 3, 0  # dot_product: the products, their sum, and a cast
    splits = batch == 1 and ceil(M / 16) * ceil(N / 16) <= (2048 if _size() in "sd" else 1024)
    splits = splits and max(M, N, 128) <= K and _generation() < 17 and min(M, N) > 1
    return 2 if splits else 1, copies


def _is_copied(x: Array, is_vector: bool) -> bool:
    """`check_transpose` in matmul.cpp."""
    (row, column), (rows, columns) = x.layout.strides[-2:], x.shape[-2:]
    plain = column == 1 and (not is_vector or row == columns)
    return not plain and not (row == 1 and (not is_vector or column == rows))


def _quantized_matmul(group_size: int, bits: int, transpose: int, x: Array, w: Array, shape: list[int]) -> int:
    """`QuantizedMatmul::eval_gpu` in quantized.cpp."""
    K, N = x.shape[-1], shape[-1]
    M = x.layout.size // K if w.layout.ndim == 2 and x.row_contiguous else x.shape[-2]
    if not transpose:
        return 2 if M < 4 and K >= 1024 else 1  # qvm_split_k, and a sum
    if _qmv_batch_limit(K, N) > M or prod(shape) > M * N:
        return 1
    align = max(group_size, 32)  # qmm_splitk, and a sum
    parts = min(max(1, 512 // (ceil(N / 32) * ceil(M / 32))), K // align)
    return 2 if any(K % (n * align) == 0 for n in range(2, parts + 1)) else 1


def _qmv_batch_limit(K: int, N: int) -> int:
    """`get_qmv_batch_limit` in quantized.cpp."""
    if _size() == "d":
        limits = (32, 18, 12)
    else:
        limits = (33, 25, 13) if _generation() >= 17 else (13, 15, 13) if _generation() >= 15 else (14, 10, 6)
    return limits[0 if max(K, N) <= 2048 else 1 if max(K, N) <= 4096 else 2]


def _rope_copies(x: Array, dims: int, donatable: bool) -> int:
    """`RoPE::eval_gpu` in rope.cpp."""
    if dims < x.shape[-1]:
        return _unless_donated(x, donatable, x.row_contiguous)
    if x.row_contiguous or prod(x.shape[:-3]) == 1:
        return 0
    _, N, T, D = x.shape
    return int(x.layout.strides[:3] != (T * N * D, D, N * D))


def _attention(q: Array, k: Array, v: Array, *masks: Array) -> tuple[int, int]:
    """`ScaledDotProductAttention::eval_gpu` in scaled_dot_product_attention.cpp. Kernels, and copies."""
    if q.shape[2] > 8:
        return 1, sum(not a.last_contiguous for a in (q, k, v, *masks))
    B, H, _, D = q.shape
    axis = 1 if B == 1 else 0  # of heads or rows, which may be transposed with the positions
    transposed = (D * q.shape[axis], 1, D) == (*q.layout.strides[2:], q.layout.strides[axis])
    copies = int(not (q.row_contiguous or 1 in (B, H) and transposed))
    for a in (k, v):
        strides = a.layout.strides
        copies += not (a.last_contiguous and (1 in a.shape[:2] or strides[0] == strides[1] * a.shape[1]))
    for a in masks:
        strides = a.layout.strides
        copies += not (a.row_contiguous or 1 in (B, H) or strides[0] == strides[1] * a.shape[1])
    S = k.shape[2]
    return 2 if _size() in "sd" and S >= 1024 or k.shape[1] < H and S >= 4096 else 1, copies


def _size() -> str:
    """The last letter of the architecture: g and p (base), s (Max), d (Ultra)."""
    return mx.device_info()["architecture"][-1]


def _generation() -> int:
    """The number in the architecture, 13 for M1."""
    return int("".join(filter(str.isdigit, mx.device_info()["architecture"])))


def sampler_launches(options: GenerationOptions, vocab_size: int, rows: int = 1) -> Counter[str]:
    """Count the launches that draw a token for each row from bfloat16 logits, and update the penalties' states."""
    logits = mx.zeros((rows, vocab_size), mx.bfloat16)
    mx.eval(logits)
    with recording():
        samplers = [Sampler(options, range(100), seed) for seed in range(rows)]
        for _ in range(2):  # the second has the states of a first token
            tokens = sample_batch(samplers, logits)
            states = [vars(sampler.penalty_row(vocab_size)[0]) for sampler in samplers]
            counts = count_launches(tokens, states)
            mx.eval(tokens, states)
    return counts


def decode_launches(
    config: ModelConfig, kv: KVOptions = DEFAULT, context: int = 500, bits: int = 4, rows: int = 1
) -> Counter[str]:
    """Count the launches of a decoding step, to the logits and the new keys and values."""
    model = Decoder(config)
    set_zero_weights(model, bits)
    step, caches = DecodeStep(model.eval()), make_cache(model, kv)
    for layer, layer_cache, (mixer, *_) in zip(model.layers, caches, config.layer_sublayers, strict=True):
        if isinstance(layer_cache, RecurrentCache):
            layer.mixer(mx.zeros((rows, 1, config.hidden_size), mx.bfloat16), layer_cache)
        else:
            keys, values = (mx.zeros((rows, mixer.kv_heads, context, dim), mx.bfloat16) for dim in mixer.kv_dims)
            layer_cache.update_and_fetch(keys, values)
    return step_launches(lambda tokens: step(tokens, caches), caches, rows)


def step_launches(step: Callable[[mx.array], mx.array], caches: list[Any], rows: int = 1) -> Counter[str]:
    """Count the launches of `step(tokens)`, which returns logits and appends to the caches."""
    with recording():
        for _ in range(2 if rows == 1 else 5):  # the first makes room in the caches, the fourth of a batch is compiled
            tokens = mx.array([[5]] * rows)
            mx.eval([x.state for x in caches])
            counts = count_launches(step(tokens), [x.state for x in caches])
    return counts


def set_zero_weights(model: nn.Module, bits: int) -> None:
    """Quantize a model, unless `bits` is 16, and let its weights be zeros, evaluated, in bfloat16."""
    if bits < 16:
        nn.quantize(model, bits=bits)
    dtypes = {mx.float32: mx.bfloat16}
    model.update(tree_map(lambda x: mx.zeros(x.shape, dtypes.get(x.dtype, x.dtype)), model.parameters()))
    mx.eval(model.parameters())


def _describe(outputs: list[mx.array]) -> list[dict[str, Any]]:
    # nanobind's objects have, behind the header of every Python object, the offset of the C++ object as an int32.
    offsets = (ctypes.c_int32.from_address(id(x) + object.__basicsize__).value for x in outputs)
    addresses = [id(x) + offset for x, offset in zip(outputs, offsets, strict=True)]
    text = _library().describe_graph((ctypes.c_void_p * len(addresses))(*addresses), len(addresses))
    return [json.loads(line) for line in text.splitlines()]


@cache
def _library() -> ctypes.CDLL:
    """Compile graph.cpp, in two seconds."""
    (folder,) = mlx.__path__
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "graph.so")
        flags = f"-std=c++20 -shared -fPIC -I{folder}/include -L{folder}/lib -lmlx -Wl,-rpath,{folder}/lib".split()
        command = ["c++", Path(__file__).with_name("graph.cpp"), *flags, "-o", path]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(path))
    library.describe_graph.restype = ctypes.c_char_p
    return library

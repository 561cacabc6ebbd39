"""The costs of training attention against counts: of MLX's graphs, and of the Metal kernels in the harness."""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.kernels import attention_dispatch, blockwise_attention
from mlxlm.kernels.attention_dispatch import TRAINING, attention_case
from mlxlm.kernels.mlx_attention import mlx_attention
from mlxlm.kernels.training_cost import Cost, Shape, blockwise_cost, tiled_cost, tiling_pays, unfused_cost
from tests.paths import ROOT

DTYPES = {2: mx.bfloat16, 4: mx.float32}
VIEWS = {"Broadcast", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Transpose", "Unflatten"}
NOT_ELEMENTWISE = {"Arange", "Concatenate", "Full", "Matmul", "Reduce", "SliceUpdate", "Softmax"}


@dataclass
class Kernel:
    """An operation of a graph, with the elementwise operations that `mx.compile` fuses into it."""

    name: str
    elements: int
    reads: dict[str, int]  # arrays and the bytes of them that it reads
    written: int
    products: int


def cost_of_graph(function, *arrays):
    """Count products, bytes, and what the operations that depend on the last array, the cotangent, keep of the others.

    Each kernel reads each of its inputs once.
    """
    operations, inputs = [], []

    def add(event):
        if event["type"] == "inputs":
            inputs.extend(name for name, *_ in event["inputs"])
        elif event["type"] == "primitive":
            operations.append(event)

    mx.export_function(add, function, *arrays)
    kernels, readers, views = {}, defaultdict(set), {}
    for event in operations:
        sources = [viewed(views, *source) for source in event["inputs"]]
        if event["name"] in VIEWS:
            for (output, *form), source in zip(event["outputs"], sources, strict=False):
                views[output] = source[0], min(source[1], nbytes(*form))
            continue
        ((output, *form),), reads = event["outputs"], dict(sources)
        written, elements = nbytes(*form), math.prod(form[0])
        if event["name"] == "SliceUpdate":  # in place: it reads and writes as much as it adds
            written, reads = 3 * sources[1][1], {}
        inner = event["inputs"][0][1][-1] if event["name"] == "Matmul" else 0
        kernels[output] = Kernel(event["name"], elements, reads, written, elements * inner)
        for source in reads:
            readers[source].add(output)
    fused_into = {}
    for output, kernel in reversed(list(kernels.items())):
        targets = {fused_into.get(reader, reader) for reader in readers[output]}
        target = targets.pop() if len(targets) == 1 else output
        both = {kernel.name, kernels[target].name}
        if target != output and not both & NOT_ELEMENTWISE and kernels[target].elements == kernel.elements:
            fused_into[output] = target
            kernels[target].reads |= kernel.reads
    backward, kept = {inputs[-1]}, {}
    for output in fused_into:
        del kernels[output]
    for output, kernel in kernels.items():
        kernel.reads = {name: size for name, size in kernel.reads.items() if name not in fused_into}
        if kernel.reads.keys() & backward:
            backward.add(output)
            kept |= {name: size for name, size in kernel.reads.items() if name not in backward | set(inputs)}
    moved = sum(kernel.written + sum(kernel.reads.values()) for kernel in kernels.values())
    return Cost(sum(kernel.products for kernel in kernels.values()), moved, sum(kept.values()))


def nbytes(shape, dtype):
    return math.prod(shape) * dtype.size


def viewed(views, name, shape, dtype):
    """The array behind a view, and how many bytes of it one sees."""
    return views.get(name, (name, nbytes(shape, dtype)))


def arrays(shape):
    """Queries, keys, values and the cotangent of the output."""
    heads = (shape.H, shape.K, shape.K, shape.H)
    return [mx.zeros((1, n, shape.T, shape.D), DTYPES[shape.itemsize]) for n in heads]


def segment_ids(shape):
    return None if shape.text_length is None else (mx.arange(shape.T, dtype=mx.int32) // shape.text_length)[None]


BASE = Shape(T=256, D=64, H=4, K=2, itemsize=2)
SHAPES = [
    BASE,
    replace(BASE, D=32, K=4),
    replace(BASE, T=192, D=128, itemsize=4),
    replace(BASE, window=50),
    replace(BASE, D=80, text_length=64),
    replace(BASE, T=200, H=2, itemsize=4, window=70, text_length=100),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unfused_cost_is_that_of_the_graph(shape, monkeypatch):
    monkeypatch.setattr("mlxlm.kernels.mlx_attention.ON_CPU", False)
    options = {"window": shape.window, "segment_ids": segment_ids(shape)}

    def gradient(q, k, v, g):
        outputs, gradients = mx.vjp(lambda *x: mlx_attention(*x, 0.1, **options), [q, k, v], [g])
        return *outputs, *gradients

    counted = cost_of_graph(gradient, *arrays(shape))
    assert unfused_cost(shape).products == counted.products
    assert unfused_cost(shape) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("shape", [*SHAPES, replace(BASE, T=2048, D=128, H=8, window=128)], ids=str)
def test_blockwise_cost_is_that_of_the_graph(shape, monkeypatch):
    """MLX doesn't export custom functions, so what it keeps, their outputs, is not counted."""
    monkeypatch.setattr(blockwise_attention, "exp_nonpositive", mx.exp)
    monkeypatch.setattr(blockwise_attention, "_BLOCK_BYTES", blockwise_attention.BLOCK_BYTES["gpu"])

    def gradient(q, k, v, g):
        rows, cotangent = (x.reshape(1, shape.K, -1, shape.T, shape.D) for x in (q, g))
        scores = blockwise_attention._Scores(rows, k, 0.1, shape.window, None, segment_ids=segment_ids(shape))
        output, lse = blockwise_attention._forward(scores, v)
        return output, lse, *blockwise_attention._backward(scores, v, output, lse, cotangent)

    counted = cost_of_graph(gradient, *arrays(shape))
    assert blockwise_cost(shape)[:2] == pytest.approx(counted[:2], rel=0.05)


@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 128])
@pytest.mark.parametrize("T", [256, 512])
@pytest.mark.parametrize("itemsize", DTYPES)
def test_tiling_pays_for_windows_of_at_most_a_quarter(T, D, itemsize):
    shape = Shape(T, D, 8, 2, itemsize)
    assert not tiling_pays(shape) and not tiling_pays(replace(shape, window=T // 2))
    assert tiling_pays(replace(shape, window=T // 4)) and tiling_pays(replace(shape, window=16))


def test_table_of_the_kernels_documentation(monkeypatch):
    """The rows of metal_kernels/README.md, for 16 heads in bfloat16 on a GPU without matrix units."""
    monkeypatch.setattr(attention_dispatch, "metal_available", lambda: True)
    monkeypatch.setattr(attention_dispatch, "_has_matrix_units", lambda: False)
    lengths = [(T, window, None) for T in (256, 1024, 4096) for window in (None, T // 4)] + [(512, None, 128)]
    rows = []
    for T, window, text_length in lengths:
        keys = f"window of {window:,}" if window else f"texts of {text_length}" if text_length else "all"
        for D in (64, 128):
            shape = Shape(T, D, 16, 16, 2, window, text_length)
            costs = [cost(shape) for cost in (unfused_cost, tiled_cost, blockwise_cost)]
            products, moved, kept = (" / ".join(f"{cost[i] / 1e6:,.0f}" for cost in costs) for i in range(3))
            case = attention_case(TRAINING, "bfloat16", D, 16, 16, T, T, (), window=window)
            chosen = TRAINING.preferred_paths(case)[0][0]
            rows.append(f"| {T:,} | {keys} | {D} | {products} | {moved} | {kept} | `{chosen}` |")
    table = "\n".join(rows)
    readme = (ROOT / "metal_kernels/README.md").read_text(encoding="utf-8")
    assert table in readme, f"the table should be\n{table}"

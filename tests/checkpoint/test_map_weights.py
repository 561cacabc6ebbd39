"""Fused, grouped, transposed and interleaved tensors: converted both ways, and read once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.families import WeightMapping
from mlxlm.utils.errors import CheckpointError


def numbers(shape, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 2**16, shape).astype(np.float32))


@st.composite
def mappings_with_arrays(draw):
    """A mapping, and the file's arrays under its name."""
    count, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = draw(st.integers(0, 3)) if count == 1 else 0
    if count == 1:
        groups, rows = 1, (2 * draw(st.integers(1, 4)) * max(heads, 1),)
    else:
        rows = tuple(groups * draw(st.integers(1, 4)) for _ in range(count))
    modules = tuple(f"model.layers.0.part{i}" for i in range(count))
    mapping = WeightMapping("file.0.whole", modules, rows, groups, draw(st.booleans()), heads)
    shape = (sum(rows), draw(st.integers(1, 5)))
    weight = numbers(shape[::-1] if mapping.transposed else shape)
    arrays = {"file.0.whole.weight": weight}
    for name, width in (("scales", (2,)), ("biases", (2,)), ("bias", ())):
        if draw(st.booleans()):
            arrays[f"file.0.whole.{name}"] = numbers((sum(rows), *width))
    return mapping, arrays


@settings(max_examples=60)
@given(mappings_with_arrays())
def test_to_file_weights_inverts_to_decoder_weights(case):
    mapping, arrays = case
    arrays |= {"model.norm.weight": numbers((7,))}
    tensors = to_decoder_weights([mapping], {name: lazy_tensor(value) for name, value in arrays.items()}, "file")
    assert "model.norm.weight" in tensors
    for tensor in tensors.values():
        value = tensor.read()
        assert value.shape == tensor.shape and value.dtype == tensor.dtype
    back = to_file_weights([mapping], tensors)
    assert back.keys() == arrays.keys()
    for name, tensor in back.items():
        assert tensor.shape == arrays[name].shape and tensor.nbytes == arrays[name].nbytes
        assert mx.array_equal(tensor.read(), arrays[name])


def test_grouped_rows_are_split():
    """Two groups of query (two rows), key and value (one each), as Falcon has them."""
    mapping = WeightMapping("qkv", ("q", "k", "v"), (4, 2, 2), groups=2)
    tensors = to_decoder_weights([mapping], {"qkv.bias": lazy_tensor(mx.arange(8))}, "file")
    assert {name: tensor.read().tolist() for name, tensor in tensors.items()} == {
        "q.bias": [0, 1, 4, 5],
        "k.bias": [2, 6],
        "v.bias": [3, 7],
    }


def test_interleaved_rows_become_halves():
    mapping = WeightMapping("q", ("q",), interleaved=2)
    tensors = to_decoder_weights([mapping], {"q.bias": lazy_tensor(mx.arange(8))}, "file")
    assert tensors["q.bias"].read().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_fused_tensor_is_read_once():
    reads = []

    def read():
        reads.append(1)
        return mx.zeros((6, 2))

    tensors = to_decoder_weights(
        [WeightMapping("qkv", ("q", "k", "v"), (2, 2, 2))],
        {"qkv.weight": LazyTensor((6, 2), mx.float32, "F32", 48, read)},
        "file",
    )
    for _ in range(2):
        for tensor in tensors.values():
            assert tensor.read().shape == (2, 2)
    assert len(reads) == 2  # once for each round: nothing is cached after the last part


def test_mismatched_parts_are_errors():
    mapping = WeightMapping("qkv", ("q", "k", "v"), (2, 2, 2))
    with pytest.raises(
        CheckpointError, match=r"model.bin: qkv.weight is \[5, 2\], config.json says 6 rows \(q, k, v\)"
    ):
        to_decoder_weights([mapping], {"qkv.weight": lazy_tensor(mx.zeros((5, 2)))}, "model.bin")
    with pytest.raises(CheckpointError, match="model.bin: qkv.weight"):
        to_decoder_weights([mapping], {"qkv.weight": lazy_tensor(mx.array(1.0))}, "model.bin")
    with pytest.raises(CheckpointError, match=r"model.bin: q.weight is \[6, 2\], which 2 heads"):
        to_decoder_weights(
            [WeightMapping("q", ("q",), interleaved=2)], {"q.weight": lazy_tensor(mx.zeros((6, 2)))}, "model.bin"
        )

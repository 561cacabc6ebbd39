"""safetensors files: read, written, sharded, and their values through their bits."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_weights, open_checkpoint, save_weights
from mlxlm.checkpoint.lazy_tensor import bitwise_equal, max_abs
from mlxlm.checkpoint.safetensors import file_tensors, folder_tensors, write_shards
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.raw_files import entry, header_file
from tests.small_models import arrays_of


def test_shards_have_an_index_and_load_back(tmp_path):
    weights = {f"w{i}": mx.random.normal((10, 10), key=mx.random.key(i)) for i in range(7)}
    save_weights(tmp_path, weights, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800 and len(set(index["weight_map"].values())) == 4
    loaded = load_weights(tmp_path)
    assert loaded.keys() == weights.keys() and all(mx.array_equal(loaded[k], weights[k]) for k in weights)


def test_file_tensors_has_all_names(model_dir, tiny_config):
    assert file_tensors(model_dir / "model.safetensors").keys() == arrays_of(Decoder(tiny_config)).keys()


def test_each_read_is_a_new_array_and_nothing_is_cached(tmp_path):
    """As much memory for eight passes over a file as for one tensor of it."""
    weights = {f"w{i}": mx.random.normal((256, 1024), key=mx.random.key(i)) for i in range(16)}
    save_weights(tmp_path, weights)
    tensors = folder_tensors(tmp_path)
    assert mx.array_equal(tensors["w3"].read(), weights["w3"]) and tensors["w3"].read() is not tensors["w3"].read()
    del weights
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(8):
        for tensor in tensors.values():
            mx.eval(tensor.read())
    assert mx.get_active_memory() - before < 2 << 20
    assert mx.get_peak_memory() - before < 3 << 20  # of 16 MB


def test_unusual_names_are_allowed(tmp_path):
    header = {"../../etc/passwd": entry(0, 4, [1]), "b": entry(4, 8, []), "empty": entry(8, 8, [0, 3])}
    tensors = file_tensors(header_file(tmp_path / "x.safetensors", header, bytes(8)))
    assert [tensor.read().shape for tensor in tensors.values()] == [(1,), (), (0, 3)]


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    save_weights(tmp_path, {f"w{i}": mx.random.normal((256, 1024), key=mx.random.key(i)) for i in range(16)})
    (tmp_path / "out").mkdir()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    write_shards(tmp_path / "out", folder_tensors(tmp_path), shard_bytes=9 << 20, finite=True)
    assert mx.get_peak_memory() - before < 4 << 20  # of 16 MB in two files
    written, source = folder_tensors(tmp_path / "out"), folder_tensors(tmp_path)
    assert all(bitwise_equal(written[name].read(), source[name].read()) for name in source)


def test_tensors_are_aligned(tmp_path):
    weights = {
        "bytes": mx.zeros((3,), mx.uint8), "half": mx.ones((3,), mx.float16), "words": mx.ones((2,), mx.uint32),
        "none": mx.zeros((0, 4)), "one": mx.array(2.5), "transposed": mx.arange(6).reshape(2, 3).T,
        "bool": mx.array([True]), "wide": mx.array([2**40]),
    }  # fmt: skip
    save_weights(tmp_path, weights)
    raw = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "mlx"} and length % 8 == 0
    for name, value in weights.items():
        assert header[name]["data_offsets"][0] % value.dtype.size == 0
    read = mx.load(str(tmp_path / "model.safetensors"))
    assert all(mx.array_equal(read[name], value) and read[name].shape == value.shape for name, value in weights.items())
    safe = pytest.importorskip("safetensors.numpy")
    reference = safe.load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(reference[name], np.array(value)) for name, value in weights.items())


def test_several_files_without_an_index(model_dir):
    shutil.copy(model_dir / "model.safetensors", model_dir / "model.fp16.safetensors")
    assert open_checkpoint(model_dir).format == "safetensors"  # the other is a variant
    (model_dir / "model.safetensors").rename(model_dir / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is also in another file of"):
        open_checkpoint(model_dir)


DTYPES = [mx.float16, mx.bfloat16, mx.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude(dtype):
    for values, expected in (
        ([0.5, -3.0, 2.0], 3.0), ([0.5, -1.0, 2.0], 2.0), ([-0.0], 0.0), ([-2.0, -7.0], 7.0), ([], 0.0),
        ([1.0, float("inf")], math.inf), ([-float("inf"), 4.0], math.inf),
    ):  # fmt: skip
        assert max_abs(mx.array(values, dtype=dtype)) == expected
    assert math.isnan(max_abs(mx.array([1.0, float("nan"), 2.0], dtype=dtype)))
    assert max_abs(mx.array([[1.0, 2.0], [-5.0, 3.0]], dtype=dtype).T[1]) == 3.0  # not contiguous


def test_equal_to_the_bit():
    assert bitwise_equal(mx.array([1.0, float("nan")]), mx.array([1.0, float("nan")]))
    assert not bitwise_equal(mx.array([0.0]), mx.array([-0.0]))
    assert bitwise_equal(mx.array([1, 2], dtype=mx.int64), mx.array([1, 2], dtype=mx.int64))

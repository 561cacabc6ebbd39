"""PyTorch files are read as PyTorch reads them, without it and without running code from them."""

from __future__ import annotations

import collections
import json
import pickle
import time
import zipfile

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, open_checkpoint, pytorch
from mlxlm.checkpoint.pytorch import PickleError, read_pickle
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.raw_files import archive, state


def test_handmade_file(tmp_path):
    numbers = np.arange(12, dtype=np.float32)
    content = state({
        "whole": ("FloatStorage", "0", 12, 0, (3, 4), (4, 1)),
        "transposed": ("FloatStorage", "0", 12, 0, (4, 3), (1, 4)),
        "part": ("FloatStorage", "0", 12, 5, (2, 2), (4, 1)),
        "nothing": ("FloatStorage", "0", 12, 12, (0, 3), (3, 1)),
        "one": ("HalfStorage", "1", 1, 0, (), ()),
    })  # fmt: skip
    path = archive(tmp_path / "x.bin", content, {"0": numbers.tobytes(), "1": np.float16(2.5).tobytes()})
    tensors = pytorch.file_tensors(path)
    whole = numbers.reshape(3, 4)
    expected = {"whole": whole, "transposed": whole.T, "part": whole[1:, 1:3], "nothing": np.zeros((0, 3)), "one": 2.5}
    for name, value in expected.items():
        read = tensors[name].read()
        assert read.shape == tensors[name].shape and read.dtype == tensors[name].dtype
        np.testing.assert_array_equal(np.array(read), value if name != "part" else [[5, 6], [9, 10]])
    assert (tensors["one"].stored_dtype, tensors["part"].nbytes) == ("F16", 16)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the oracle is PyTorch (pip install torch)")


@pytest.mark.parametrize(("protocol", "zipped"), [(2, True), (4, True), (2, False)])
@pytest.mark.parametrize("nested", ["", "state_dict", "model", "module", "model_state_dict"])
def test_files_of_torch_save(tmp_path, torch, protocol, zipped, nested):
    """With `zipped` False, they have the format before PyTorch 1.6."""
    table = torch.randn(6, 8)
    saved = collections.OrderedDict(
        plain=torch.randn(3, 4), transposed=table.t(), part=table[2:4, ::2], bfloat=torch.randn(5).bfloat16(),
        half=torch.randn(2, 3).half(), double=torch.randn(2).double(), ints=torch.arange(5), bools=torch.tensor([True]),
        bytes=torch.arange(4, dtype=torch.uint8), empty=torch.zeros(0, 3), one=torch.tensor(3.5),
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
    )  # fmt: skip
    beside = {"epoch": 3, "loss": 2.5, "sizes": torch.Size([2, 3]), "dtype": torch.float16}
    whole = {nested: saved, **beside} if nested else saved
    path = tmp_path / "x.pt"
    torch.save(whole, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    tensors = pytorch.file_tensors(path)
    assert tensors.keys() == saved.keys()
    for name, value in saved.items():
        read = tensors[name].read()
        assert tuple(read.shape) == tuple(value.shape) and read.dtype == tensors[name].dtype
        expected = value.detach().to(torch.float32).numpy()
        np.testing.assert_array_equal(np.array(read.astype(mx.float32)), expected)


def test_lazily_negated_and_expanded_tensors_are_errors(tmp_path, torch):
    negative = torch.view_as_complex(torch.randn(3, 2)).conj().imag
    assert negative.is_neg()
    torch.save({"w": negative}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="a tensor has neg set"):
        pytorch.file_tensors(tmp_path / "x.pt")
    torch.save({"w": torch.ones(1, 6).expand(4, 6)}, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="w has elements that share memory"):
        pytorch.file_tensors(tmp_path / "y.pt")


def test_state_dict_and_whole_module(tmp_path, torch):
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    assert set(pytorch.file_tensors(tmp_path / "x.pt")) == set(module.state_dict())
    torch.save(module, tmp_path / "y.pt")
    with pytest.raises(CheckpointError, match="refers to torch.nn.modules.container.Sequential"):
        pytorch.file_tensors(tmp_path / "y.pt")


@pytest.mark.parametrize("shards", [1, 2])
def test_pytorch_folder_is_a_model(tmp_path, tiny_config, torch, shards):
    model = Decoder(tiny_config)
    model.init_weights(0)
    weights = {name: torch.from_numpy(np.array(value)) for name, value in tree_flatten(model.parameters())}
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    torch.save({"x": torch.zeros(1)}, tmp_path / "training_args.bin")
    if shards == 1:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        names = list(weights)
        files = {f"pytorch_model-0000{i + 1}-of-00002.bin": names[i::2] for i in range(2)}
        for file, part in files.items():
            torch.save({name: weights[name] for name in part}, tmp_path / file)
        index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).format == "pytorch"
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(load_model(tmp_path)[0](tokens), model(tokens))
    if shards == 2:
        (tmp_path / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(CheckpointError, match="pytorch_model-00002-of-00002.bin is missing"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values(protocol):
    value = {
        "a": [1, 2.5, None, True, -300, 2**40, "text", (1,), (1, 2, 3, 4), {"b": ()}],
        "c": collections.OrderedDict(),
    }
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_hash_collisions_are_refused():
    """In a dictionary, 40,000 of them would take 17 s, and the limits allow six times as many."""
    numbers = ((2**61 - 1) * i for i in range(1, 40_000))
    keys = b"".join(b"\x8a\x0a" + number.to_bytes(10, "little", signed=True) + b"N" for number in numbers)
    started = time.process_time()
    with pytest.raises(PickleError, match="malformed"):
        read_pickle(b"\x80\x02}(" + keys + b"u.")
    assert time.process_time() - started < 2

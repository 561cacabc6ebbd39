"""PyTorch files are read as PyTorch reads them, without it."""

import collections
import json
import zipfile

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, open_checkpoint, pytorch
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.pickles import archive, state


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


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (("FloatStorage", "0", 12, 9, (4,), (1,)), "a exceeds its storage"),
        (("FloatStorage", "0", 12, 0, (3, 4), (5, 1)), "a exceeds its storage"),
        (("FloatStorage", "0", 13, 0, (13,), (1,)), "a exceeds its storage"),
        (("FloatStorage", "0", 12, 0, (2**30, 2**30), (0, 0)), "a has elements that share memory"),
        (("FloatStorage", "0", 12, 0, (2, 2), (1,)), "a has impossible shape and strides"),
        (("FloatStorage", "0", 12, -1, (2,), (1,)), "a has impossible shape and strides"),
        (("FloatStorage", "0", 12, 0, (-2,), (1,)), "a has impossible shape and strides"),
        (("FloatStorage", "7", 12, 0, (2,), (1,)), "record archive/data/7, which is missing"),
        (("QInt8Storage", "0", 12, 0, (2,), (1,)), "refers to torch.QInt8Storage"),
    ],
)
def test_invalid_views_are_errors(tmp_path, entry, expected):
    path = archive(tmp_path / "x.bin", state({"a": entry}), {"0": bytes(48)})
    with pytest.raises(CheckpointError, match=expected) as caught:
        pytorch.file_tensors(path)
    assert str(path) in str(caught.value)


def test_other_archives_are_errors(tmp_path):
    content = state({"a": ("FloatStorage", "0", 100, 0, (100,), (1,))})
    path = archive(tmp_path / "a.bin", content, {"0": bytes(400)}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="archive/data.pkl is compressed"):
        pytorch.file_tensors(path)
    (tmp_path / "b.bin").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    with pytest.raises(CheckpointError, match="before 1.6"):
        pytorch.file_tensors(tmp_path / "b.bin")
    (tmp_path / "c.bin").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match="not a complete PyTorch file"):
        pytorch.file_tensors(tmp_path / "c.bin")
    with zipfile.ZipFile(tmp_path / "d.bin", "w") as file:
        file.writestr("other/text", "x")
    with pytest.raises(CheckpointError, match="no data.pkl"):
        pytorch.file_tensors(tmp_path / "d.bin")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="the oracle is PyTorch (pip install torch)")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("nested", ["", "state_dict", "model", "module", "model_state_dict"])
def test_files_of_torch_save(tmp_path, torch, protocol, nested):
    table = torch.randn(6, 8)
    saved = collections.OrderedDict(
        plain=torch.randn(3, 4), transposed=table.t(), part=table[2:4, ::2], bfloat=torch.randn(5).bfloat16(),
        half=torch.randn(2, 3).half(), double=torch.randn(2).double(), ints=torch.arange(5), bools=torch.tensor([True]),
        bytes=torch.arange(4, dtype=torch.uint8), empty=torch.zeros(0, 3), one=torch.tensor(3.5),
        parameter=torch.nn.Parameter(torch.randn(2, 2)),
    )  # fmt: skip
    beside = {"epoch": 3, "loss": 2.5, "sizes": torch.Size([2, 3]), "dtype": torch.float16}
    whole = {nested: saved, **beside} if nested else saved
    torch.save(whole, tmp_path / "x.pt", pickle_protocol=protocol)
    tensors = pytorch.file_tensors(tmp_path / "x.pt")
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

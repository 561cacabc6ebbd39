"""Hugging Face's layout, written: whole, equal to the bit, in little memory, and nothing left of a failure."""

import errno
import json

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import huggingface, load_model, open_checkpoint, safetensors, save_weights
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.safetensors import folder_tensors, write_shards
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_folder


@pytest.fixture(scope="module")
def config():
    return ModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=300, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture
def weights(config):
    model = Decoder(config)
    model.init_weights(0)
    return {name: value.astype(mx.bfloat16) for name, value in tree_flatten(model.parameters())}


@pytest.fixture
def tensors(weights):
    return {name: lazy_tensor(value) for name, value in weights.items()}


def bits(value: mx.array) -> np.ndarray:
    return np.array(value.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[value.dtype.size]))


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_what_is_written_is_read_to_the_bit(tmp_path, config, weights, tensors, tiny_tokenizer, shard_bytes):
    huggingface.write(tmp_path, {}, config, tensors, tiny_tokenizer, shard_bytes)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config and checkpoint.tensors.keys() == weights.keys()
    for name, value in weights.items():
        read = checkpoint.tensors[name].read()
        assert read.dtype == value.dtype and np.array_equal(bits(read), bits(value)), name
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["torch_dtype"] == values["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert checkpoint.load_tokenizer().vocab_size == 300
    files = sorted(path.name for path in tmp_path.glob("*.safetensors*"))
    if shard_bytes == 10**9:
        assert files == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    assert set(index["weight_map"].values()) == set(files[:-1]) and files[0].startswith("model-00001-of-0000")


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_transformers_and_mlx_lm_open_it(tmp_path, config, tensors, tiny_tokenizer, shard_bytes):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers")
    mlx_lm = pytest.importorskip("mlx_lm")
    huggingface.write(tmp_path, {"initializer_range": 0.5}, config, tensors, tiny_tokenizer, shard_bytes)
    tokens = [[1, 5, 9, 200]]
    ours = np.array(load_model(tmp_path)[0](mx.array(tokens)), dtype=np.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_allclose(ours, theirs(torch.tensor(tokens)).logits.detach().numpy(), atol=1e-4)
    model, _ = mlx_lm.load(str(tmp_path))
    model.set_dtype(mx.float32)
    np.testing.assert_allclose(ours, np.array(model(mx.array(tokens))), atol=1e-4)


def test_fields_of_the_source_are_kept_as_far_as_they_still_hold(tmp_path, config, tensors, tiny_tokenizer):
    source = {
        "model_type": "llama", "initializer_range": 0.5, "quantization": {"bits": 4}, "auto_map": {"x": "y.py"},
        "torch_dtype": "float64", "hidden_size": 7,
    }  # fmt: skip
    huggingface.write(tmp_path, source, config, tensors, tiny_tokenizer)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["initializer_range"] == 0.5 and values["hidden_size"] == 32 and values["torch_dtype"] == "bfloat16"
    assert "quantization" not in values and "auto_map" not in values
    other = tmp_path / "other"
    other.mkdir()
    huggingface.write(other, {**source, "model_type": "gpt2"}, config, tensors, tiny_tokenizer)
    assert "initializer_range" not in json.loads((other / "config.json").read_text())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_values_that_are_not_finite_are_named(tmp_path, config, tensors, tiny_tokenizer, value, dtype):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].transform(lambda v: v.at[3, 5].add(value)).astype(dtype)
    with (
        pytest.raises(CheckpointError, match="layers.1.mlp.down_proj.weight has values that are not finite"),
        atomic_new_folder(tmp_path / "out") as folder,
    ):
        huggingface.write(folder, {}, config, tensors, tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_a_tensor_can_not_be_read(tmp_path, config, tensors, tiny_tokenizer):
    def fail():
        raise CheckpointError("x.bin is truncated")

    name = "model.norm.weight"
    tensors[name] = LazyTensor(tensors[name].shape, tensors[name].dtype, "BF16", 64, fail)
    with pytest.raises(CheckpointError, match="x.bin is truncated"), atomic_new_folder(tmp_path / "out") as folder:
        huggingface.write(folder, {}, config, tensors, tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_when_the_disk_is_full(tmp_path, config, tensors, tiny_tokenizer, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors, "_bytes_of", full)
    with (
        pytest.raises(CheckpointError, match="cannot write .*model.safetensors: No space left.*try: free some disk"),
        atomic_new_folder(tmp_path / "out") as folder,
    ):
        huggingface.write(folder, {}, config, tensors, tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    save_weights(tmp_path, {f"w{i}": mx.random.normal((256, 1024), key=mx.random.key(i)) for i in range(16)})
    (tmp_path / "out").mkdir()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    write_shards(tmp_path / "out", folder_tensors(tmp_path), shard_bytes=9 << 20, finite=True)
    assert mx.get_peak_memory() - before < 4 << 20  # of 16 MB in two files
    written, source = folder_tensors(tmp_path / "out"), folder_tensors(tmp_path)
    assert all(np.array_equal(bits(written[name].read()), bits(source[name].read())) for name in source)


def test_every_type_and_every_size_begins_where_its_elements_align(tmp_path):
    weights = {
        "bytes": mx.zeros((3,), mx.uint8), "half": mx.ones((3,), mx.float16), "words": mx.ones((2,), mx.uint32),
        "none": mx.zeros((0, 4)), "one": mx.array(2.5), "turned": mx.arange(6).reshape(2, 3).T,
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
    theirs = safe.load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(theirs[name], np.array(value)) for name, value in weights.items())


def test_quantized_folders_have_mlxs_names(tmp_path, config, tiny_tokenizer):
    mlx_lm = pytest.importorskip("mlx_lm")
    plan = {"group_size": 32, "bits": 4, "mode": "affine"}
    model = Decoder(config)
    model.init_weights(0)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        if value.ndim == 1:
            weights[name] = value
            continue
        parts = mx.quantize(value.astype(mx.float16), group_size=32, bits=4)
        layer = name.removesuffix(".weight")
        weights |= {f"{layer}.{part}": v for part, v in zip(("weight", "scales", "biases"), parts, strict=True)}
    quantized = config.with_changes(quantization=plan)
    huggingface.write(tmp_path, {}, quantized, {n: lazy_tensor(v) for n, v in weights.items()}, tiny_tokenizer)
    assert open_checkpoint(tmp_path).config == quantized
    theirs, _ = mlx_lm.load(str(tmp_path))
    tokens = mx.array([[1, 2, 3]])
    ours, _ = load_model(tmp_path)
    np.testing.assert_allclose(np.array(ours(tokens)), np.array(theirs(tokens).astype(mx.float32)), atol=2e-2)

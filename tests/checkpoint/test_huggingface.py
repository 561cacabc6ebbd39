"""Hugging Face's layout: bit-equal when read back, opened by transformers and mlx_lm."""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import huggingface, load_model, open_checkpoint
from mlxlm.checkpoint.lazy_tensor import bitwise_equal
from mlxlm.config import ModelConfig
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_folder
from tests.small_models import random_decoder, tensors_of


@pytest.fixture(scope="module")
def config():
    return ModelConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=300, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@pytest.fixture
def tensors(config):
    return tensors_of(random_decoder(config), mx.bfloat16)


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_write_then_open_is_bit_equal(tmp_path, config, tensors, tiny_tokenizer, shard_bytes):
    huggingface.write(tmp_path, {}, config, tensors, tiny_tokenizer, shard_bytes)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config and checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = checkpoint.tensors[name].read()
        assert read.dtype == tensor.dtype and bitwise_equal(read, tensor.read()), name
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["torch_dtype"] == values["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    assert checkpoint.load_tokenizer().vocab_size == 300
    files = sorted(path.name for path in tmp_path.glob("*.safetensors*"))
    if shard_bytes == 10**9:
        assert files == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"].values()) == set(files[:-1]) and files[0].startswith("model-00001-of-0000")


@pytest.mark.parametrize("shard_bytes", [10**9, 30_000])
def test_transformers_and_mlx_lm_open_it(tmp_path, config, tensors, tiny_tokenizer, shard_bytes):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers")
    mlx_lm = pytest.importorskip("mlx_lm")
    huggingface.write(tmp_path, {"initializer_range": 0.5}, config, tensors, tiny_tokenizer, shard_bytes)
    tokens = [[1, 5, 9, 200]]
    ours = load_model(tmp_path)[0]
    ours.set_dtype(mx.float32)
    logits = np.array(ours(mx.array(tokens)))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_allclose(logits, reference(torch.tensor(tokens)).logits.detach().numpy(), atol=1e-4)
    model, _ = mlx_lm.load(str(tmp_path))
    model.set_dtype(mx.float32)
    np.testing.assert_allclose(logits, np.array(model(mx.array(tokens))), atol=1e-4)


def test_fields_of_the_source_are_kept(tmp_path, config, tensors, tiny_tokenizer):
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
def test_values_that_are_not_finite_are_errors(tmp_path, config, tensors, tiny_tokenizer, value, dtype):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].transform(lambda v: v.at[3, 5].add(value)).astype(dtype)
    with (
        pytest.raises(CheckpointError, match="layers.1.mlp.down_proj.weight has values that are not finite"),
        atomic_new_folder(tmp_path / "out") as folder,
    ):
        huggingface.write(folder, {}, config, tensors, tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []

"""Loading models from folders: whole, and layer by layer."""

from __future__ import annotations

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, load_submodule, load_weights, open_checkpoint, save_weights
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.load import LayerwiseModel
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError
from tests.small_models import arrays_of, in_memory, random_decoder


def test_missing_files_are_named(tmp_path, model_dir):
    with pytest.raises(MlxlmError, match="there is no model folder .*nowhere"):
        load_model(tmp_path / "nowhere")
    (model_dir / "model.safetensors").rename(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="has no model.*safetensors"):
        load_model(model_dir)
    (model_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load_model(model_dir)


def test_tied_model_may_also_store_its_head(model_dir):
    weights = load_weights(model_dir)
    (model_dir / "model.safetensors").rename(model_dir.parent / "before.safetensors")
    save_weights(model_dir, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 1})
    load_model(model_dir)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("[1]", "a configuration is a JSON object"),
        ('{"model_type": "mamba"}', "config.json lacks vocab_size, .*which mlx_lm's mamba needs"),
        ('{"quantization": {"bits": 4}}', "missing"),
    ],
)
def test_malformed_configs_are_errors(model_dir, change, expected):
    (model_dir / "config.json").write_text(change)
    with pytest.raises(MlxlmError, match=expected):
        load_model(model_dir)


def test_load_submodule(model_dir, tiny_config):
    checkpoint = open_checkpoint(model_dir)
    block = Decoder(tiny_config).layers[0]
    load_submodule(block, checkpoint.tensors, "model.layers.1")
    layer = load_model(model_dir)[0].layers[1]
    for name, value in arrays_of(layer).items():
        assert mx.array_equal(arrays_of(block)[name], value), name
    assert not block.training


FAMILIES = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2", "norm": "layer", "positions": "learned", "mlp_gated": False, "hidden_act": "gelu_new",
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4,
    },
    "bloom": {
        "model_type": "bloom", "norm": "layer", "positions": "alibi", "mlp_gated": False, "hidden_act": "gelu_new",
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "embedding_norm": True,
    },
    "gemma2": {
        "model_type": "gemma2", "norm_unit_offset": True, "norm_placement": "both", "sliding_window": 8,
        "layer_types": ("sliding_attention", "full_attention", "sliding_attention"), "query_pre_attn_scalar": 8.0,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "embedding_multiplier": 32**0.5,
        "hidden_act": "gelu_pytorch_tanh",
    },
    "shared keys and values": {"num_kv_shared_layers": 2, "value_norm": True, "attention_k_eq_v": True},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_whole_decoder_to_the_bit(tiny_config, family):
    config = tiny_config.with_changes(num_hidden_layers=3, **FAMILIES[family])
    model = random_decoder(config)
    model.eval()
    tokens = mx.random.randint(0, config.vocab_size, (2, 17), key=mx.random.key(1))
    layerwise = LayerwiseModel(in_memory(model))
    [state] = layerwise.embeddings([tokens])
    for index, expected in enumerate(model.model.layer_states(tokens)):
        state = layerwise.run(layerwise.load_layer(index - 1), index - 1, 0, state) if index else state
        assert all(a is b or mx.array_equal(a, b) for a, b in zip(state, expected, strict=True))
    assert mx.array_equal(layerwise.head()(*state), model(tokens))


def test_memory_does_not_grow_with_the_number_of_layers():
    def peak(layers: int) -> int:
        sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 64}
        config = ModelConfig(num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
        tensors = {
            name: LazyTensor(value.shape, mx.float32, "F32", 0, lambda shape=value.shape: mx.full(shape, 0.01))
            for name, value in arrays_of(Decoder(config)).items()
        }
        model = LayerwiseModel(Checkpoint("here", "safetensors", {}, tensors, None, config))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        [state] = model.embeddings([mx.zeros((1, 8), dtype=mx.int32)])
        for index in range(layers):
            state = model.run(model.load_layer(index), index, 0, state)
            mx.eval(state)
        mx.eval(model.head()(*state))
        return mx.get_peak_memory() - before

    few, many = peak(2), peak(12)
    assert many < 1.5 * few, (few, many)  # how many arrays of a layer are alive together varies

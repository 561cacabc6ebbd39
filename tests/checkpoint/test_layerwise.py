"""A decoder run layer by layer is the decoder."""

import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.load import LayerwiseModel
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder


def in_memory(config: ModelConfig, model: Decoder) -> Checkpoint:
    tensors = {name: lazy_tensor(value) for name, value in tree_flatten(model.parameters())}
    return Checkpoint("here", "safetensors", {}, tensors, None, config)


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
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_whole_decoder_to_the_bit(tiny_config, family):
    config = tiny_config.with_changes(num_hidden_layers=3, **FAMILIES[family])
    model = Decoder(config)
    model.init_weights(0)
    model.eval()
    tokens = mx.random.randint(0, config.vocab_size, (2, 17), key=mx.random.key(1))
    layerwise = LayerwiseModel(in_memory(config, model))
    [state] = layerwise.embeddings([tokens])
    expected = model.model.embed(tokens), None
    for index, layer in enumerate(model.layers):
        state, expected = layerwise.load_layer(index)(*state), layer(*expected)
        assert all(mx.array_equal(a, b) for a, b in zip(state, expected, strict=True))
    assert mx.array_equal(layerwise.head()(*state), model(tokens))


def test_memory_does_not_grow_with_the_number_of_layers():
    def peak(layers: int) -> int:
        sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "vocab_size": 64}
        config = ModelConfig(num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
        shapes = {name: value.shape for name, value in tree_flatten(Decoder(config).parameters())}
        tensors = {
            name: LazyTensor(shape, mx.float32, "F32", 0, lambda shape=shape: mx.full(shape, 0.01))
            for name, shape in shapes.items()
        }
        model = LayerwiseModel(Checkpoint("here", "safetensors", {}, tensors, None, config))
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        [state] = model.embeddings([mx.zeros((1, 8), dtype=mx.int32)])
        for index in range(layers):
            state = model.load_layer(index)(*state)
            mx.eval(state)
        mx.eval(model.head()(*state))
        return mx.get_peak_memory() - before

    few, many = peak(2), peak(12)
    assert many < 1.5 * few, (few, many)  # how many arrays of a layer are alive together varies

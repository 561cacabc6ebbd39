"""Saved folders, quantized or not, have the same logits in mlx_lm.

It ignores sliding windows in some families, so that the texts here are shorter than any window.
"""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.config.quantization import module_quantization
from mlxlm.families import (
    config_from_hf,
    config_to_hf,
    is_mlx_layout,
    load_config,
    normalize_tensor_name,
    weight_mappings,
)
from mlxlm.model import Decoder

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "layer_norm_epsilon": 1e-5}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OTHERS = (  # mlx_lm's glm rotates whole heads, its olmo has other names
    "smollm3", "granite", "cohere", "cohere2", "olmo3", "exaone4", "seed_oss", "glm4", "stablelm", "starcoder2",
    "gemma3_text", "phi",
)  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_window_layers": 2}
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "olmoe": {},
    "lfm2_moe": {"num_dense_layers": 1, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {
        "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "glm4_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 2},
}
FAMILIES = {
    "llama": SIZES,
    "llama 3.1": {**SIZES, "model_type": "llama", "rope_scaling": LLAMA3},
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma": SIZES,
    "gemma2": SIZES,
    "phi3": SIZES,
    "olmo2": SIZES,
    **dict.fromkeys(OTHERS, {**SIZES, "num_hidden_layers": 6}),
    **{name: {**SIZES, **EXPERTS, **changes} for name, changes in MIXTURES.items()},
    "lfm2": {**SIZES, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": YARN},
    "gpt2": GPT2,
    "gpt_neox": {**SIZES, "intermediate_size": 256},
}
TOKENS = np.random.default_rng(1).integers(3, 97, (2, 30))


OTHER_GELU = {
    "gemma": "gelu",
    "gpt_neox": "gelu_new",
    "starcoder2": "gelu",
}  # what mlx_lm computes whatever hidden_act says


@pytest.fixture(params=list(FAMILIES))
def model(request):
    config = config_from_hf({"model_type": request.param, **FAMILIES[request.param]})
    model = Decoder(config.with_changes(hidden_act=OTHER_GELU.get(request.param, config.hidden_act)))
    model.config = config
    rng = np.random.default_rng(0)
    weights = {
        name: mx.array(rng.normal(0.6 if value.ndim == 1 else 0.0, 0.2, value.shape).astype(np.float32))
        for name, value in tree_flatten(model.parameters())
    }
    model.load_weights(list(weights.items()))
    model.eval()
    return model


def write(folder, config, weights, for_mlx):
    (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
    tensors = {name: lazy_tensor(value) for name, value in weights.items()}
    stored = {
        name: tensor.read() for name, tensor in to_file_weights(weight_mappings(config, for_mlx), tensors).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "pt"})
    return stored


def mlx_lm_logits(folder):
    utils = pytest.importorskip("mlx_lm.utils")
    return np.array(utils.load_model(folder)[0](mx.array(TOKENS)))


def test_logits_in_mlx_lm(model, tmp_path):
    for_mlx = model.config.model_type == "gpt_oss"  # of which it can't read transformers' unquantized experts
    write(tmp_path, model.config, dict(tree_flatten(model.parameters())), for_mlx)
    np.testing.assert_allclose(mlx_lm_logits(tmp_path), np.array(model(mx.array(TOKENS))), atol=2e-4)


def test_quantized_logits_in_mlx_lm(model, tmp_path):
    """8 bits, 4 bits in the query, key and value of a layer, and an unquantized down projection."""
    layer = [model.config.mixer(i) for i in range(model.config.num_hidden_layers)].index("attention")
    names = ["q", "k", "v", *(["gate"] if model.config.attn_output_gate else [])]
    special = {f"model.layers.{layer}.self_attn.{name}_proj": {"group_size": 32, "bits": 4} for name in names}
    plan = {"group_size": 32, "bits": 8, "mode": "affine", **special, "model.layers.0.mlp.down_proj": False}
    config = model.config.with_changes(quantization=plan)

    def parameters(name, module):
        if config.router == "sigmoid" and name.endswith("mlp.gate"):
            return False
        return hasattr(module, "to_quantized") and module_quantization(config.quantization, name)

    nn.quantize(model, class_predicate=lambda name, module: parameters(name, module) or False)
    weights = dict(tree_flatten(model.parameters()))
    stored = write(tmp_path, config, weights, for_mlx=True)
    np.testing.assert_allclose(mlx_lm_logits(tmp_path), np.array(model(mx.array(TOKENS))), atol=2e-4)

    again = load_config(tmp_path)
    assert again == config
    assert is_mlx_layout(again, stored) == (config.model_type in ("gpt2", "gpt_neox", *MIXTURES))
    assert all(normalize_tensor_name(again, name) == name for name in stored)
    back = to_decoder_weights(
        weight_mappings(again, for_mlx=True), {n: lazy_tensor(v) for n, v in stored.items()}, "folder"
    )
    assert back.keys() == weights.keys()
    for name, tensor in back.items():
        near = 2**-22 if "norm" in name and config.model_type == "qwen3_next" else 0  # mlx_lm stores them plus 1
        assert mx.allclose(tensor.read(), weights[name], rtol=0, atol=near), name

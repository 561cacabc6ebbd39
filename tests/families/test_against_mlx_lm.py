"""Saved folders, quantized or not, have the same logits in mlx_lm.

It ignores sliding windows in some families, so that the texts here are shorter than any window.
"""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_map
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.config.quantization import module_quantization
from mlxlm.families import (
    config_from_hf,
    config_to_hf,
    is_mlx_layout,
    load_config,
    mlx_lm_mismatch,
    normalize_tensor_name,
    weight_mappings,
    with_multimodal_type,
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
QUERY_SCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
QUERY_SCALE["original_max_position_embeddings"] = 10
OTHERS = (  # mlx_lm's glm rotates whole heads, its olmo has other names
    "smollm3", "granite", "cohere", "cohere2", "olmo3", "exaone4", "seed_oss", "glm4", "stablelm", "starcoder2",
    "gemma3_text", "phi", "ernie4_5", "helium", "exaone",
)  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_window_layers": 2}
LINEAR = {
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_d_state": 12,
}  # fmt: skip
NEMOTRON = {
    **SIZES, "mamba_num_heads": 4, "n_groups": 2, "mamba_head_dim": 32, "ssm_state_size": 12, "head_dim": 16,
}  # fmt: skip
MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "olmoe": {},
    "lfm2_moe": {"num_dense_layers": 1, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {**LINEAR, "shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": {**LINEAR, "shared_expert_intermediate_size": 64, "partial_rotary_factor": 1.0},
    "granitemoehybrid": {**MAMBA, "num_local_experts": 4, "shared_intermediate_size": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 4, "rotary_dim": 8, "tie_word_embeddings": False},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 2},
}
GEMMA4 = {
    **SIZES, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 32,
    "vocab_size_per_layer_input": 97,
}  # fmt: skip
LATENT = {
    **SIZES, **EXPERTS, **MIXTURES["glm4_moe"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 64, "first_k_dense_replace": 1,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
FAMILIES = {
    "llama": SIZES,
    "llama 3.1": {**SIZES, "model_type": "llama", "rope_scaling": LLAMA3},
    "mistral": SIZES,
    "ministral3": {**SIZES, "rope_scaling": QUERY_SCALE},
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma": SIZES,
    "gemma2": SIZES,
    "phi3": SIZES,
    "olmo2": SIZES,
    **dict.fromkeys(OTHERS, {**SIZES, "num_hidden_layers": 6}),
    "cohere": {**SIZES, "use_qk_norm": True},
    "stablelm": {**SIZES, "qk_layernorm": True},
    **{name: {**SIZES, **EXPERTS, **changes} for name, changes in MIXTURES.items()},
    "lfm2": {**SIZES, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "granitemoehybrid, dense": {
        **SIZES,
        **MAMBA,
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        **NEMOTRON,
        "hybrid_override_pattern": "ME*MEM-*",
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "num_experts_per_tok": 2,
    },
    "nemotron_h, dense": {**NEMOTRON, "model_type": "nemotron_h", "hybrid_override_pattern": "M-*-M-"},
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": YARN},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "rope_scaling": MSCALE},
    "deepseek_v3": {**LATENT, "rope_scaling": MSCALE},
    "qwen3_5_text": {**SIZES, **LINEAR, "tie_word_embeddings": True},
    "glm4_moe_lite": LATENT,
    "gemma4_text": {
        **GEMMA4,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 3.0,
    },
    "gemma4 with experts": {
        **GEMMA4,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
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
    (folder / "config.json").write_text(json.dumps(with_multimodal_type(config_to_hf(config))))
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
    assert for_mlx or mlx_lm_mismatch(model.config) is None
    np.testing.assert_allclose(mlx_lm_logits(tmp_path), np.array(model(mx.array(TOKENS))), atol=2e-4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v3", {"n_shared_experts": None}), ("deepseek_v2", {"rope_scaling": None}),
        ("qwen2_moe", {"tie_word_embeddings": True}), ("qwen2_moe", {"mlp_only_layers": [0]}),
    ],
)  # fmt: skip
def test_what_mlx_lm_can_not_run_is_said(name, changes, tmp_path):
    config = config_from_hf({"model_type": name, **FAMILIES[name], **changes})
    assert mlx_lm_mismatch(config).startswith(f"its {name} ")
    write(tmp_path, config, dict(tree_flatten(Decoder(config).parameters())), False)
    with pytest.raises((ArithmeticError, AttributeError, TypeError, ValueError)):
        mlx_lm_logits(tmp_path)


def test_quantized_logits_in_mlx_lm(model, tmp_path):
    """8 bits, 4 bits in the query, key and value of a layer, and an unquantized down projection."""
    layer = [model.config.mixer(i).endswith("attention") for i in range(model.config.num_hidden_layers)].index(True)
    names = ["q", "k", "v", *(["gate"] if model.config.attn_output_gate else [])]
    special = {f"model.layers.{layer}.self_attn.{name}_proj": {"group_size": 32, "bits": 4} for name in names}
    if model.config.kv_lora_rank is not None:
        special = {"model.layers.0.self_attn.embed_q": {"group_size": 32, "bits": 4}}
    if model.config.model_type == "deepseek_v2":  # they are one matrix in mlx_lm, kv_b_proj
        special = {f"model.layers.{i}.self_attn.{part}": False for i in range(2) for part in ("embed_q", "unembed_out")}
    plan = {"group_size": 32, "bits": 8, "mode": "affine", **special, "model.layers.0.mlp.down_proj": False}
    config = model.config.with_changes(quantization=plan)

    def parameters(name, module):
        if name.endswith("mlp.gate") and (config.router == "sigmoid" or config.kv_lora_rank is not None):
            return False
        return hasattr(module, "to_quantized") and module_quantization(config.quantization, name)

    nn.quantize(model, class_predicate=lambda name, module: parameters(name, module) or False)
    weights = dict(tree_flatten(model.parameters()))
    stored = write(tmp_path, config, weights, for_mlx=True)
    np.testing.assert_allclose(mlx_lm_logits(tmp_path), np.array(model(mx.array(TOKENS))), atol=2e-4)

    again = load_config(tmp_path)
    assert again == config
    own_names = config.model_type.startswith("gpt") or config.num_experts is not None
    own_names |= any("conv1d" in name for name in stored)
    shapes = {name: value.shape for name, value in stored.items()}
    assert is_mlx_layout(again, shapes) == own_names
    assert all(normalize_tensor_name(again, name) == name for name in stored)
    back = to_decoder_weights(
        weight_mappings(again, for_mlx=True), {n: lazy_tensor(v) for n, v in stored.items()}, "folder"
    )
    assert back.keys() == weights.keys()
    for name, tensor in back.items():
        near = 2**-22 if "norm" in name and config.attn_output_gate else 0  # mlx_lm stores them plus 1
        assert mx.allclose(tensor.read(), weights[name], rtol=0, atol=near), name


def test_folders_of_llama4_that_mlx_lm_quantized(tmp_path):
    utils = pytest.importorskip("mlx_lm.utils")
    text = {
        **SIZES, "model_type": "llama4_text", "num_hidden_layers": 4, "intermediate_size_mlp": 96, "rope_theta": 1e4,
        "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.6, "attention_bias": False, "use_qk_norm": True,
        "rms_norm_eps": 1e-6, "rope_scaling": None,
    }  # fmt: skip
    model_class, args_class = utils._get_classes({"model_type": "llama4"})
    theirs = model_class(args_class.from_dict({"model_type": "llama4", "text_config": dict(text)}))
    mx.random.seed(0)
    theirs.update(tree_map(lambda x: (x.ndim == 1) + 0.2 * mx.random.normal(x.shape), theirs.parameters()))
    plan = {"group_size": 32, "bits": 8}
    nn.quantize(theirs, **plan)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(theirs.parameters())))
    config = {"model_type": "llama4", "text_config": text, "quantization": plan}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = mx.array(TOKENS)
    np.testing.assert_allclose(np.array(load_model(tmp_path)[0](tokens)), np.array(theirs(tokens)), atol=5e-4)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_folders_that_mlx_lm_quantized(model_type, tmp_path):
    """DeepSeek V2 has kv_b_proj in one piece, as older folders of V3."""
    values = {
        "model_type": model_type,
        "rope_theta": 1e4,
        "rope_scaling": MSCALE,
        **LATENT,
        "routed_scaling_factor": 1.5,
    }
    values |= {"topk_method": "greedy", "n_group": 1} if model_type == "deepseek_v2" else {}
    stored = written_by_mlx_lm(tmp_path, values, {"group_size": 32, "bits": 4})
    assert any("kv_b_proj" in name for name in stored) == (model_type == "deepseek_v2")


@pytest.mark.parametrize("plan", [None, {"group_size": 32, "bits": 4}], ids=["float32", "4 bits"])
def test_folders_of_mlx_lm_with_the_type_of_a_model_with_images(plan, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    text = {"model_type": "qwen3_5_text", **FAMILIES["qwen3_5_text"], "rope_parameters": rope}
    written_by_mlx_lm(tmp_path, {"model_type": "qwen3_5", "text_config": text}, plan)


def written_by_mlx_lm(folder, values, plan):
    """The tensors of a folder that mlx_lm writes; it and mlxlm compute the same from them."""
    utils = pytest.importorskip("mlx_lm.utils")
    model_class, args_class = utils._get_classes(values)
    theirs = model_class(args_class.from_dict(values))
    mx.random.seed(0)
    theirs.update(tree_map(lambda x: (x.ndim == 1) + 0.2 * mx.random.normal(x.shape), theirs.parameters()))
    if plan:
        nn.quantize(theirs, **plan)
    stored = dict(tree_flatten(theirs.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    (folder / "config.json").write_text(json.dumps({**values, **({"quantization": plan} if plan else {})}))
    np.testing.assert_allclose(np.array(load_model(folder)[0](mx.array(TOKENS))), mlx_lm_logits(folder), atol=5e-4)
    return stored

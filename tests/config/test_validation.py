"""All problems of a configuration are reported at once, each with a value that would work."""

import pytest

from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization
from mlxlm.utils.errors import ConfigError

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LINEAR = {
    "layer_types": ("linear_attention", "full_attention"), "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA = {"layer_types": ("mamba", "full_attention"), "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**{**SIZES, "num_attention_heads": 6, "vocab_size": 0}, num_key_value_heads=4, rope_theta=-1)
    message = str(caught.value)
    assert "vocab_size is 0" in message and "rope_theta is -1" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "does not divide num_attention_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 2**40}, "hidden_size is"),
        ({"hidden_size": 2**30, "num_hidden_layers": 2**13}, "parameters"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"hidden_act": "tanh"}, "hidden_act is 'tanh'.*silu, gelu"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ({"eos_token_id": -1}, "eos_token_id is -1, it must be a token id below"),
        ({"eos_token_id": [1, 2**40]}, "eos_token_id is .*1099511627776.*, it must be a token id below"),
        ({"eos_token_id": [0.5] * 100_000}, r"eos_token_id is .{,100}\.\.\.\], it must"),
        ({"bos_token_id": 2**40}, "bos_token_id is 1099511627776, it must be a token id below"),
        ({"bos_token_id": -2}, "bos_token_id is -2"),
        ({"bos_token_id": True}, "bos_token_id is True"),
        ({"pad_token_id": 2**40}, "pad_token_id is 1099511627776"),
        ({"pad_token_id": [0]}, r"pad_token_id is \[0\]"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits is 7"),
        ({"quantization": 4}, "quantization is 4"),
        ({"quantization": {"bits": 4}}, "quantization lacks group_size"),
        ({"quantization": {"bits": 4, "group_size": 16}}, "group_size is 16, affine has"),
        ({"quantization": {"bits": 4, "group_size": 64, "mode": "mxfp4"}}, "group_size is 64, mxfp4 has 32"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "nvfp4"}}, "group_size is 32, nvfp4 has 16"),
        ({"quantization": {"bits": 4, "group_size": 32, "mode": "mxfp8"}}, "bits is 4, mxfp8 has 8"),
        (
            {"quantization": {"bits": 4, "group_size": 32, "mode": "fp3"}},
            "mode is 'fp3', .*affine, mxfp4, mxfp8, nvfp4",
        ),
        ({"quantization": {"bits": 4, "group_size": 32, "lm_head": {"bits": 7}}}, "lm_head: bits is 7"),
        ({"quantization": {"bits": 4, "group_size": 32, "lm_head": 8}}, "lm_head is 8, it must be an object, true"),
        ({"model_type": 5}, "model_type is 5, it must be a string"),
        ({"norm": "batch"}, "norm is 'batch', it must be one of rms, layer"),
        ({"qk_norm": "half"}, "qk_norm is 'half', it must be one of None, head, projection, layer, layer_per_head, l2"),
        ({"positions": []}, r"positions is \[\], it must be one of rope"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, it must be a positive number or null"),
        ({"attention_out_bias": 1.5}, "attention_out_bias is 1.5, it must be true, false or null"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"position_offset": -1}, "position_offset is -1"),
        ({"embedding_multiplier": 10**400}, "embedding_multiplier is 1000.*, it must be a positive number"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor is 2.0, it must be at most 1"),
        ({"partial_rotary_factor": 0.2}, "0.2 of head_dim 16 is 3 dimensions, .* even number"),
        ({"partial_rotary_factor": 0.01}, "0.01 of head_dim 16 is 0 dimensions"),
        ({"parallel_residual": True, "norm_placement": "both"}, "parallel_residual needs norm_placement pre"),
        ({"shared_norm": True}, "shared_norm is true, but"),
        (
            {"norm": "layer", "norm_unit_offset": True},
            "norm_unit_offset is true, but the norm layer has no such offset",
        ),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries, one for each of 2 layers"),
        ({"layer_types": ("dilated_attention",) * 2}, "layer_types must be a list of full_attention, sliding"),
        ({"layer_types": ("conv", "linear_attention")}, "layer_types has no layer with attention"),
        (LINEAR | {"linear_num_key_heads": None}, "linear_num_key_heads is None, layers with linear_attention need"),
        (LINEAR | {"linear_num_key_heads": 3}, "linear_num_key_heads 3 does not divide linear_num_value_heads 4"),
        (LINEAR | {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"mlp_layer_types": ("dense", "dense")}, "mlp_layer_types needs a number of experts"),
        ({"mlp_layer_types": ("none",)}, "mlp_layer_types has 1 entries"),
        ({"mlp_layer_types": ("dense", "none"), "parallel_residual": True}, "parallel_residual needs a feed-forward"),
        (MAMBA | {"mamba_d_state": None}, "mamba_d_state is None, layers with mamba need a positive"),
        (MAMBA | {"mamba_n_groups": 3}, "mamba_n_groups 3 does not divide mamba_n_heads 4"),
        (MAMBA | {"time_step_limit": (0.2, 0.1)}, "time_step_limit is .*, it must be two numbers"),
        (MAMBA | {"time_step_limit": (0.0, float("nan"))}, "time_step_limit is .*, it must be two numbers"),
        ({"layer_types": ("sliding_attention",) * 2}, "but sliding_window is null"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "an object with rope_type linear, dynamic"),
        ({"rope_scaling": 8}, "rope_scaling is 8"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor is None, linear needs a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": -1}},
            "original_max.* is None.*beta_fast is -1",
        ),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta is 1.0, yarn needs more than 1"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}}, "short_factor must be a list of 8 positive"),
        ({"positions": "learned", "max_position_embeddings": 2**31 - 1, "position_offset": 2}, "2147483649 rows"),
        ({"num_experts": 0}, "num_experts is 0, it must be a positive whole number"),
        ({"num_experts": 4}, "num_experts_per_tok is None, it must be"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok need a number of experts"),
        (EXPERTS | {"moe_intermediate_size": float("nan")}, "moe_intermediate_size is nan"),
        (EXPERTS | {"num_experts_per_tok": 5}, "there are only 4 experts"),
        (LATENT | {"kv_lora_rank": None}, "v_head_dim need latent attention, but kv_lora_rank is null"),
        (LATENT | {"v_head_dim": None, "q_lora_rank": 0}, "v_head_dim is None, .*q_lora_rank is 0, it must be a pos"),
        (LATENT | {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        (LATENT | {"num_key_value_heads": 1}, "num_key_value_heads is 1, latent attention has one for each"),
        (LATENT | {"sliding_window": 8, "qk_norm": "head"}, "qk_norm is 'head', .*; sliding_window is 8, latent"),
        (EXPERTS | {"n_group": 3, "router": "sigmoid"}, "4 experts can't be in 3 groups"),
        (EXPERTS | {"n_group": 2, "num_experts_per_tok": 3, "router": "sigmoid"}, "more than the experts of 1 groups"),
        (EXPERTS | {"shared_expert_gate": True}, "but shared_expert_intermediate_size is null"),
        (EXPERTS | {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries"),
        (EXPERTS | {"mlp_layer_types": ["dense"] * 2}, "no layer has experts"),
        (EXPERTS | {"mlp_layer_types": [None] * 2}, "must be a list of dense, sparse and none"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers is 20000, at most 10000"),
    ],
)
def test_invalid_values(change, expected):
    with pytest.raises(ConfigError, match=expected):
        ModelConfig(**{**SIZES, **change})


def test_bounds_of_llama3_scaling():
    scaling = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 32}
    ModelConfig(**SIZES, rope_scaling={**scaling, "low_freq_factor": 1, "high_freq_factor": 4})
    with pytest.raises(ConfigError, match="low_freq_factor 4 must be at most high_freq_factor 2"):
        ModelConfig(**SIZES, rope_scaling={**scaling, "low_freq_factor": 4, "high_freq_factor": 2})
    with pytest.raises(ConfigError, match="low_freq_factor is None.*; .*high_freq_factor is 'x'"):
        ModelConfig(**SIZES, rope_scaling={**scaling, "high_freq_factor": "x"})


def test_quantization_of_a_module():
    plan = {
        "bits": 4, "group_size": 32, "mode": "mxfp4",
        "lm_head": False, "a": True, "b": {"bits": 8}, "c": {"mode": "nvfp4"},
    }  # fmt: skip
    config = ModelConfig(**SIZES, quantization=plan)
    assert module_quantization(config.quantization, "lm_head") is None
    assert module_quantization(config.quantization, "a") == module_quantization(config.quantization, "other")
    assert module_quantization(config.quantization, "a") == {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert module_quantization(config.quantization, "b") == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert module_quantization(config.quantization, "c") == {"bits": 4, "group_size": 16, "mode": "nvfp4"}

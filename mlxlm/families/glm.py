"""GLM-4 (`glm`, and `glm4` with norms on the outputs of sublayers, too): partial rotary positions, interleaved."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

_FIELDS = LLAMA_FIELDS | same_names("head_dim", "attention_bias", "partial_rotary_factor")
_DEFAULTS = {
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MLP = {"mlp.gate_up_proj": "mlp.gate_proj mlp.up_proj"}

GLM = Family(
    "glm",
    "GlmForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values={"attention_out_bias": False},
    layer_modules=_MLP,
    rope_interleaved=True,
)

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values={"attention_out_bias": False, "norm_placement": "both"},
    layer_modules={
        **_MLP,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    rope_interleaved=True,
)

"""The family of what no family of Hugging Face has words for: every field by ModelConfig's own name. Only mlxlm opens
these models."""

from __future__ import annotations

from mlxlm.families.family import COMMON, Family, same_names

MLXLM_MODEL_TYPE = "mlxlm"

MLXLM = Family(
    MLXLM_MODEL_TYPE,
    "MlxlmForCausalLM",
    COMMON
    | same_names(
        "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act", "mlp_gated", "attention_bias", "mlp_bias"
    )
    | same_names("attention_out_bias", "norm", "norm_unit_offset", "norm_placement", "parallel_residual", "shared_norm")
    | same_names("positions", "position_offset", "rope_theta", "rope_scaling", "partial_rotary_factor", "alibi_scaled")
    | same_names("sliding_window", "layer_types", "qk_norm", "attn_logit_softcapping", "final_logit_softcapping")
    | same_names("query_pre_attn_scalar", "embedding_multiplier", "embedding_norm"),
)

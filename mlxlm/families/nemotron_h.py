"""Nemotron-H and Nemotron 3: Mamba 2, attention without positions, and feed-forwards, each a layer of its own.

In the decoder, a feed-forward belongs to the layer of the Mamba 2 or attention before it; others have none.
"""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE, FULL, NO_MLP, SPARSE
from mlxlm.config.experts import EXPERT_FIELDS
from mlxlm.families.family import COMMON_FIELDS, Family, HFConfig, first_present, first_unexpected, same_names
from mlxlm.families.granite import read_time_step_limit, write_time_step_limit

_MAMBA = "mamba"
_KINDS = {  # letters of `hybrid_override_pattern`, and names of transformers 5 and of older files
    "M": _MAMBA, "linear_attention": _MAMBA, "mamba": _MAMBA,
    "*": FULL, FULL: FULL, "attention": FULL,
    "-": DENSE, "mlp": DENSE,
    "E": SPARSE, "moe": SPARSE,
}  # fmt: skip
_LETTERS = {_MAMBA: "M", FULL: "*", DENSE: "-", SPARSE: "E"}
_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}  # fmt: skip
_NAMES = {"M": "linear_attention", "*": FULL, "-": "mlp", "E": "moe"}


def _blocks(values: HFConfig) -> list[str] | None:
    """The kind of each layer of the file; None if one is unknown, or a feed-forward has no other layer before it."""
    default = ["linear_attention", "moe", FULL, "mlp"]
    pattern = first_present(values, "layers_block_type", "layer_types", "hybrid_override_pattern") or default
    blocks = [_KINDS.get(str(kind), "") for kind in pattern] if isinstance(pattern, str | list) else [""]
    feed_forwards = [kind in (DENSE, SPARSE) for kind in blocks]
    lone = any(own and before for own, before in zip(feed_forwards, [True, *feed_forwards], strict=False))
    return None if "" in blocks or lone else blocks


def _read(values: HFConfig) -> dict[str, Any]:
    blocks = _blocks(values) or []
    mixers = [kind for kind in blocks if kind in (_MAMBA, FULL)]
    mlps = [
        after if after in (DENSE, SPARSE) else NO_MLP
        for kind, after in zip(blocks, [*blocks[1:], ""], strict=False)
        if kind in (_MAMBA, FULL)
    ]
    result: dict[str, Any] = {
        "num_hidden_layers": len(mixers),
        "layer_types": mixers if _MAMBA in mixers else None,
        "mlp_layer_types": mlps if set(mlps) not in ({DENSE}, {SPARSE}) else None,
        "time_step_limit": read_time_step_limit(values),
    }
    if SPARSE in mlps:
        return {**result, "router": "sigmoid"}
    return {**result, "num_experts": None, **{name: getattr(ModelConfig, name) for name in EXPERT_FIELDS}}


def _write(config: ModelConfig) -> dict[str, Any]:
    """mlx_lm requires all of these; transformers ignores the number of layers."""
    letters = ""
    for layer in range(config.num_hidden_layers):
        letters += _LETTERS.get(FULL if config.layer_types is None else config.layer_types[layer], "?")
        letters += {"none": "", "mlp": "-", "experts": "E"}[config.mlp(layer)]
    limit = write_time_step_limit(config)
    return {
        **({} if config.num_experts else _EXPERTS),  # transformers has no null for them
        "num_hidden_layers": len(letters),
        "hybrid_override_pattern": letters,
        "layers_block_type": [_NAMES.get(letter, letter) for letter in letters],
        "mamba_proj_bias": config.mamba_proj_bias,
        "attention_bias": False,
        "n_shared_experts": 1,
        "time_step_limit": limit,
        "time_step_min": limit[0],  # which transformers applies instead
    }


def _unsupported(values: HFConfig) -> str | None:
    if _blocks(values) is None:
        return "such layers: each feed-forward must follow Mamba 2 or attention"
    return first_unexpected(values, attention_bias=False, mamba_hidden_act="silu", moe_latent_size=None)


def _mlx_lm_mismatch(config: ModelConfig) -> str | None:
    return "has an output head, this model the embedding" if config.tie_word_embeddings else None


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    {
        **COMMON_FIELDS,
        **same_names(
            "num_key_value_heads",
            "head_dim",
            "mlp_bias",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "routed_scaling_factor",
            "n_group",
            "topk_group",
        ),
        "num_experts": "n_routed_experts",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_n_groups": "n_groups",
        "mamba_d_head": "mamba_head_dim",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
    },
    defaults={
        "hidden_act": "relu2",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "num_experts": _EXPERTS["n_routed_experts"],
        "num_experts_per_tok": _EXPERTS["num_experts_per_tok"],
        "moe_intermediate_size": _EXPERTS["moe_intermediate_size"],
        "shared_expert_intermediate_size": _EXPERTS["moe_shared_expert_intermediate_size"],
        "mamba_n_heads": 128,
        "mamba_n_groups": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
    },
    fixed_values={"positions": "none", "mlp_gated": False},
    read_extra=_read,
    write_extra=_write,
    find_unsupported=_unsupported,
    prefix="backbone.",
    other_prefixes=("", "model."),
    top_modules={"embeddings": "embed_tokens", "norm_f": "norm"},
    layer_modules={
        "norm": "input_layernorm",
        **{f"mixer.{name}": f"mamba.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj")},
        **{f"mixer.{name}": f"mamba.{name}" for name in ("A_log", "dt_bias", "D")},
        **{f"mixer.{name}_proj": f"self_attn.{name}_proj" for name in "qkvo"},
    },
    mlp_layer_modules={
        "norm": "post_attention_layernorm",
        "mixer.gate": "mlp.gate",
        "mixer.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
        **{
            f"mixer.{name}{part}_proj": f"mlp.{own}{part}_proj"
            for name, own in {"": "", "experts.*.": "switch_mlp.", "shared_experts.": "shared_expert."}.items()
            for part in ("up", "down")
        },
    },
    mlx_lm_names={
        "mixer.experts.*.up_proj": "mixer.switch_mlp.fc1",
        "mixer.experts.*.down_proj": "mixer.switch_mlp.fc2",
    },
    mlx_lm_mismatch=_mlx_lm_mismatch,
    ignored_prefixes=("mtp.",),
)

"""Granite: multipliers of embeddings, attention scores, residual and logits. Granite 4 has Mamba 2 in most layers."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.config.numbers import is_count, is_number, is_positive
from mlxlm.families.family import LLAMA_FIELDS, Family, HFConfig, first_unexpected, inverse, same_names


def _read(values: HFConfig) -> dict[str, Any]:
    """Scores are multiplied by `attention_multiplier`, in other models by head_dim^-0.5."""
    multiplier = values.get("attention_multiplier", 1.0)
    if not is_positive(multiplier):
        return {"query_pre_attn_scalar": multiplier}
    scalar, hidden, heads = inverse(multiplier**2), values.get("hidden_size"), values.get("num_attention_heads")
    is_usual = is_count(hidden) and is_count(heads) and scalar == hidden // heads
    return {} if is_usual else {"query_pre_attn_scalar": scalar}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    LLAMA_FIELDS
    | same_names("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    defaults={"rms_norm_eps": 1e-6},
    read_extra=_read,
    write_extra=_write,
)


_MAMBA = "mamba"
_MAMBA_SIZES = same_names("mamba_n_heads", "mamba_n_groups", "mamba_d_head", "mamba_d_state", "mamba_d_conv")
_MAMBA_FIELDS = _MAMBA_SIZES | same_names("mamba_conv_bias", "mamba_proj_bias")
_UNLIMITED = 1e38  # JSON has no infinity; transformers 5 writes {"__float__": "Infinity"}


def read_time_step_limit(values: HFConfig) -> Any:
    """ModelConfig's `time_step_limit`: None without limits, a damaged value as it is."""
    limit = values.get("time_step_limit")
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return limit
    low, high = limit
    unlimited = high == {"__float__": "Infinity"} or (is_number(high) and high >= _UNLIMITED)
    return None if unlimited and low == 0 else (low, _UNLIMITED if unlimited else high)


def write_time_step_limit(config: ModelConfig) -> list[float]:
    """The inverse of `read_time_step_limit`."""
    return list(config.time_step_limit or (0.0, _UNLIMITED))


def _read_layer_types(values: HFConfig) -> Any:
    types, count = values.get("layer_types"), values.get("num_hidden_layers")
    if types is None and isinstance(count, int) and count <= MAX_LAYERS:
        types = [_MAMBA] * count
    if not isinstance(types, list):
        return types
    names = {"linear_attention": _MAMBA, "attention": FULL}  # of transformers 5, and of mlx_lm and transformers 4
    types = [names.get(str(kind), kind) for kind in types]
    return None if all(kind == FULL for kind in types) else types


def _read_hybrid(values: HFConfig) -> dict[str, Any]:
    types, shared = _read_layer_types(values), values.get("shared_intermediate_size", 1024)
    positions = "rope" if values.get("position_embedding_type") == "rope" else "none"
    result = {**_read(values), "layer_types": types, "positions": positions}
    if types is None:
        result |= {name: getattr(ModelConfig, name) for name in _MAMBA_FIELDS}
    else:
        result["time_step_limit"] = read_time_step_limit(values)
        sizes = values.get("mamba_expand", 2), values.get("hidden_size"), values.get("mamba_n_heads", 128)
        if values.get("mamba_d_head", "auto") == "auto" and all(map(is_count, sizes)):
            result["mamba_d_head"] = sizes[0] * sizes[1] // sizes[2]
    if values.get("num_local_experts", 8):
        width = values.get("intermediate_size")
        return {**result, "moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    return {**result, "num_experts": None, "num_experts_per_tok": None, "intermediate_size": shared}


def _write_hybrid(config: ModelConfig) -> dict[str, Any]:
    """mlx_lm has no defaults, and reads the width of a dense feed-forward from `intermediate_size`."""
    hidden = config.hidden_size
    sizes: dict[str, Any] = {}
    if config.layer_types is None:  # transformers checks the sizes of Mamba all the same
        sizes = {"mamba_n_heads": 1, "mamba_d_head": hidden, "mamba_d_state": 1}
    inner = (config.mamba_n_heads or 1) * (config.mamba_d_head or hidden)
    return {
        **_write(config),
        **sizes,
        "mamba_expand": inner // hidden,
        "layer_types": [_MAMBA if kind == _MAMBA else "attention" for kind in config.layer_types or ()]
        or ["attention"] * config.num_hidden_layers,
        "position_embedding_type": "rope" if config.positions == "rope" else "nope",
        "time_step_limit": write_time_step_limit(config),
        "num_local_experts": config.num_experts or 0,
        "num_experts_per_tok": config.num_experts_per_tok or 0,
        "intermediate_size": config.moe_intermediate_size or config.intermediate_size,
        "shared_intermediate_size": config.shared_expert_intermediate_size
        if config.num_experts
        else config.intermediate_size,
    }


def _unsupported(values: HFConfig) -> str | None:
    hidden, expand = values.get("hidden_size"), values.get("mamba_expand", 2)
    heads, size = values.get("mamba_n_heads", 128), values.get("mamba_d_head")
    known = all(map(is_count, (hidden, expand, heads, size))) and _read_layer_types(values) is not None
    if known and hidden * expand != heads * size:
        return f"mamba_expand {expand} with {heads} heads of {size}"
    return first_unexpected(values, hidden_act="silu")


def _dense_modules(config: ModelConfig, for_mlx: bool) -> dict[str, str]:
    """In mlx_lm, a dense feed-forward has the decoder's names."""
    if config.num_experts is not None or for_mlx:
        return {}
    return {"shared_mlp.input_linear": "mlp.gate_proj mlp.up_proj", "shared_mlp.output_linear": "mlp.down_proj"}


def _hybrid_mismatch(config: ModelConfig) -> str | None:
    if config.layer_types is not None and config.mamba_n_groups > 1:
        return "normalizes all outputs of Mamba at once, this model each group"
    return "has no RoPE scaling" if config.positions == "rope" and config.rope_scaling else None


_SWITCH = "block_sparse_moe.switch_mlp"

GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {
        **{name: hf_names for name, hf_names in GRANITE.fields.items() if name != "mlp_bias"},
        **_MAMBA_FIELDS,
        **same_names("num_experts_per_tok"),
        "num_experts": "num_local_experts",
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 128,
        "mamba_d_state": 256,
    },
    read_extra=_read_hybrid,
    write_extra=_write_hybrid,
    find_unsupported=_unsupported,
    layer_modules={
        "block_sparse_moe.router.layer": "mlp.gate",
        "block_sparse_moe.input_linear": "mlp.switch_mlp.gate_proj mlp.switch_mlp.up_proj",
        "block_sparse_moe.output_linear": "mlp.switch_mlp.down_proj",
        "shared_mlp.input_linear": "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
        "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
    },
    extra_layer_modules=_dense_modules,
    mlx_lm_names={
        "block_sparse_moe.input_linear": f"{_SWITCH}.gate_proj {_SWITCH}.up_proj",
        "block_sparse_moe.output_linear": f"{_SWITCH}.down_proj",
    },
    mlx_lm_mismatch=_hybrid_mismatch,
)

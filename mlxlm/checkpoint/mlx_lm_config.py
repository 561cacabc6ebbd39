"""Hugging Face's configurations in the names that mlx_lm's models read.

transformers 5 saves the rotary embedding as one object, `rope_parameters`, and has renamed some fields. Most of
mlx_lm's models look for the older names, and take a default of their own where they are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxlm.checkpoint.mlx_lm_rope import FULL, SLIDING, is_known, rope_parameters, unsupported
from mlxlm.config.validation import is_count
from mlxlm.utils.errors import CheckpointError

# mlx_lm's name of a field -> Hugging Face's other names for the same.
_OTHER_NAMES = {
    "num_experts": ("num_local_experts",),
    "num_local_experts": ("num_experts",),
    "block_dim": ("hidden_size",),
    "n_ctx": ("n_positions",),
}
_ROPE_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
_OF_SOME = ("proportional", "telechat3-yarn")  # rope_types that some of mlx_lm's models implement on their own
# Models of mlx_lm that read fields of their own for the rotary embedding of each layer.
OWN_ROPE = ("deepseek_v41", "gear", "mimo_v2_flash", "muse_glimmer", "plamo3", "step3p5", "talkie")


def to_mlx_lm_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration in the names that mlx_lm's model of this `model_type` reads.

    Raises CheckpointError for fields that can't be said in them.
    """
    values = {name: _number(value) for name, value in values.items()}
    if isinstance(values.get("text_config"), Mapping):
        values["text_config"] = to_mlx_lm_config(values["text_config"])
        if values.get("vocab_size") is None and "vocab_size" in values["text_config"]:
            values["vocab_size"] = values["text_config"]["vocab_size"]  # some of mlx_lm's models look here alone
    if values.get("model_type") not in OWN_ROPE:
        values |= _rope_fields(values)
    for name, others in _OTHER_NAMES.items():
        given = next((values[other] for other in others if values.get(other) is not None), None)
        if values.get(name) is None and given is not None:
            values[name] = given
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if values.get("head_dim") is None and is_count(width) and is_count(heads):
        values["head_dim"] = 256 if str(values.get("model_type")).startswith("gemma") else width // heads
    derive = _DERIVED.get(values.get("model_type"))
    return values | derive(values) if derive else values


def needs_multimodal_model(values: Mapping[str, Any]) -> bool:
    """Whether this is a language model alone that mlx_lm only has as a part of the model with pictures."""
    kind = values.get("model_type")
    if kind == "llama4_text":  # mlx_lm has a model for the dense ones with a tied head
        return not values.get("tie_word_embeddings") or bool(values.get("moe_layers"))
    return kind in ("qwen3_5_text", "qwen3_5_moe_text")


def _number(value: Any) -> Any:
    """transformers 5 writes infinity, which JSON lacks, as an object."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, Mapping) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return value


def _rope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers 5 keeps in `rope_parameters`, each field on its own. `install_rope` does the scaling, so that
    only models which use it elsewhere see it: in the scale of attention (multi-head latent attention)."""
    rope = rope_parameters(values)
    kind = rope["rope_type"]
    if not is_known(kind) and kind not in _OF_SOME:
        raise unsupported(values, kind)
    fields = {name: rope[key] for key, names in _ROPE_NAMES.items() if key in rope for name in names}
    elsewhere = kind == "yarn" and "qk_rope_head_dim" in values
    fields["rope_scaling"] = {**rope, "type": kind} if elsewhere or rope.get("alpha") or not is_known(kind) else None
    if isinstance(local := (values.get("rope_parameters") or {}).get(SLIDING), Mapping) and "rope_theta" in local:
        fields["rope_local_base_freq"] = local["rope_theta"]
    return fields


def _pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """`sliding_window_pattern`: every how many layers one has full attention."""
    types = values.get("layer_types")
    if not isinstance(types, list):
        return {}
    pattern = types.index(FULL) + 1 if FULL in types else 0
    if not pattern or types != [SLIDING if (i + 1) % pattern else FULL for i in range(len(types))]:
        raise CheckpointError("layer_types has an order of layers that mlx_lm's model of this architecture lacks")
    return {"sliding_window_pattern": pattern}


def _gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    longest = values.get("max_position_embeddings") or 131_072  # transformers' default, which the larger ones rely on
    return {**_pattern(values), "max_position_embeddings": longest}


def _exaone4(values: Mapping[str, Any]) -> dict[str, Any]:
    types = values.get("layer_types")
    if not isinstance(types, list):
        return {}
    if values.get("sliding_window") is None:
        return {"sliding_window_pattern": None}
    _check_both(types)
    return {"sliding_window_pattern": "".join("L" if kind == SLIDING else "G" for kind in types)}


def _exaone_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    _check_both(values["layer_types"])
    types = values.get("mlp_layer_types")
    return {} if types is None else {"is_moe_layer": [kind == "sparse" for kind in types]}


def _check_both(types: list[str]) -> None:
    if not {FULL, SLIDING} <= set(types):
        raise CheckpointError(f"layer_types has no layer with {FULL} or none with {SLIDING}; mlx_lm's model needs both")


def _llama4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check that every fourth layer has full attention and no rotary embedding; find which layers have experts."""
    layers = range(values["num_hidden_layers"])
    step = values.get("interleave_moe_layer_step") or len(layers) + 1
    if values.get("moe_layers") == []:
        step = len(layers) + 1
    rotary = [int((i + 1) % 4 != 0) for i in layers]
    expected = {
        "moe_layers": [i for i in layers if i % step == step - 1],
        "no_rope_layers": rotary,
        "layer_types": ["chunked_attention" if rotates else FULL for rotates in rotary],
    }
    for name, order in expected.items():
        if values.get(name) not in (None, order) and (name, values[name]) != ("no_rope_layers", []):
            raise CheckpointError(f"{name} has an order of layers that mlx_lm's model of this architecture lacks")
    return {"interleave_moe_layer_step": step}


def _identity_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """For models of mlx_lm that can't do without a scaling: one that changes nothing."""
    if values.get("rope_scaling") is not None:
        return {}
    longest = values.get("max_position_embeddings")
    return {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": longest}}


def _minicpm3(values: Mapping[str, Any]) -> dict[str, Any]:
    if (values.get("rope_scaling") or {}).get("mscale_all_dim"):
        raise CheckpointError("rope_parameters has mscale_all_dim, which mlx_lm's minicpm3 doesn't implement")
    return _identity_scaling(values)


def _granite_hybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {"linear_attention": "mamba", FULL: "attention"}
    types = [names.get(kind, kind) for kind in values.get("layer_types") or ()]
    rotary = values.get("position_embedding_type") == "rope"
    return {"layer_types": types, "position_embedding_type": "rope" if rotary else "nope"}


def _minimax(values: Mapping[str, Any]) -> dict[str, Any]:
    share = values.get("partial_rotary_factor", 1)
    return {"shared_intermediate_size": 0, "rotary_dim": int(values["head_dim"] * share)} | values


# What else a model of mlx_lm reads, from what Hugging Face's configuration of that model_type says.
_DERIVED: dict[Any, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "apertus": lambda values: {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "cohere2": _pattern,
    "deepseek_v2": _identity_scaling,
    "exaone4": _exaone4,
    "exaone_moe": _exaone_moe,
    "gemma3_text": _gemma3,
    "gpt_bigcode": lambda values: {"n_inner": values.get("n_inner") or 4 * values["n_embd"]},
    "granitemoehybrid": _granite_hybrid,
    "llama4_text": _llama4,
    "mamba2": lambda values: {"intermediate_size": values["expand"] * values["hidden_size"]},
    "minicpm3": _minicpm3,
    "minimax_m2": _minimax,
}

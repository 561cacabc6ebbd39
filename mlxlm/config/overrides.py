"""Overrides of a configuration by name (`--set`): `norm=layer`, `feed_forward=geglu`, `rope_scaling=yarn:4`."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from mlxlm.config.components import CHOICES, DENSE, FEED_FORWARDS, FULL, POSITIONS, RECURRENT, SLIDING, SPARSE
from mlxlm.config.experts import EXPERT_FIELDS
from mlxlm.config.model_config import ModelConfig
from mlxlm.utils.errors import ConfigError

Changes = dict[str, Any]  # values by field
Values = Mapping[str, Any]  # the values of all fields, with the changes so far

_FIELDS = {field.name: field for field in fields(ModelConfig)}

# Fields that can't be overridden, and what sets them instead.
_RESERVED = {
    "model_type": "the components: the family follows from them",
    "quantization": "mlxlm quantize, once the model is trained",
    "dropout": "the training settings, where it is next to the learning rate",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "the tokenizer, which has its own"),
}
# Names for several fields at once.
_PRESETS: dict[str, dict[str, Changes]] = {
    "feed_forward": FEED_FORWARDS,
    "biases": {
        "all": {"attention_bias": True, "attention_out_bias": None, "mlp_bias": True},
        "none": {"attention_bias": False, "attention_out_bias": None, "mlp_bias": False},
    },
    "head": {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}},
}
_ALIASES = {"softcap": "attn_logit_softcapping", "kv_heads": "num_key_value_heads", "window": "sliding_window"}
_ATTENTION = ("multi-head", "grouped-query", "multi-query", "latent")
_ROPE_SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")
OVERRIDE_NAMES = tuple(sorted({*_FIELDS, *_PRESETS, *_ALIASES, "attention", "experts"} - _RESERVED.keys()))


def parse_overrides(assignments: Iterable[str]) -> dict[str, str]:
    """Parse `["norm=layer", "positions=alibi"]` to `{"norm": "layer", "positions": "alibi"}`.

    Raises:
        ConfigError: An assignment has no "=", or a name is set twice.
    """
    overrides: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = (part.strip() for part in assignment.partition("="))
        name = name.replace("-", "_")
        if not (name and value):
            raise ConfigError(f"{assignment!r} sets nothing", "NAME=VALUE, such as positions=alibi")
        if name in overrides:
            raise ConfigError(f"{name} is set to both {overrides[name]} and {value}", "one of them")
        overrides[name] = value
    return overrides


def apply_overrides(
    config: ModelConfig, overrides: Mapping[str, str], reserved: Mapping[str, str] | None = None
) -> ModelConfig:
    """A copy of `config` with overrides.

    Names are ModelConfig's fields, and:

    - `feed_forward`: relu, gelu, silu, glu, reglu, geglu or swiglu.
    - `attention`: multi-head, grouped-query, multi-query or latent.
    - `biases`: all or none. `head`: tied or untied.
    - `kv_heads`, `window` and `softcap` (of attention scores).
    - `experts`: their number, of which each token uses 2 or `num_experts_per_tok`, as wide together as the feed-forward
      was; or none.
    - `mlp_layer_types`: all; a number n, which leaves the first n layers dense; or a JSON list.
    - `layer_types`: all or alternating, the layers with the window; conv:n, linear_attention:n or mamba:n, in which
      each n-th layer has attention, and the others a short convolution, the gated delta rule or Mamba 2; or a JSON
      list.
    - `rope_layers`: all; a number n, which leaves each n-th layer without rotary positions; or a JSON list.
    - `rope_scaling`: TYPE:FACTOR or TYPE:FACTOR:LENGTH. TYPE is linear, ntk, dynamic, yarn or llama3; LENGTH is the
      original context (default: `max_position_embeddings`). ntk is a larger base, rope_theta · factor^(D / (D - 2)).

    `positions=sinusoidal` also multiplies embeddings by sqrt(hidden_size), unless `embedding_multiplier` is set.
    If heads filled the width they still do, and if each had its own key-value head it still has.

    Args:
        config: The base configuration.
        overrides: Text values by name (see `parse_overrides`).
        reserved: Further names that can't be overridden, and what sets them instead.

    Raises:
        ConfigError: A name is unknown, a value can't work, or an override has no effect.
    """
    _check_names(overrides, {**_RESERVED, **(reserved or {})})
    changes: Changes = {}
    values = ChainMap(changes, vars(config))
    for name, text in overrides.items():
        if name not in _DEPENDENT:
            _add(changes, name, _parse_override(name, text))
    if {"hidden_size", "num_attention_heads"} & changes.keys():
        if config.head_dim * config.num_attention_heads == config.hidden_size:
            changes.setdefault("head_dim", None)
        if config.num_key_value_heads == config.num_attention_heads and "attention" not in overrides:
            changes.setdefault("num_key_value_heads", None)
    for name, parse in _DEPENDENT.items():
        if name in overrides:
            _add(changes, name, parse(overrides[name], values))
    if values["positions"] == "sinusoidal" != config.positions:
        # Vaswani et al. 2017, section 3.4. Without it, embeddings are much smaller than the positions.
        changes.setdefault("embedding_multiplier", math.sqrt(values["hidden_size"]))
    _reset_unread_position_fields(changes, values)
    _remove_unused_window(changes, values)
    return config.with_changes(**changes)


def infer_field(value: str) -> dict[str, str] | None:
    """The override that `value` alone stands for: "alibi" is `{"positions": "alibi"}`. None if it is ambiguous."""
    choices = {**_PRESETS, "attention": _ATTENTION, **{n: CHOICES[n] for n in ("norm", "norm_placement", "positions")}}
    names = [name for name, values in choices.items() if value in values]
    return {names[0]: value} if len(names) == 1 else None


def parse_value(name: str, text: str, field_type: str) -> Any:
    """Parse the value of a field.

    Args:
        name: The field, for error messages.
        text: The value as text.
        field_type: Its declared type, such as "int | None".

    Raises:
        ConfigError: `text` is not of this type.
    """
    lowered, or_none = text.lower(), " or none" if "None" in field_type else ""
    if or_none and lowered in ("none", "null"):
        return None
    try:
        if "bool" in field_type:
            return {"true": True, "false": False}[lowered]
        if "int" in field_type or "float" in field_type:
            number = float(text)
            if not text.isascii() or "_" in text or ("int" in field_type and not number.is_integer()):
                raise ValueError
            return int(number) if "int" in field_type else number
    except (ValueError, KeyError):
        expected = "true or false" if "bool" in field_type else "a whole number" if "int" in field_type else "a number"
        raise ConfigError(f"{name} is {text!r}", expected + or_none) from None
    return text


def _check_names(overrides: Mapping[str, str], reserved: Mapping[str, str]) -> None:
    for name in overrides:
        if name in reserved:
            raise ConfigError(f"{name} can't be overridden", reserved[name])
        if name not in OVERRIDE_NAMES:
            similar = " or ".join(get_close_matches(name, (*OVERRIDE_NAMES, *reserved), 3, 0.6))
            raise ConfigError(f"unknown override {name!r}", similar or f"one of {', '.join(OVERRIDE_NAMES)}")


def _add(changes: Changes, name: str, new: Changes) -> None:
    # ntk scales the base that another override sets, and experts divide the width and repeat their number.
    scaled = ("rope_theta", "intermediate_size", "moe_intermediate_size", "num_experts_per_tok")
    for field in new:
        if field in changes and field not in scaled:
            raise ConfigError(f"{name} and another override both set {field}", "one of them")
    changes.update(new)


def _parse_override(name: str, text: str) -> Changes:
    if name in _PRESETS:
        return _PRESETS[name][_check_choice(name, text, _PRESETS[name])]
    field = _ALIASES.get(name, name)
    return {field: parse_value(name, text, str(_FIELDS[field].type))}


def _check_choice(name: str, text: str, choices: Iterable[str]) -> str:
    if text not in choices:
        raise ConfigError(f"{name} is {text!r}", f"one of {', '.join(choices)}")
    return text


def _reset_unread_position_fields(changes: Changes, values: Values) -> None:
    """Reset fields that the positions don't read, since most families can't represent them then."""
    positions = values["positions"]
    readers = {field: name for name, encoding in reversed(POSITIONS.items()) for field in encoding.fields}
    for field, reader in readers.items():
        if positions in POSITIONS and field in POSITIONS[positions].fields:
            continue
        if field in changes:
            raise ConfigError(f"{field} has no effect on {positions} positions", f"positions={reader}")
        changes[field] = _FIELDS[field].default


def _remove_unused_window(changes: Changes, values: Values) -> None:
    """Remove `layer_types` without a window, and the window if no layer has it.

    Raises:
        ConfigError: A new window has no effect.
    """
    window, types, context = changes.get("sliding_window"), values["layer_types"], values["max_position_embeddings"]
    if values["sliding_window"] is None:
        if not any(kind in (types or ()) for kind in RECURRENT):
            changes.setdefault("layer_types", None)
        changes.setdefault("rope_local_base_freq", None)
    all_full = types is not None and len(types) == values["num_hidden_layers"] and set(types) == {FULL}
    if window is not None and all_full:
        raise ConfigError(f"sliding_window {window} has no effect: no layer has it", "layer_types=alternating")
    if window is not None and context <= window:
        raise ConfigError(f"sliding_window {window} has no effect on {context} tokens of context", "a smaller one")
    if all_full:
        changes |= {"sliding_window": None, "layer_types": None, "rope_local_base_freq": None}


def _parse_attention(text: str, values: Values) -> Changes:
    """Number of key-value heads. grouped-query: a quarter of the heads as in Llama 3 8B, else the next fewer.

    latent: sizes that aren't set have the proportions of DeepSeek V2 Lite.
    """
    heads = values["num_attention_heads"]
    _check_choice("attention", text, _ATTENTION)
    if text == "latent":
        size = values["head_dim"] or values["hidden_size"] // heads
        rotary = max(2, size // 4 * 2)
        sizes = {"kv_lora_rank": 4 * size, "qk_nope_head_dim": size, "qk_rope_head_dim": rotary, "v_head_dim": size}
        return {"num_key_value_heads": heads} | {name: n for name, n in sizes.items() if values[name] is None}
    if text != "grouped-query":
        return {"num_key_value_heads": heads if text == "multi-head" else 1}
    group_size = next((n for n in (4, *range(2, heads)) if heads % n == 0 and n < heads), None)
    if group_size is None:
        raise ConfigError(f"{heads} heads can't be grouped", "num_attention_heads=8, or attention=multi-query")
    return {"num_key_value_heads": heads // group_size}


def _parse_layer_types(text: str, values: Values) -> Changes:
    """alternating: the first of each two layers has the window, as in Gemma 2. conv:n: each n-th has attention."""
    kind, _, interval = text.partition(":")
    if kind in RECURRENT and interval.isdecimal() and len(interval) < 6 and (n := int(interval)) > 0:
        sizes = {name: size for name, size in _recurrent_sizes(kind, values).items() if values[name] is None}
        return sizes | {"layer_types": tuple(kind if (i + 1) % n else FULL for i in range(values["num_hidden_layers"]))}
    if text in ("none", "all"):
        return {"layer_types": None}
    if text == "alternating":
        return {"layer_types": tuple(FULL if i % 2 else SLIDING for i in range(values["num_hidden_layers"]))}
    return {"layer_types": _parse_json("layer_types", text, list, "all, alternating, conv:3, or a JSON list")}


def _recurrent_sizes(kind: str, values: Values) -> Changes:
    """The sizes of recurrent layers, if they aren't set.

    Mamba 2 as in its paper: twice the width, heads of 64, and states of 128. The gated delta rule: those of attention.
    """
    if kind == "mamba":
        inner = 2 * values["hidden_size"]
        size = values["mamba_d_head"] or math.gcd(inner, 64)
        return {"mamba_d_head": size, "mamba_n_heads": inner // size, "mamba_d_state": 128}
    if kind == "linear_attention":
        size = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        heads = values["linear_num_value_heads"] or values["num_attention_heads"]
        return {
            "linear_num_value_heads": heads, "linear_num_key_heads": heads, "linear_key_head_dim": size,
            "linear_value_head_dim": size,
        }  # fmt: skip
    return {}


def _parse_experts(text: str, values: Values) -> Changes:
    """Experts that have together, for a token, the width of the dense feed-forward."""
    if text == "none":
        return {"num_experts": None, "mlp_layer_types": None, **{n: _FIELDS[n].default for n in EXPERT_FIELDS}}
    used = values["num_experts_per_tok"] or 2
    dense = values["intermediate_size"]
    width = values["moe_intermediate_size"] or (-(-dense // used) if isinstance(used, int) and used > 0 else dense)
    number = {"num_experts": parse_value("experts", text, "int"), "num_experts_per_tok": used}
    # Families in which all layers have experts call their width intermediate_size.
    widths = {"moe_intermediate_size": width, "intermediate_size": dense if values["mlp_layer_types"] else width}
    return {**number, **widths}


def _parse_mlp_layer_types(text: str, values: Values) -> Changes:
    """A number n: the first n layers are dense, as in DeepSeek V3 with 3."""
    layers = values["num_hidden_layers"]
    if text in ("none", "all"):
        return {"mlp_layer_types": None}
    if text.isdecimal() and len(text) < 6:
        return {"mlp_layer_types": tuple(DENSE if layer < int(text) else SPARSE for layer in range(layers))}
    return {"mlp_layer_types": _parse_json("mlp_layer_types", text, list, "all, a number, or a JSON list")}


def _parse_rope_layers(text: str, values: Values) -> Changes:
    """A number n: each n-th layer has no rotary positions, as in SmolLM 3 with 4."""
    if text in ("none", "all"):
        return {"rope_layers": None}
    if text.isdecimal() and len(text) < 6 and (interval := int(text)) > 0:
        return {"rope_layers": tuple((layer + 1) % interval != 0 for layer in range(values["num_hidden_layers"]))}
    return {"rope_layers": _parse_json("rope_layers", text, list, "all, a number, or a JSON list")}


def _parse_rope_scaling(text: str, values: Values) -> Changes:
    if text == "none":
        return {"rope_scaling": None}
    if text.startswith("{"):
        return {"rope_scaling": _parse_json("rope_scaling", text, dict, "a JSON object")}
    rope_type, *numbers = text.split(":")
    has_length = rope_type in ("yarn", "llama3")
    try:
        factor = float(numbers[0])
        length = int(numbers[1]) if len(numbers) > 1 else values["max_position_embeddings"]
    except (ValueError, IndexError):
        factor = math.nan
    if rope_type not in _ROPE_SCALINGS or not 0 < factor < 1e12 or len(numbers) > 1 + has_length:
        raise ConfigError(f"rope_scaling is {text!r}", "none, a JSON object, or such as linear:4, ntk:4, yarn:4:512")
    if rope_type == "ntk":
        head_dim = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
        dims = int(head_dim * values["partial_rotary_factor"])
        if dims < 4:
            raise ConfigError("rope_scaling ntk needs more than 2 rotary dimensions", "a larger head_dim")
        return {"rope_scaling": None, "rope_theta": values["rope_theta"] * factor ** (dims / (dims - 2))}
    scaling = {"rope_type": rope_type, "factor": factor}
    if has_length:
        scaling["original_max_position_embeddings"] = length
    if rope_type == "llama3":  # the values of Llama 3.1
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling}


def _parse_json(name: str, text: str, json_type: type, expected: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, json_type):
        raise ConfigError(f"{name} is {text!r}", expected)
    return value


# Overrides that depend on other fields, in the order in which they are applied.
_DEPENDENT: dict[str, Callable[[str, Values], Changes]] = {
    "attention": _parse_attention,
    "mlp_layer_types": _parse_mlp_layer_types,
    "experts": _parse_experts,
    "layer_types": _parse_layer_types,
    "rope_layers": _parse_rope_layers,
    "rope_scaling": _parse_rope_scaling,
}

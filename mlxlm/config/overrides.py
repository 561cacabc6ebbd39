"""A decoder's parts as people name them: `norm=layer`, `positions=alibi`, `feed_forward=geglu`, `sliding_window=64`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from mlxlm.config.model_config import ModelConfig
from mlxlm.config.validation import CHOICES, FULL, SLIDING
from mlxlm.utils.errors import ConfigError

Changes = dict[str, Any]
Now = Callable[[str], Any]  # the value that a field has with the changes so far

_TYPES = {field.name: field.type for field in fields(ModelConfig)}
_DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}

# What nobody sets part by part, and what decides it.
_DECIDED = {
    "model_type": "the parts: the family follows from them",
    "quantization": "mlxlm quantize, once the model is trained",
    "dropout": "the training, which has it beside the learning rate",
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), "the tokenizer, which has its own"),
}
_WORDS: dict[str, dict[str, Changes]] = {
    "feed_forward": {  # gated: Shazeer 2020, "GLU Variants Improve Transformer", equations 5 and 6
        "relu": {"mlp_gated": False, "hidden_act": "relu"},
        "gelu": {"mlp_gated": False, "hidden_act": "gelu"},
        "silu": {"mlp_gated": False, "hidden_act": "silu"},
        "glu": {"mlp_gated": True, "hidden_act": "sigmoid"},
        "reglu": {"mlp_gated": True, "hidden_act": "relu"},
        "geglu": {"mlp_gated": True, "hidden_act": "gelu"},
        "swiglu": {"mlp_gated": True, "hidden_act": "silu"},
    },
    "biases": {
        "all": {"attention_bias": True, "attention_out_bias": None, "mlp_bias": True},
        "none": {"attention_bias": False, "attention_out_bias": None, "mlp_bias": False},
    },
    "head": {"tied": {"tie_word_embeddings": True}, "untied": {"tie_word_embeddings": False}},
}
_ATTENTION = ("multi-head", "grouped-query", "multi-query")
_VALUES = {  # the words that a part can be called by alone
    **_WORDS,
    "attention": _ATTENTION,
    **{name: CHOICES[name] for name in ("norm", "norm_placement", "positions")},
}
_ALIASES = {"softcap": "attn_logit_softcapping", "kv_heads": "num_key_value_heads", "window": "sliding_window"}
# Fields that only some positions read.
_OF_POSITIONS = {
    "rope_theta": ("rope",),
    "rope_scaling": ("rope",),
    "partial_rotary_factor": ("rope",),
    "position_offset": ("learned", "sinusoidal"),
    "alibi_scaled": ("alibi",),
}
_SCALINGS = ("linear", "ntk", "dynamic", "yarn", "llama3")
OVERRIDE_NAMES = tuple(sorted({*_TYPES, *_WORDS, *_ALIASES, "attention"} - _DECIDED.keys()))


def parse_overrides(assignments: Iterable[str]) -> dict[str, str]:
    """`["norm=layer", "positions=alibi"]` -> `{"norm": "layer", "positions": "alibi"}`.

    Raises ConfigError for what has no "=" or names a part twice.
    """
    found: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = (part.strip() for part in assignment.partition("="))
        name = name.replace("-", "_")
        if not (name and value):
            raise ConfigError(f"{assignment!r} sets nothing", "NAME=VALUE, such as positions=alibi")
        if name in found:
            raise ConfigError(f"{name} is set to both {found[name]} and {value}", "one of them")
        found[name] = value
    return found


def apply_overrides(
    config: ModelConfig, overrides: Mapping[str, str], reserved: Mapping[str, str] | None = None
) -> ModelConfig:
    """`config` with these parts, as a model of the family that can say them.

    overrides: values by name, as text. Names are ModelConfig's fields, and
        feed_forward=relu|gelu|silu|glu|reglu|geglu|swiglu, attention=multi-head|grouped-query|multi-query,
        biases=all|none, head=tied|untied, kv_heads, window, softcap (of attention's scores), layer_types=all or
        alternating for the layers that have the window, and rope_scaling=KIND:FACTOR or KIND:FACTOR:LENGTH with KIND
        linear, ntk, dynamic, yarn or llama3, LENGTH being the context before (default: max_position_embeddings).
        "ntk" is a larger base, rope_theta · factor^(D / (D - 2)), and is written as that.
    reserved: names that something else decides here, and what; beside those that always are.

    positions=sinusoidal also scales the embeddings by sqrt(hidden_size), unless embedding_multiplier is given.
    Heads fill the width where they did before, each with its own key head where it had one. Raises ConfigError for
    unknown names, for values that can't work and for parts that have no effect beside the others.
    """
    reasons = {**_DECIDED, **(reserved or {})}
    for name in overrides:
        if name in reasons:
            raise ConfigError(f"{name} can't be set as a part", reasons[name])
        if name not in OVERRIDE_NAMES:
            near = get_close_matches(name, OVERRIDE_NAMES, 3, 0.6)
            raise ConfigError(f"there is no part {name!r}", " or ".join(near) or f"one of {', '.join(OVERRIDE_NAMES)}")
    changes: Changes = {}

    def add(name: str, more: Changes) -> None:
        both = [field for field in more if field in changes and field != "rope_theta"]  # which "ntk" goes by
        if both:
            raise ConfigError(f"{name} and another part both say {both[0]}", "one of them")
        changes.update(more)

    def now(field: str) -> Any:
        return changes.get(field, getattr(config, field))

    for name in (name for name in overrides if name not in _LAST):
        add(name, _word(name, overrides[name]) if name in _WORDS else _field(name, overrides[name]))
    for field, value in _resized(config, changes, "attention" in overrides).items():
        changes.setdefault(field, value)
    for name in (name for name in _LAST if name in overrides):
        add(name, _LAST[name](overrides[name], now))
    if now("positions") == "sinusoidal" != config.positions:
        # The paper's scale of embeddings (Vaswani et al. 2017, 3.4), or they drown in values of size 1.
        changes.setdefault("embedding_multiplier", math.sqrt(now("hidden_size")))
    unread = [field for field, kinds in _OF_POSITIONS.items() if now("positions") not in kinds]
    for field in (field for field in unread if field in changes):
        raise ConfigError(
            f"{field} has no effect on {now('positions')} positions", f"positions={_OF_POSITIONS[field][0]}"
        )
    changes |= {field: _DEFAULTS[field] for field in unread}  # or no family could say what nothing reads
    if now("sliding_window") is None:
        changes.setdefault("layer_types", None)
    changes |= _without_idle_window(changes, now)
    return config.with_changes(**changes)


def infer_field(word: str) -> dict[str, str] | None:
    """The part that `word` alone is a value of, as `{"positions": "alibi"}`; None for what is of none or of several."""
    found = [name for name, values in _VALUES.items() if word in values]
    return {found[0]: word} if len(found) == 1 else None


def _choice(name: str, text: str, choices: Iterable[str]) -> str:
    if text not in choices:
        raise ConfigError(f"{name} is {text!r}", f"one of {', '.join(choices)}")
    return text


def _word(name: str, text: str) -> Changes:
    return _WORDS[name][_choice(name, text, _WORDS[name])]


def _field(name: str, text: str) -> Changes:
    """The value of one of ModelConfig's fields, by its type."""
    field = _ALIASES.get(name, name)
    return {field: parse_value(name, text, _TYPES[field])}


def parse_value(name: str, text: str, kind: str) -> Any:
    """`text` as a value of a field of type `kind`, such as "int | None". Raises ConfigError, with `name`."""
    low, or_none = text.lower(), " or none" * ("None" in kind)
    if or_none and low in ("none", "null"):
        return None
    try:
        if "bool" in kind:
            return {"true": True, "false": False}[low]
        if "int" in kind or "float" in kind:
            number = float(text)
            if not text.isascii() or "_" in text or ("int" in kind and not number.is_integer()):
                raise ValueError
            return int(number) if "int" in kind else number
    except (ValueError, KeyError):
        wanted = "true or false" if "bool" in kind else "a whole number" if "int" in kind else "a number"
        raise ConfigError(f"{name} is {text!r}", wanted + or_none) from None
    return text


def _resized(config: ModelConfig, changes: Changes, attention: bool) -> Changes:
    """A head's size and the number of key heads follow the width and the heads, where they did before. attention: it
    is among the parts, and says the number of key heads."""
    follow: Changes = {}
    if {"hidden_size", "num_attention_heads"} & changes.keys():
        if config.head_dim * config.num_attention_heads == config.hidden_size:
            follow["head_dim"] = None
        if config.num_key_value_heads == config.num_attention_heads and not attention:
            follow["num_key_value_heads"] = None
    return follow


def _without_idle_window(changes: Changes, now: Now) -> Changes:
    """No list of layers where all of them see everything. Raises ConfigError for a new window that no row would
    reach the end of."""
    window, types, context = changes.get("sliding_window"), now("layer_types"), now("max_position_embeddings")
    full = types is not None and len(types) == now("num_hidden_layers") and all(kind == FULL for kind in types)
    if window is not None and full:
        raise ConfigError(f"sliding_window {window} has no effect: no layer has it", "layer_types=alternating")
    if window is not None and context <= window:
        raise ConfigError(f"sliding_window {window} has no effect on {context} tokens of context", "a smaller one")
    return {"sliding_window": None, "layer_types": None} if full else {}


def _attention(text: str, now: Now) -> Changes:
    """Key heads by the kind's name; grouped-query has one for 4 heads, as Llama 3 8B, or for as few as can be."""
    heads = now("num_attention_heads")
    _choice("attention", text, _ATTENTION)
    if text != "grouped-query":
        return {"num_key_value_heads": heads if text == "multi-head" else 1}
    groups = next((n for n in (4, *range(2, heads)) if heads % n == 0 and n < heads), None)
    if groups is None:
        raise ConfigError(f"{heads} heads can't be grouped", "num_attention_heads=8, or attention=multi-query")
    return {"num_key_value_heads": heads // groups}


def _layer_types(text: str, now: Now) -> Changes:
    """Which layers have the window: the first of two where they alternate, as in Gemma 2."""
    if text in ("none", "all"):
        return {"layer_types": None}
    if text == "alternating":
        return {"layer_types": tuple(FULL if i % 2 else SLIDING for i in range(now("num_hidden_layers")))}
    return {"layer_types": _json("layer_types", text, list, "all, alternating, or a JSON list")}


def _rope_scaling(text: str, now: Now) -> Changes:
    if text == "none":
        return {"rope_scaling": None}
    if text.startswith("{"):
        return {"rope_scaling": _json("rope_scaling", text, dict, "a JSON object")}
    kind, *numbers = text.split(":")
    try:
        factor, length = float(numbers[0]), int(numbers[1]) if len(numbers) > 1 else now("max_position_embeddings")
    except (ValueError, IndexError):
        factor = None
    takes = 2 if kind in ("yarn", "llama3") else 1
    if kind not in _SCALINGS or factor is None or not 0 < factor < 1e12 or len(numbers) > takes:
        raise ConfigError(f"rope_scaling is {text!r}", "none, a JSON object, or such as linear:4, ntk:4, yarn:4:512")
    if kind == "ntk":
        dims = int((now("head_dim") or now("hidden_size") // now("num_attention_heads")) * now("partial_rotary_factor"))
        if dims < 4:
            raise ConfigError("rope_scaling ntk needs more than 2 rotary dimensions", "a larger head_dim")
        return {"rope_scaling": None, "rope_theta": now("rope_theta") * factor ** (dims / (dims - 2))}
    scaling = {"rope_type": kind, "factor": factor}
    if takes == 2:
        scaling["original_max_position_embeddings"] = length
    if kind == "llama3":  # Llama 3.1's
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling}


def _json(name: str, text: str, kind: type, wanted: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {text!r}", wanted)
    return value


# Parts that depend on the others, in the order in which they are read.
_LAST: dict[str, Callable[[str, Now], Changes]] = {
    "attention": _attention,
    "layer_types": _layer_types,
    "rope_scaling": _rope_scaling,
}

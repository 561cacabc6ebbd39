"""Hugging Face's configurations and ModelConfig, there and back, by the table of the family."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.validation import ACTIVATIONS
from mlxlm.families.activations import mlx_lm_activation_mismatch, normalize_activation
from mlxlm.families.family import Family
from mlxlm.families.mlxlm import MLXLM_MODEL_TYPE
from mlxlm.families.registry import FAMILIES, family_of
from mlxlm.families.rope import read_rope, unsupported_rope, write_rope
from mlxlm.families.tensor_names import modules_of, weight_mappings
from mlxlm.utils.errors import ConfigError

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_LONGEST = 60  # characters of a value in an error
_PLAN = ("group_size", "bits", "mode")  # of `quantization` itself; every other key is a module


def unsupported(values: Mapping[str, Any]) -> str | None:
    """One phrase for what the decoder lacks of what this configuration asks, or None if it has it all."""
    kind = _model_type(values)
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        return f"model_type {kind!r}" if "model_type" in values or kind else None  # nobody could read one without
    foreign = values.get("quantization_config")
    if not values.get("quantization") and isinstance(foreign, Mapping) and foreign.get("quant_method"):
        return f"quantization by {foreign['quant_method']!r}"
    types = values.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types and not family.hf_names("sliding_window"):
        return f"layer_types with sliding_attention in a {kind} model"
    activation = _activation(values, family)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        return f"{family.hf_names('hidden_act')[0]} {activation!r}"
    return family.unsupported_reason(values) or unsupported_rope(values, family)


def _model_type(values: Mapping[str, Any]) -> Any:
    """What the file says, or else the family or the name of its class; None if it names neither."""
    if "model_type" in values:
        return values["model_type"]
    classes = values.get("architectures")
    named = next((name for name in classes if isinstance(name, str)), None) if isinstance(classes, list) else None
    return next((kind for kind, family in FAMILIES.items() if family.architecture == named), named)


def _activation(values: Mapping[str, Any], family: Family) -> Any:
    """The activation in the decoder's words; None where the file doesn't say or the family has only one."""
    given = (values[name] for name in family.hf_names("hidden_act") if values.get(name) is not None)
    name = family.read(values).get("hidden_act", next(given, None))
    return normalize_activation(name) if isinstance(name, str) else name


def canonical(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The keyword arguments of ModelConfig for Hugging Face's values, which ModelConfig then checks.

    Raises ConfigError, naming `source`, for a missing field and for what the decoder lacks.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: a configuration is a JSON object, not {type(values).__name__}")
    if reason := unsupported(values):
        raise ConfigError(f"{source}: this decoder has no {reason}")
    if _model_type(values) is None:
        raise ConfigError(f"{source}: missing model_type", f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[_model_type(values)]
    result = {"model_type": family.model_type, **family.defaults}
    for name in family.fields:
        present = [values[theirs] for theirs in family.hf_names(name) if theirs in values]
        given = next((value for value in present if value is not None), None)
        if given is not None:
            result[name] = given
        elif present:  # null: not even the default
            result.pop(name, None)
    result |= family.read(values)
    if (activation := _activation(values, family)) is not None:
        result["hidden_act"] = activation
    result |= family.fixed_values
    if result.get("positions", "rope") == "rope":
        try:
            result |= read_rope(values)
        except TypeError as error:
            raise ConfigError(f"{source}: {error}", '{"rope_type": "default"}') from None
    missing = [(family.hf_names(name) or (name,))[0] for name in _REQUIRED if result.get(name) is None]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}", f"a complete {family.model_type} configuration")
    if (quantization := get_quantization_config(values)) is not None:
        result["quantization"] = _read_quantization(quantization, family)
    return result


def get_quantization_config(values: Mapping[str, Any]) -> Any:
    """MLX's plan lies under "quantization", in some folders under Hugging Face's name alone."""
    own, theirs = values.get("quantization"), values.get("quantization_config")
    if own is None and isinstance(theirs, Mapping) and "quant_method" not in theirs:
        return theirs
    return own


def huggingface(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a ModelConfig in its family's names, complete, so that no reader needs a default of its own.

    Raises ConfigError for a field that the family has no word for: an OLMo 2 with ALiBi.
    """
    values, lost = _said(config)
    if lost:
        raise ConfigError(f"the configuration of a {config.model_type} model can't say {', '.join(lost)}")
    return values


def unrepresentable_fields(config: ModelConfig) -> list[str]:
    """What the family of a ModelConfig has no word for, a phrase each: "positions 'sinusoidal'"."""
    return _said(config)[1]


def resolve_model_type(config: ModelConfig) -> ModelConfig:
    """The same ModelConfig as a model of a family that can say all of it: its own if that can, else the first of
    FAMILIES, and if none can `MLXLM_MODEL_TYPE`, which has our own words for everything."""
    others = [kind for kind in FAMILIES if kind not in (config.model_type, MLXLM_MODEL_TYPE)]
    if config.model_type != MLXLM_MODEL_TYPE and not unrepresentable_fields(config):
        return config
    for kind in others:
        candidate = config.with_changes(model_type=kind)
        with suppress(ConfigError):  # of a family that can't even be written so
            if not unrepresentable_fields(candidate):
                return candidate
    return config.with_changes(model_type=MLXLM_MODEL_TYPE)


def compatibility_warning(config: ModelConfig) -> str | None:
    """What to know before other tools are given a ModelConfig's files: that none but mlxlm opens them, and for want of
    which words, or that mlx_lm computes something else; None where all is well."""
    config = resolve_model_type(config)
    if config.model_type != MLXLM_MODEL_TYPE:
        reason = mlx_lm_activation_mismatch(config)
        return reason and f"mlx_lm opens this model and computes something else: {reason}"
    unsupported_reason: dict[str, list[str]] = {}
    for kind in FAMILIES:
        with suppress(ConfigError):
            unsupported_reason[kind] = unrepresentable_fields(config.with_changes(model_type=kind))
    del unsupported_reason[MLXLM_MODEL_TYPE]
    nearest = min(unsupported_reason, key=lambda kind: len(unsupported_reason[kind]))
    return f"only mlxlm opens this model: the nearest family, {nearest}, has no {', no '.join(unsupported_reason[nearest])}"


def _said(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The `config.json` of a ModelConfig, and what is lost in it."""
    family = family_of(config)
    values = {"architectures": [family.architecture], "model_type": family.model_type}
    for name in family.fields:
        values[family.hf_names(name)[0]] = getattr(config, name)
    if config.positions == "rope":
        values |= write_rope(config)
    values |= {**family.write(config), "torch_dtype": "float32"}
    if config.quantization is not None:
        # mlx_lm reads "quantization"; Hugging Face's tools look for "quantization_config".
        values["quantization"] = values["quantization_config"] = _write_quantization(config)
    if unsupported(values):
        return values, [f"{unsupported(values)}"]
    read = canonical(values, "config.json")
    with suppress(ConfigError):  # what is lost can leave what can't work: a head without ALiBi, but of odd size
        read = vars(type(config)(**read))
    lost = [f.name for f in fields(config) if read.get(f.name, f.default) != getattr(config, f.name)]
    return values, [_phrase(name, getattr(config, name)) for name in lost]


def _phrase(name: str, value: Any) -> str:
    """A field and its value, unless that is long: a list for all layers."""
    return f"{name} {value!r}" if len(repr(value)) <= _LONGEST else f"such {name}"


def _read_quantization(quantization: Any, family: Family) -> Any:
    """The same plan with the decoder's names of modules."""
    if not isinstance(quantization, Mapping):
        return quantization
    plan = {name: quantization[name] for name in _PLAN if name in quantization}
    for name, own in quantization.items():
        if name not in _PLAN:
            plan |= dict.fromkeys(modules_of(family, name), own)
    return plan


def _write_quantization(config: ModelConfig) -> dict[str, Any]:
    homes = {module: stored for stored in weight_mappings(config, for_mlx=True) for module in stored.modules}
    plan = {}
    for name, own in config.quantization.items():
        stored = homes.get(name)
        if stored is None:
            plan[name] = own
            continue
        if any(config.quantization.get(module, True) != own for module in stored.modules):
            raise ConfigError(f"{stored.name} joins {', '.join(stored.modules)}, which are quantized differently")
        plan[stored.name] = own
    return plan

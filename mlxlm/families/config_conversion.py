"""Conversion between `config.json` and ModelConfig, by the tables of the family.

Also which `model_type` a configuration is saved as, which tools can open it, and the presets that ship with mlxlm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import ACTIVATIONS, CHUNKED, SLIDING, SPARSE
from mlxlm.config.model_config import MAX_LAYERS, is_unused_id
from mlxlm.families.activations import normalize_activation
from mlxlm.families.family import Family, HFConfig
from mlxlm.families.mlxlm import MLXLM_MODEL_TYPE
from mlxlm.families.registry import FAMILIES, family_of, mlx_lm_mismatch
from mlxlm.families.rope import read_rope, unsupported_rope, write_rope
from mlxlm.families.weight_mapping import decoder_modules, weight_mappings
from mlxlm.utils.errors import ConfigError
from mlxlm.utils.json_files import read_json
from mlxlm.utils.resources import resource

_REQUIRED = tuple(field.name for field in fields(ModelConfig) if field.default is MISSING)
_MAX_REPR = 60  # characters of a value in an error message
# Of the tensors of a language model in a model with images, as transformers 5, transformers 4, mlx_lm and older
# versions of Qwen-VL save them.
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    **{name: name for name in ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")},
}
# Fields that may also be outside of the configuration of the language model.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "vocab_size")
# Language models of models with images that are those of a family; for texts, all of M-RoPE's positions are the same.
_SAME_MODELS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "gemma4_unified_text": "gemma4_text",
}
# Values of `quant_method` that `mlxlm.checkpoint` reads.
SUPPORTED_QUANT_METHODS = (
    "auto-round", "awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4",
)  # fmt: skip
_QUANTIZATION_FIELDS = ("group_size", "bits", "mode")  # every other key of `quantization` is a module


def config_from_hf(values: HFConfig, source: str = "config.json") -> ModelConfig:
    """Convert a Hugging Face configuration. Fields that don't concern a decoder are ignored.

    Args:
        values: The parsed `config.json`.
        source: Name of the file, for error messages.

    Raises:
        ConfigError: A required field is missing, a value can't work, or the decoder doesn't implement a feature
            (see `unsupported_feature`).
    """
    arguments = _without_unused_ids(_model_config_arguments(values, source))
    try:
        return ModelConfig(**arguments)
    except ConfigError as error:
        raise error.prefixed(source) from None


def unsupported_feature(values: HFConfig) -> str | None:
    """Name a feature of a Hugging Face configuration that the decoder doesn't implement, or return None."""
    model_type = _model_type(values)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        # Without any model_type it isn't unsupported but incomplete.
        return f"model_type {model_type!r}" if "model_type" in values or model_type else None
    method = get_quant_method(values)
    if method and method not in SUPPORTED_QUANT_METHODS:
        return f"quantization by {method!r}"
    types = family.read_extra(values).get("layer_types", values.get("layer_types"))
    if isinstance(types, list | tuple):
        kinds = {
            SLIDING: "sliding_window", CHUNKED: "attention_chunk_size", "conv": "conv_L_cache", 
            "linear_attention": "linear_num_key_heads", "mamba": "mamba_n_heads",
        }  # fmt: skip
        if missing := [kind for kind, name in kinds.items() if kind in types and not family.hf_names(name)]:
            return f"layer_types with {missing[0]} in a {model_type} model"
    activation = _activation(values, family)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        return f"{family.hf_names('hidden_act')[0]} {activation!r}"
    return family.find_unsupported(values) or unsupported_rope(values, family)


def text_part(values: HFConfig) -> HFConfig:
    """The configuration of the language model in one of a model with images, if the decoder implements it, else all."""
    text = values.get("text_config") if isinstance(values, Mapping) else None
    if not isinstance(text, Mapping) or values.get("model_type") in FAMILIES or unsupported_feature(text):
        return values
    outer = {name: values[name] for name in _SHARED if values.get(name) is not None and text.get(name) is None}
    if values.get("tie_word_embeddings") is not None:  # has priority in transformers 5
        outer["tie_word_embeddings"] = values["tie_word_embeddings"]
    if isinstance(quantization := get_quantization_config(values), Mapping):
        outer["quantization"] = {(text_tensor_name(f"{k}.") or f"{k}.")[:-1]: v for k, v in quantization.items()}
    elif get_quant_method(values):
        outer["quantization_config"] = values["quantization_config"]
    result = {**text, **outer}
    return values if unsupported_feature(result) else result


def with_multimodal_type(values: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `text_part`, for language models that are saved as those of a model with images."""
    family = FAMILIES[values["model_type"]]
    if not family.multimodal_type:
        return values
    text, outer = dict(values), {name: values[name] for name in ("torch_dtype", "dtype", *_SHARED) if name in values}
    outer["architectures"] = text.pop("architectures")
    for name in ("quantization", "quantization_config"):
        if settings := text.pop(name, None):
            outer[name] = {k if k in _QUANTIZATION_FIELDS else f"language_model.{k}": v for k, v in settings.items()}
    return {**outer, "model_type": family.multimodal_type, "text_config": text}


def text_tensor_name(name: str) -> str | None:
    """The name of a tensor in the language model of a model with images; None for tensors of other parts."""
    for prefix, replacement in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return None


def get_quantization_config(values: HFConfig) -> Any:
    """MLX's quantization settings: `quantization`, or in some folders only `quantization_config`."""
    quantization, hf_quantization = values.get("quantization"), values.get("quantization_config")
    if quantization is None and isinstance(hf_quantization, Mapping) and "quant_method" not in hf_quantization:
        return hf_quantization
    return quantization


def get_quant_method(values: HFConfig) -> Any:
    """The `quant_method` of a configuration whose weights another program than MLX quantized, else None."""
    foreign = values.get("quantization_config")
    return foreign.get("quant_method") if not values.get("quantization") and isinstance(foreign, Mapping) else None


def family_config(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a configuration in the names of its own family, with every field.

    Raises:
        ConfigError: The family can't represent a field, such as ALiBi in OLMo 2.
    """
    values, lost = _write_with_losses(config)
    if lost:
        raise ConfigError(f"the configuration of a {config.model_type} model can't represent {', '.join(lost)}")
    return values


def unrepresentable_fields(config: ModelConfig) -> list[str]:
    """The fields that the family of a configuration can't represent, such as "positions 'sinusoidal'"."""
    return _write_with_losses(config)[1]


def _model_type(values: HFConfig) -> Any:
    """`model_type` of the family, else that of the class in `architectures` (or that class), else None."""
    if "model_type" in values:
        model_type = values["model_type"]
        return _SAME_MODELS.get(model_type, model_type) if isinstance(model_type, str) else model_type
    classes = values.get("architectures")
    name = next((name for name in classes if isinstance(name, str)), None) if isinstance(classes, list) else None
    return next((family.model_type for family in FAMILIES.values() if family.architecture == name), name)


def _activation(values: HFConfig, family: Family) -> Any:
    """The normalized activation; None if the file has none or the family has only one."""
    in_file = next((values[name] for name in family.hf_names("hidden_act") if values.get(name) is not None), None)
    name = family.read_extra(values).get("hidden_act", in_file)
    return normalize_activation(name) if isinstance(name, str) else name


def _model_config_arguments(values: HFConfig, source: str) -> dict[str, Any]:
    """ModelConfig's arguments, not yet validated.

    Raises:
        ConfigError: A required field is missing, or the decoder doesn't implement a feature.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: a configuration is a JSON object, not {type(values).__name__}")
    if reason := unsupported_feature(values):
        hint = "mlxlm inspect, which describes models that run through mlx_lm, too"
        raise ConfigError(f"{source}: mlxlm's decoder has no {reason}", hint)
    if _model_type(values) is None:
        raise ConfigError(f"{source}: missing model_type", f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[_model_type(values)]
    result = {"model_type": family.model_type, **_table_fields(values, family), **family.read_extra(values)}
    if (activation := _activation(values, family)) is not None:
        result["hidden_act"] = activation
    result |= family.fixed_values
    if result.get("positions", "rope") == "rope":
        try:
            result |= read_rope(values, family)
        except ConfigError as error:
            raise error.prefixed(source) from None
        if result.get("sliding_window") is None:
            result.pop("rope_local_base_freq", None)
    missing = [(family.hf_names(name) or (name,))[0] for name in _REQUIRED if result.get(name) is None]
    if missing:
        raise ConfigError(f"{source}: missing {', '.join(missing)}", f"a complete {family.model_type} configuration")
    if (quantization := get_quantization_config(values)) is not None:
        count, types = result["num_hidden_layers"], result.get("mlp_layer_types")
        layers = family.file_layers(types or (SPARSE,) * min(count, MAX_LAYERS)) if family.mlp_layer_modules else []
        result["quantization"] = _read_quantization(quantization, family, layers)
    return result


def _table_fields(values: HFConfig, family: Family) -> dict[str, Any]:
    """The fields in `family.fields`, or the family's defaults; null removes a default."""
    result = dict(family.defaults)
    for name in family.fields:
        present = [values[hf_name] for hf_name in family.hf_names(name) if hf_name in values]
        if present:
            result.pop(name, None)
        if (value := next((value for value in present if value is not None), None)) is not None:
            result[name] = value
    return result


def _without_unused_ids(arguments: dict[str, Any]) -> dict[str, Any]:
    """Drop BOS and EOS ids beyond the vocabulary, which no text contains.

    transformers saves GPT-2's 50256 for vocabularies of any size, and fine-tuned models may name a token for which
    the embedding has no row.
    """
    vocab_size, result = arguments.get("vocab_size"), dict(arguments)
    for name in ("bos_token_id", "eos_token_id"):
        value = arguments.get(name)
        if is_unused_id(value, vocab_size):
            result[name] = None
        elif isinstance(value, list) and any(is_unused_id(id, vocab_size) for id in value):
            result[name] = [id for id in value if not is_unused_id(id, vocab_size)] or None
    return result


def _write_with_losses(config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The `config.json` of a configuration in its own family, and descriptions of the fields that it loses."""
    family = family_of(config)
    values: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    for name in family.fields:
        values[family.hf_names(name)[0]] = getattr(config, name)
    if config.positions == "rope":
        values |= write_rope(config, family.has_local_rope)
    values |= {**family.write_extra(config), "torch_dtype": "float32"}
    if reason := unsupported_feature(values):
        return values, [reason]
    read = _model_config_arguments(values, "config.json")
    with suppress(ConfigError):  # what remains may not be valid: without ALiBi, an odd head_dim
        read = vars(ModelConfig(**read))
    names = [(f.name, f.default) for f in fields(config) if f.name != "quantization"]
    lost = [name for name, default in names if read.get(name, default) != getattr(config, name)]
    if config.quantization is not None and not lost:  # the family has all modules
        # mlx_lm reads "quantization"; Hugging Face's tools look for "quantization_config".
        values["quantization"] = values["quantization_config"] = _write_quantization(config, config.quantization)
    texts = {name: repr(getattr(config, name)) for name in lost}
    return values, [f"{name} {text}" if len(text) <= _MAX_REPR else f"such {name}" for name, text in texts.items()]


def _read_quantization(quantization: Any, family: Family, layers: Sequence[tuple[int, Mapping[str, str]]]) -> Any:
    """MLX's quantization settings with the decoder's module names."""
    if not isinstance(quantization, Mapping):
        return quantization  # reported by validation
    result = {name: quantization[name] for name in _QUANTIZATION_FIELDS if name in quantization}
    for name, settings in quantization.items():
        if name not in _QUANTIZATION_FIELDS:
            result |= dict.fromkeys(decoder_modules(family, name, layers), settings)
    return result


def _write_quantization(config: ModelConfig, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_read_quantization`."""
    mappings = {module: mapping for mapping in weight_mappings(config, for_mlx=True) for module in mapping.modules}
    result = {}
    for name, settings in quantization.items():
        mapping = mappings.get(name)
        if mapping is None:
            result[name] = settings
            continue
        if any(quantization.get(module, True) != settings for module in mapping.modules):
            raise ConfigError(f"{mapping.name} fuses {', '.join(mapping.modules)}, which are quantized differently")
        result[mapping.name] = settings
    return result


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a configuration, in the names of an architecture that can represent it.

    Every field is written, so that other tools don't use their own defaults. See `resolve_model_type`.
    """
    return family_config(resolve_model_type(config))


def resolve_model_type(config: ModelConfig) -> ModelConfig:
    """The same configuration with a `model_type` whose family can represent all of it.

    Its own family if that can, else the first of FAMILIES, else `MLXLM_MODEL_TYPE`, which can represent everything.
    """
    if config.model_type != MLXLM_MODEL_TYPE and not unrepresentable_fields(config):
        return config
    for model_type in FAMILIES:
        if model_type in (config.model_type, MLXLM_MODEL_TYPE):
            continue
        candidate = config.with_changes(model_type=model_type)
        with suppress(ConfigError):  # the family can't write it at all
            if not unrepresentable_fields(candidate):
                return candidate
    return config.with_changes(model_type=MLXLM_MODEL_TYPE)


def compatibility_warning(config: ModelConfig) -> str | None:
    """What to know before opening a configuration's files with other tools.

    Only mlxlm can open them (and why), or mlx_lm can't run it as it is. None if there is nothing to know.
    """
    config = resolve_model_type(config)
    if config.model_type != MLXLM_MODEL_TYPE:
        mismatch = mlx_lm_mismatch(config)
        return mismatch and f"mlx_lm can't run this model as it is: {mismatch}"
    unrepresentable: dict[str, list[str]] = {}
    for model_type in FAMILIES:
        if model_type != MLXLM_MODEL_TYPE:
            with suppress(ConfigError):
                unrepresentable[model_type] = unrepresentable_fields(config.with_changes(model_type=model_type))
    nearest = min(unrepresentable, key=lambda model_type: len(unrepresentable[model_type]))
    missing = ", no ".join(unrepresentable[nearest])
    return f"only mlxlm opens this model: the nearest family, {nearest}, has no {missing}"


def load_config(path: Path | str) -> ModelConfig:
    """Read a `config.json`, or the one in a model folder."""
    return config_from_hf(text_part(read_json(path)), source=str(path))


def load_preset(name: str, **changes: Any) -> ModelConfig:
    """A configuration that ships with mlxlm, such as `load_preset("5m", vocab_size=4096)`.

    Args:
        name: One of `preset_names()`.
        changes: Other values for fields of its `config.json`.

    Raises:
        ConfigError: There is no such preset.
    """
    presets = preset_names()
    if name not in presets:
        raise ConfigError(f"there is no preset {name!r}", "one of " + ", ".join(presets))
    values = read_json(resource("models", "presets", f"{name}.json"))
    return config_from_hf({**values, **changes}, source=f"preset {name}")


@cache
def preset_names() -> tuple[str, ...]:
    """The names of all presets, by increasing number of parameters."""
    configs = {path.stem: load_config(path) for path in resource("models", "presets").glob("*.json")}
    return tuple(sorted(configs, key=lambda name: configs[name].parameter_count()))

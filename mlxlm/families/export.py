"""Which `model_type` a configuration is saved as, and which tools can open it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.activations import mlx_lm_activation_mismatch
from mlxlm.families.config_conversion import family_config, unrepresentable_fields
from mlxlm.families.mlxlm import MLXLM_MODEL_TYPE
from mlxlm.families.registry import FAMILIES
from mlxlm.utils.errors import ConfigError


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

    Only mlxlm can open them (and why), or mlx_lm computes something else. None if there is nothing to know.
    """
    config = resolve_model_type(config)
    if config.model_type != MLXLM_MODEL_TYPE:
        mismatch = mlx_lm_activation_mismatch(config)
        return mismatch and f"mlx_lm opens this model but computes something else: {mismatch}"
    unrepresentable: dict[str, list[str]] = {}
    for model_type in FAMILIES:
        if model_type != MLXLM_MODEL_TYPE:
            with suppress(ConfigError):
                unrepresentable[model_type] = unrepresentable_fields(config.with_changes(model_type=model_type))
    nearest = min(unrepresentable, key=lambda model_type: len(unrepresentable[model_type]))
    missing = ", no ".join(unrepresentable[nearest])
    return f"only mlxlm opens this model: the nearest family, {nearest}, has no {missing}"

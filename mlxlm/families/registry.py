"""All families, by the `model_type` of Hugging Face."""

from __future__ import annotations

from mlxlm.config import ModelConfig
from mlxlm.families.family import Family
from mlxlm.families.gpts import GPTS
from mlxlm.families.llamas import LLAMAS
from mlxlm.families.mlxlm import MLXLM
from mlxlm.utils.errors import ConfigError

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*LLAMAS, *GPTS, MLXLM)}


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration's `model_type`. Raises ConfigError for one that there isn't."""
    if config.model_type not in FAMILIES:
        raise ConfigError(f"model_type is {config.model_type!r}", f"one of {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]

"""All families, by Hugging Face's `model_type`."""

from __future__ import annotations

from mlxlm.config import ModelConfig
from mlxlm.families.bloom import BLOOM
from mlxlm.families.falcon import FALCON
from mlxlm.families.family import Family
from mlxlm.families.gemma import GEMMA, GEMMA2
from mlxlm.families.gpt2 import GPT2
from mlxlm.families.gpt_neox import GPT_NEOX
from mlxlm.families.llama import LLAMA
from mlxlm.families.mistral import MISTRAL
from mlxlm.families.mlxlm import MLXLM
from mlxlm.families.olmo2 import OLMO2
from mlxlm.families.opt import OPT
from mlxlm.families.phi3 import PHI3
from mlxlm.families.qwen import QWEN2, QWEN3
from mlxlm.utils.errors import ConfigError

# The first family that can represent a configuration is the one it is saved as: see `resolve_model_type`.
_ORDER = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, PHI3, OLMO2, GPT2, GPT_NEOX, OPT, FALCON, BLOOM, MLXLM)
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ORDER}


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration.

    Raises:
        ConfigError: There is no family of its `model_type`.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(f"unknown model_type {config.model_type!r}", f"one of {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]

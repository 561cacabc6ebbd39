"""All families, by Hugging Face's `model_type`."""

from __future__ import annotations

from mlxlm.config import ModelConfig
from mlxlm.families.activations import MLX_LM_ACTIVATIONS, same_activation
from mlxlm.families.arcee import ARCEE
from mlxlm.families.bloom import BLOOM
from mlxlm.families.cohere import COHERE, COHERE2
from mlxlm.families.cwm import CWM
from mlxlm.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from mlxlm.families.dots1 import DOTS1
from mlxlm.families.ernie4_5 import ERNIE4_5
from mlxlm.families.exaone import EXAONE
from mlxlm.families.exaone4 import EXAONE4
from mlxlm.families.falcon import FALCON
from mlxlm.families.family import Family
from mlxlm.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4
from mlxlm.families.glm import GLM, GLM4, GLM4_MOE
from mlxlm.families.gpt2 import GPT2
from mlxlm.families.gpt_neox import GPT_NEOX
from mlxlm.families.gpt_oss import GPT_OSS
from mlxlm.families.granite import GRANITE, GRANITE_HYBRID
from mlxlm.families.helium import HELIUM
from mlxlm.families.lfm2 import LFM2, LFM2_MOE
from mlxlm.families.llama import LLAMA
from mlxlm.families.llama4 import LLAMA4
from mlxlm.families.minimax import MINIMAX_M2
from mlxlm.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL
from mlxlm.families.mixtral import MIXTRAL
from mlxlm.families.mlxlm import MLXLM
from mlxlm.families.nemotron_h import NEMOTRON_H
from mlxlm.families.olmo import OLMO, OLMO2, OLMO3, OLMOE
from mlxlm.families.opt import OPT
from mlxlm.families.phi import PHI
from mlxlm.families.phi3 import PHI3
from mlxlm.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT
from mlxlm.families.seed_oss import SEED_OSS
from mlxlm.families.smollm3 import SMOLLM3
from mlxlm.families.stablelm import STABLELM
from mlxlm.families.starcoder2 import STARCODER2
from mlxlm.utils.errors import ConfigError

# The first family that can represent a configuration is the one it is saved as: see `resolve_model_type`.
_ORDER = (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, PHI3, OLMO2, GPT2, GPT_NEOX, OPT, FALCON, BLOOM, SMOLLM3, GRANITE,
    STARCODER2, STABLELM, OLMO, OLMO3, GEMMA3, MINISTRAL, CWM, EXAONE4, SEED_OSS, ARCEE, COHERE, COHERE2, GLM, GLM4,
    MIXTRAL, QWEN3_MOE, OLMOE, QWEN2_MOE, GLM4_MOE, GPT_OSS, PHI, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE_LITE,
    LFM2, LFM2_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GRANITE_HYBRID, NEMOTRON_H, MINISTRAL3, LLAMA4, ERNIE4_5,
    HELIUM, EXAONE, DOTS1, MINIMAX_M2, GEMMA4,
    MLXLM,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _ORDER}


def mlx_lm_mismatch(config: ModelConfig) -> str | None:
    """Describe what mlx_lm computes instead of a configuration, or why it can't run it; None if it runs the same."""
    kind = config.model_type
    if config.clip_qkv is not None:
        return f"its {kind} doesn't clip queries, keys and values (clip_qkv)"
    if kind in FAMILIES and (problem := FAMILIES[kind].mlx_lm_mismatch(config)):
        return f"its {kind} {problem}"
    computed = MLX_LM_ACTIVATIONS.get(kind)
    if computed is None or same_activation(config.hidden_act, computed):
        return None
    return f"its {kind} computes {computed}, this model uses {config.hidden_act}"


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration.

    Raises:
        ConfigError: There is no family of its `model_type`.
    """
    if config.model_type not in FAMILIES:
        raise ConfigError(f"unknown model_type {config.model_type!r}", f"one of {', '.join(FAMILIES)}")
    return FAMILIES[config.model_type]

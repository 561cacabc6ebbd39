"""The family for combinations that no Hugging Face architecture has: every field has ModelConfig's own name.

Only mlxlm opens these models.
"""

from dataclasses import fields

from mlxlm.config import ModelConfig
from mlxlm.families.family import Family, same_names

MLXLM_MODEL_TYPE = "mlxlm"

MLXLM = Family(
    MLXLM_MODEL_TYPE,
    "MlxlmForCausalLM",
    same_names(*(field.name for field in fields(ModelConfig) if field.name not in ("model_type", "quantization"))),
)

"""Families of decoders: tables between Hugging Face's names and the one decoder's. No family has code of its own
in the model: it is a configuration of the same parts. Pure data, without MLX."""

from mlxlm.families.activations import mlx_lm_activation_mismatch
from mlxlm.families.config_conversion import (
    compatibility_warning,
    get_quantization_config,
    resolve_model_type,
    unrepresentable_fields,
    unsupported,
)
from mlxlm.families.load import config_from_hf, config_to_hf, load_config, load_preset, preset_names
from mlxlm.families.mlxlm import MLXLM_MODEL_TYPE
from mlxlm.families.registry import FAMILIES
from mlxlm.families.tensor_names import is_mlx_layout, normalize_tensor_name, weight_mappings
from mlxlm.families.weight_mapping import WeightMapping

__all__ = [
    "FAMILIES",
    "MLXLM_MODEL_TYPE",
    "WeightMapping",
    "compatibility_warning",
    "config_from_hf",
    "config_to_hf",
    "is_mlx_layout",
    "weight_mappings",
    "load_config",
    "load_preset",
    "mlx_lm_activation_mismatch",
    "normalize_tensor_name",
    "preset_names",
    "get_quantization_config",
    "resolve_model_type",
    "unrepresentable_fields",
    "unsupported",
]

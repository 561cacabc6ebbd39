"""Hugging Face's architectures: one file each, mapping its configuration and tensor names to the decoder's.

A family has no code in the model: it is a configuration of the same parts. This package doesn't import MLX.
"""

from mlxlm.families.config_conversion import (
    SUPPORTED_QUANT_METHODS,
    compatibility_warning,
    config_from_hf,
    config_to_hf,
    family_config,
    get_quant_method,
    get_quantization_config,
    load_config,
    load_preset,
    preset_names,
    resolve_model_type,
    text_part,
    text_tensor_name,
    unsupported_feature,
    with_multimodal_type,
)
from mlxlm.families.mlxlm import MLXLM_MODEL_TYPE
from mlxlm.families.registry import FAMILIES, mlx_lm_mismatch
from mlxlm.families.rope import rope_parameters
from mlxlm.families.weight_mapping import (
    WeightMapping,
    is_mlx_layout,
    kv_b_mappings,
    normalize_tensor_name,
    quantizable_modules,
    weight_mappings,
)

__all__ = [
    "SUPPORTED_QUANT_METHODS",
    "FAMILIES",
    "MLXLM_MODEL_TYPE",
    "WeightMapping",
    "compatibility_warning",
    "config_from_hf",
    "config_to_hf",
    "family_config",
    "get_quant_method",
    "get_quantization_config",
    "is_mlx_layout",
    "kv_b_mappings",
    "load_config",
    "load_preset",
    "mlx_lm_mismatch",
    "normalize_tensor_name",
    "preset_names",
    "quantizable_modules",
    "resolve_model_type",
    "rope_parameters",
    "text_part",
    "text_tensor_name",
    "unsupported_feature",
    "weight_mappings",
    "with_multimodal_type",
]

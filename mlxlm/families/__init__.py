"""Families of decoders: tables between Hugging Face's names and the one decoder's. No family has code of its own
in the model: it is a configuration of the same parts. Pure data, without MLX."""

from mlxlm.families.activations import misread
from mlxlm.families.config_conversion import caveat, quantization_of, resolve_model_type, unsaid, unsupported
from mlxlm.families.load import config_from_hf, config_to_hf, load_config, load_preset, preset_names
from mlxlm.families.mlxlm import OWN
from mlxlm.families.registry import FAMILIES
from mlxlm.families.tensor_names import is_mlx_layout, layout, own_name
from mlxlm.families.weight_mapping import Stored

__all__ = [
    "FAMILIES",
    "OWN",
    "Stored",
    "caveat",
    "config_from_hf",
    "config_to_hf",
    "is_mlx_layout",
    "layout",
    "load_config",
    "load_preset",
    "misread",
    "own_name",
    "preset_names",
    "quantization_of",
    "resolve_model_type",
    "unsaid",
    "unsupported",
]

"""Families of decoders: tables between Hugging Face's names and the one decoder's. No family has code of its own
in the model: it is a configuration of the same parts. Pure data, without MLX."""

from mlxlm.families.activations import misread
from mlxlm.families.catalog import FAMILIES
from mlxlm.families.configs import canonical, caveat, huggingface, quantization_of, settled, unsaid, unsupported
from mlxlm.families.names import is_mlx_layout, layout, own_name
from mlxlm.families.own import OWN
from mlxlm.families.stored import Stored

__all__ = [
    "FAMILIES",
    "OWN",
    "Stored",
    "canonical",
    "caveat",
    "huggingface",
    "is_mlx_layout",
    "layout",
    "misread",
    "own_name",
    "quantization_of",
    "settled",
    "unsaid",
    "unsupported",
]

"""Families of decoders: tables between Hugging Face's names and the one decoder's. No family has code of its own
in the model: it is a configuration of the same parts. Pure data, without MLX."""

from mlxlm.families.catalog import FAMILIES
from mlxlm.families.configs import canonical, huggingface, only_ours, settled, unsaid, unsupported
from mlxlm.families.names import is_mlx_layout, layout, own_name
from mlxlm.families.own import OWN
from mlxlm.families.stored import Stored

__all__ = [
    "FAMILIES",
    "OWN",
    "Stored",
    "canonical",
    "huggingface",
    "is_mlx_layout",
    "layout",
    "only_ours",
    "own_name",
    "settled",
    "unsaid",
    "unsupported",
]

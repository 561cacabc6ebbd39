"""The decoder, assembled from its parts by a ModelConfig."""

from mlxlm.model.block import Block
from mlxlm.model.decoder import Decoder

__all__ = ["Block", "Decoder"]

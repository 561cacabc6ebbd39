"""The decoder: MLX modules that a ModelConfig assembles."""

from mlxlm.model.block import Block
from mlxlm.model.decoder import Decoder

__all__ = ["Block", "Decoder"]

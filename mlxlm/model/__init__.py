"""The decoder: MLX modules that a ModelConfig assembles."""

from mlxlm.model.block import Block
from mlxlm.model.decoder import Decoder
from mlxlm.model.multi_token_prediction import MTPModule

__all__ = ["Block", "Decoder", "MTPModule"]

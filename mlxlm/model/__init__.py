"""The decoder, assembled from its parts by a ModelConfig."""

from mlxlm.model.decoder import Decoder

__all__ = ["Decoder"]

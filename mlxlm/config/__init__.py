"""The configuration of a decoder: fields, validation, overrides, and parameter and FLOP counts. No MLX."""

from mlxlm.config.model_config import ModelConfig

__all__ = ["ModelConfig"]

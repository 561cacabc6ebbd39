"""The configuration of a decoder: its fields, their validation, and parameter and FLOP counts."""

from mlxlm.config.model_config import ModelConfig

__all__ = ["ModelConfig"]

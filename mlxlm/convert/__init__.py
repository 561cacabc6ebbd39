"""Convert checkpoints between formats, verify the result, and compare models."""

from mlxlm.convert.conversion import convert

__all__ = ["convert"]

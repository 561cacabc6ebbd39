"""Convert checkpoints between formats, verify the result, and compare models."""

from mlxlm.convert.conversion import ConversionReport, convert

__all__ = ["ConversionReport", "convert"]

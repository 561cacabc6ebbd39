"""Read and write models of every format, quantized or not."""

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import float_weights, load_checkpoint, load_model, load_part
from mlxlm.checkpoint.locations import locate
from mlxlm.checkpoint.safetensors import load_weights, save_weights
from mlxlm.checkpoint.source import open_checkpoint

__all__ = [
    "Checkpoint",
    "float_weights",
    "load_checkpoint",
    "load_model",
    "load_part",
    "load_weights",
    "locate",
    "open_checkpoint",
    "save_weights",
]

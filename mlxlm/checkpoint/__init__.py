"""Read and write models of every format, quantized or not."""

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint, load_float32_weights, load_model, load_submodule
from mlxlm.checkpoint.locations import locate
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import load_weights, save_weights

__all__ = [
    "Checkpoint",
    "load_float32_weights",
    "load_checkpoint",
    "load_model",
    "load_submodule",
    "load_weights",
    "locate",
    "open_checkpoint",
    "save_weights",
]

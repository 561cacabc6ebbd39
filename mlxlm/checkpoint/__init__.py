"""Read and write models of every format, quantized or not."""

from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint, MlxLmCheckpoint
from mlxlm.checkpoint.load import load_checkpoint, load_float32_weights, load_model, load_submodule
from mlxlm.checkpoint.locations import locate
from mlxlm.checkpoint.open import open_checkpoint, open_decoder_checkpoint
from mlxlm.checkpoint.safetensors import load_weights, save_weights

__all__ = [
    "AnyCheckpoint",
    "Checkpoint",
    "MlxLmCheckpoint",
    "load_checkpoint",
    "load_float32_weights",
    "load_model",
    "load_submodule",
    "load_weights",
    "locate",
    "open_checkpoint",
    "open_decoder_checkpoint",
    "save_weights",
]

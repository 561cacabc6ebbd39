"""Read and write models of every format, quantized or not.

The names below are imported when they are first used, so that looking up a model's name doesn't import MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint, MlxLmCheckpoint
    from mlxlm.checkpoint.load import load_checkpoint, load_float32_weights, load_model, load_submodule
    from mlxlm.checkpoint.locations import locate
    from mlxlm.checkpoint.open import open_checkpoint, open_decoder_checkpoint, open_tokenizer
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
    "open_tokenizer",
    "save_weights",
]
_MODULES = {
    "checkpoint": ("AnyCheckpoint", "Checkpoint", "MlxLmCheckpoint"),
    "load": ("load_checkpoint", "load_float32_weights", "load_model", "load_submodule"),
    "locations": ("locate",),
    "open": ("open_checkpoint", "open_decoder_checkpoint", "open_tokenizer"),
    "safetensors": ("load_weights", "save_weights"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

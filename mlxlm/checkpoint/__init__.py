"""Read and write models of every format, quantized or not.

The names below are imported when they are first used, so that looking up a model's name doesn't import MLX.
"""

from typing import TYPE_CHECKING

from mlxlm.utils.lazy_exports import lazy_exports

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
__getattr__ = lazy_exports(__name__)

"""Architectures that mlxlm doesn't implement, loaded through mlx_lm.

Either the logits are those of the model that config.json describes, or loading fails with the field that mlx_lm
doesn't implement. Code inside a checkpoint's folder is never run.
"""

from mlxlm.checkpoint.mlx_lm.model import MlxLmConfig, build_with_mlx_lm, load_with_mlx_lm
from mlxlm.checkpoint.mlx_lm.modules import ModuleCheckpoint, WritableCheckpoint, to_modules

__all__ = [
    "MlxLmConfig",
    "ModuleCheckpoint",
    "WritableCheckpoint",
    "build_with_mlx_lm",
    "load_with_mlx_lm",
    "to_modules",
]

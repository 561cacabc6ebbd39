"""An open checkpoint of any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """What a user named, whatever its format.

    `tensors` are the decoder's (`model.layers.0.self_attn.q_proj.weight`, ...); where `config.quantization` says so
    a module has MLX's packed `.weight` with `.scales` and, in affine mode, `.biases`. `values` is Hugging Face's
    configuration: the file's own, or made from another format's metadata.

    `config` is None for an architecture that mlxlm leaves to mlx_lm; `unsupported_reason` says why, and `tensors` then have
    the file's names.
    """

    path: Path
    format: str  # "safetensors", "pytorch", "gguf" or "llama2.c"
    hf_config: Mapping[str, Any]
    config: ModelConfig | None
    tensors: LazyTensors = field(repr=False)
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    unsupported_reason: str | None = None

"""An open checkpoint of any format, and what a format declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from mlxlm.checkpoint.adapter import Adapter
from mlxlm.checkpoint.embedding_config import EmbeddingConfig
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer


@dataclass(frozen=True)
class _CheckpointFiles:
    path: Path
    format: str
    hf_config: Mapping[str, Any]
    tensors: LazyTensors = field(repr=False)
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig, kw_only=True)


@dataclass(frozen=True)
class Checkpoint(_CheckpointFiles):
    """A checkpoint whose headers were read; tensors and the tokenizer are read on demand.

    Attributes:
        path: The folder of the weights, or the file.
        format: "safetensors", "pytorch", "gguf", "llama2.c" or "meta".
        hf_config: Hugging Face's configuration: config.json, or the equivalent of another format's metadata.
        embedding: How it makes embeddings.
        tensors: The decoder's tensors (`model.layers.0.self_attn.q_proj.weight`, ...). With `config.quantization`, a
            quantized module has MLX's packed `.weight`, `.scales` and in affine mode `.biases`.
        load_tokenizer: Raises TokenizerError if there is none or it can't be read.
        config: The decoder's configuration.
        packed: The same model with the quantized matrices of a GGUF file in MLX's format, for devices that multiply
            with them; None if there are none.
    """

    config: ModelConfig
    packed: Checkpoint | None = field(default=None, repr=False)

    @property
    def quantization(self) -> Mapping[str, Any] | None:
        """The settings of MLX's quantization; None if it isn't quantized."""
        return self.config.quantization

    def keeps_dtype(self, name: str) -> bool:
        """Whether a tensor must keep its dtype when the others are converted."""
        return name.endswith(".A_log")  # whose errors add up in the state; published in float32

    def with_tensors(self, tensors: LazyTensors, quantization: Mapping[str, Any] | None = None) -> Self:
        """The same model with other tensors, quantized by `quantization`, and without `packed`."""
        config = self.config.with_changes(quantization=quantization)
        return replace(self, tensors=tensors, config=config, packed=None)


@dataclass(frozen=True)
class MlxLmCheckpoint(_CheckpointFiles):
    """A checkpoint of an architecture that only mlx_lm implements, with the tensors under the file's names.

    The attributes are those of `Checkpoint`, with `unsupported_reason` instead of `config`: the feature that mlxlm's
    decoder lacks. `adapter` is merged into the weights when they are loaded.
    """

    unsupported_reason: str
    adapter: Adapter | None = field(default=None, kw_only=True)


AnyCheckpoint = Checkpoint | MlxLmCheckpoint


@dataclass(frozen=True)
class FileFormat:
    """A format whose models are files: `open_checkpoint` looks for it in its table.

    Attributes:
        matches: Whether a file is of this format, by its path and its first four bytes.
        open: Opens such a file. Reads and checks only headers.
    """

    matches: Callable[[Path, bytes], bool]
    open: Callable[[Path], Checkpoint]


def token_id_list(value: Any) -> list[Any]:
    """The items of a field that may be one id, a list of ids or null, such as `eos_token_id`."""
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]

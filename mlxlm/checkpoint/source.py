"""A checkpoint of any format, opened: described and checked, its values read on demand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm._mlx import tree_flatten
from mlxlm.checkpoint import quantized
from mlxlm.checkpoint.layout import locate
from mlxlm.checkpoint.safetensors import folder_tensors
from mlxlm.checkpoint.stored import as_modules
from mlxlm.checkpoint.tensors import Tensors
from mlxlm.config import ModelConfig, read_json
from mlxlm.errors import CheckpointError, ConfigError
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer import load as load_tokenizer

# Until families has these of its own.
if not hasattr(families, "own_name"):
    families.own_name = lambda config, name: (
        None
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
        else name
    )
    families.layout = lambda config, for_mlx=False: []
    families.unsupported = lambda values: (
        None if values.get("model_type", "llama") == "llama" else f"model_type {values.get('model_type')!r}"
    )

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Checkpoint:
    """What a user named, whatever its format.

    `tensors` are the decoder's (`model.layers.0.self_attn.q_proj.weight`, ...); where `config.quantization` says so
    a module has MLX's packed `.weight` with `.scales` and, in affine mode, `.biases`. `values` is Hugging Face's
    configuration: the file's own, or made from another format's metadata.

    `config` is None for an architecture that mlxlm leaves to mlx_lm; `foreign` says why, and `tensors` then have
    the file's names.
    """

    path: Path
    format: str  # "safetensors", "pytorch", "gguf" or "llama2.c"
    values: Mapping[str, Any]
    config: ModelConfig | None
    tensors: Tensors = field(repr=False)
    load_tokenizer: Callable[[], Tokenizer] = field(repr=False)
    foreign: str | None = None


def open_checkpoint(source: Path | str) -> Checkpoint:
    """Open a model folder, a run, a hub id (`owner/name`), a `.gguf` file or a llama2.c `.bin` file.

    Only headers are read, in a second and 200 MB whatever they claim. Raises CheckpointError, ConfigError or
    TokenizerError naming the file and the field.
    """
    checkpoint = _open_folder(Path(source))
    if checkpoint.config is not None:
        _check_fit(checkpoint.config, checkpoint.tensors, checkpoint.path)
    return checkpoint


def _open_folder(path: Path) -> Checkpoint:
    location = locate(path)
    file = location.root / "config.json"
    values = read_json(file)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file}: a configuration is a JSON object, not {type(values).__name__}")
    tensors = folder_tensors(location.weights)

    def tokenizer() -> Tokenizer:
        return load_tokenizer(location.root)

    reason = families.unsupported(values)
    if reason:
        return Checkpoint(location.weights, "safetensors", values, None, tensors, tokenizer, reason)
    config = ModelConfig.from_dict(values, source=str(file))
    named = {families.own_name(config, name): tensor for name, tensor in tensors.items()}
    named.pop(None, None)
    layout = families.layout(config, for_mlx=config.quantization is not None)
    modules = as_modules(layout, named, str(location.weights))
    return Checkpoint(location.weights, "safetensors", values, config, modules, tokenizer)


def _check_fit(config: ModelConfig, tensors: Tensors, path: Path) -> None:
    """All weights there, none left over, every shape as the configuration says."""
    layers = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    if config.num_hidden_layers > len(layers):  # said before a decoder of that many layers is built to compare with
        missing = next(i for i in range(len(layers) + 1) if i not in layers)
        raise CheckpointError(
            f"{path}: the weights don't fit config.json: model.layers.{missing} is missing"
            f" (num_hidden_layers is {config.num_hidden_layers})"
        )
    shapes = quantized.full_shapes(tensors, config.quantization, str(path))
    wanted = {name: value.shape for name, value in tree_flatten(Decoder(config).parameters())}
    problems = [f"{name} is missing" for name in wanted if name not in shapes]
    problems += [f"{name} is not part of this model" for name in shapes if name not in wanted]
    problems += [
        f"{name} is {list(shape)}, config.json says {list(wanted[name])}"
        for name, shape in shapes.items()
        if name in wanted and tuple(shape) != tuple(wanted[name])
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{path}: the weights don't fit config.json: {'; '.join(problems[:3])}{more}")

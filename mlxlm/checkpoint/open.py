"""A checkpoint of any format, opened: described and checked, its values read on demand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.backend.mlx import tree_flatten
from mlxlm.checkpoint import dequantize, hub, pytorch, safetensors
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.gguf import open_gguf
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.llama2c import open_llama2c
from mlxlm.checkpoint.locations import locate
from mlxlm.checkpoint.weight_mapping import to_decoder_weights
from mlxlm.config import ModelConfig
from mlxlm.config.validation import is_unused_id
from mlxlm.families import config_from_hf
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError, ConfigError, os_errors_as
from mlxlm.utils.json_files import read_json

_PARTS = (".safetensors", ".bin", ".pt", ".pth", ".json")
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def open_checkpoint(source: Path | str) -> Checkpoint:
    """Open a model folder, a run, a hub id (`owner/name`), a `.gguf` file or a llama2.c `.bin` file.

    What exists at that path wins over a hub id, and a name that ends as a file's is none. Only headers are read, in a
    second and 200 MB whatever they claim.
    Raises CheckpointError, ConfigError or TokenizerError naming the file and the field.
    """
    if not str(source):
        raise CheckpointError("the name of the model is empty", "a model folder, a run, a .gguf file, or a hub id")
    path = Path(source)
    with os_errors_as(CheckpointError, "read", path):
        is_folder, exists = path.is_dir(), path.exists()
    if exists and not is_folder:
        checkpoint = _open_file(path)
    elif not exists and path.suffix in (".gguf", *_PARTS):
        raise CheckpointError(f"there is no file {path}", "check the path")
    elif not exists and hub.is_id(str(source)):
        checkpoint = _open_folder(hub.download(str(source)))
    else:
        checkpoint = _open_folder(path)
    if checkpoint.config is not None:
        _check_fit(checkpoint.config, checkpoint.tensors, checkpoint.path)
    return checkpoint


def _open_file(path: Path) -> Checkpoint:
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
    if start == b"GGUF" or path.suffix == ".gguf":
        return open_gguf(path)
    if path.suffix == ".bin" and not pytorch.is_pytorch_file(start):
        return open_llama2c(path)
    if path.suffix in _PARTS:
        raise CheckpointError(f"{path} is one file of a model", f"its folder, {path.parent}")
    raise CheckpointError(f"{path} is not a model", "a model folder, a .gguf file or a llama2.c .bin file")


def _open_folder(path: Path) -> Checkpoint:
    location = locate(path)
    file = location.root / "config.json"
    if not file.exists() or not (safetensors.has_weights(location.weights) or pytorch.has_weights(location.weights)):
        found = list(path.glob("*.gguf"))  # on the hub, often beside the config.json of what they were made from
        if len(found) == 1:
            return _open_file(found[0])
        if found:
            names = ", ".join(sorted(other.name for other in found))
            raise CheckpointError(f"{path} has several GGUF files", f"one of them: {names}")
    values = read_json(location.root)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file}: a configuration is a JSON object, not {type(values).__name__}")
    values = _with_ends(values, location.root / "generation_config.json")
    format, tensors = _folder_tensors(location.weights)

    def tokenizer() -> Tokenizer:
        return load_tokenizer(location.root)

    reason = families.unsupported_feature(values)
    if reason:
        return Checkpoint(location.weights, format, values, None, tensors, tokenizer, reason)
    config = config_from_hf(values, source=str(file))
    modules = _decoder_tensors(config, tensors, location.weights)
    return Checkpoint(location.weights, format, values, config, modules, tokenizer)


def _with_ends(values: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """The tokens that end a text, those of generation_config.json too: a model for chats often has more there.
    Fine-tuned models may name one beyond their vocabulary, which no text ends with; it is left out."""
    settings = read_json(file) if file.exists() else None
    more = settings.get("eos_token_id") if isinstance(settings, Mapping) else None
    own = values.get("eos_token_id")
    ends = _listed(own)
    ends += [id for id in _listed(more) if id not in ends]
    if not all(type(id) is int and id >= 0 for id in _listed(more)):
        raise ConfigError(f"{file}: eos_token_id is {more!r}, it must be a token id or a list of them")
    nested = values.get("text_config")
    size = (nested if isinstance(nested, Mapping) and "vocab_size" in nested else values).get("vocab_size")
    ends = [id for id in ends if not is_unused_id(id, size)]
    if ends == _listed(own):
        return values
    return {**values, "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _folder_tensors(folder: Path) -> tuple[str, dict[str, LazyTensor]]:
    if not safetensors.has_weights(folder) and pytorch.has_weights(folder):
        return "pytorch", pytorch.folder_tensors(folder)
    return "safetensors", safetensors.folder_tensors(folder)


def _decoder_tensors(config: ModelConfig, tensors: LazyTensors, folder: Path) -> dict[str, LazyTensor]:
    named: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        own = families.normalize_tensor_name(config, name)
        if own in named:
            raise CheckpointError(f"{folder}: {own} is there twice, with and without a prefix")
        if own is not None:
            named[own] = tensor
    for_mlx = config.quantization is not None or families.is_mlx_layout(config, tensors)
    return to_decoder_weights(families.weight_mappings(config, for_mlx=for_mlx), named, str(folder))


def _check_fit(config: ModelConfig, tensors: LazyTensors, path: Path) -> None:
    """All weights there, none left over, every shape as the configuration says."""
    layers = {int(found[1]) for name in tensors if (found := _LAYER.match(name))}
    if config.num_hidden_layers > len(layers):  # said before a decoder of that many layers is built to compare with
        missing = next(i for i in range(len(layers) + 1) if i not in layers)
        raise CheckpointError(
            f"{path}: the weights don't fit the configuration: model.layers.{missing} is missing"
            f" (num_hidden_layers is {config.num_hidden_layers})"
        )
    shapes = dequantize.unpacked_shapes(tensors, config.quantization, str(path))
    wanted = {name: tuple(value.shape) for name, value in tree_flatten(Decoder(config).parameters())}
    problems = [f"{name} is missing" for name in wanted if name not in shapes]
    problems += [f"{name} is not part of this model" for name in shapes if name not in wanted]
    problems += [
        f"{name} is {list(shape)}, the configuration says {list(wanted[name])}"
        for name, shape in shapes.items()
        if name in wanted and tuple(shape) != wanted[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointError(f"{path}: the weights don't fit the configuration: {'; '.join(problems[:3])}{more}")

"""Open a checkpoint of any format: headers are read and checked, values are read on demand.

The way of every format: `locate` its files, read the tensors' descriptions, map their names to the decoder's
(`map_weights`), compare their shapes with the configuration. `load` then reads the values.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.checkpoint import dequantize, embedding_config, gguf, llama2c, meta, pytorch, safetensors
from mlxlm.checkpoint.adapter import CONFIG_FILE, open_adapter
from mlxlm.checkpoint.catalog import model_names
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint, MlxLmCheckpoint, token_id_list
from mlxlm.checkpoint.download import resolve
from mlxlm.checkpoint.hub import without_address
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.locations import gguf_models, is_image_encoder, locate, weights_format
from mlxlm.checkpoint.map_weights import to_decoder_weights
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint, build_with_mlx_lm, to_modules
from mlxlm.checkpoint.quantized_formats import read_quantized, without_zero_biases
from mlxlm.config import ModelConfig
from mlxlm.config.model_config import is_unused_id
from mlxlm.config.quantization import Format, quantization_settings, validate_quantization
from mlxlm.families import config_from_hf
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError, ConfigError, os_errors_as
from mlxlm.utils.json_files import read_json

# Formats of one file, and of the weights in a folder with config.json; MLX's quantized matrices are in safetensors.
_FILE_FORMATS = (gguf.FORMAT, llama2c.FORMAT)
_FOLDER_TENSORS = {"safetensors": safetensors.folder_tensors, "pytorch": pytorch.folder_tensors}
_PART_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".json")
_ENCODERS = (
    "albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "new", "nomic_bert",
    "roberta", "xlm-roberta",
)  # fmt: skip
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


def open_tokenizer(source: Path | str) -> Tokenizer:
    """Load the tokenizer at a path, or that of a model with a short name, which is downloaded if necessary.

    Raises:
        TokenizerError: There is none, or it is invalid.
        CheckpointError: The model can't be downloaded or opened.
    """
    if os.path.exists(source) or str(source) not in model_names():
        return load_tokenizer(source)
    return open_checkpoint(source).load_tokenizer()


def open_checkpoint(source: Path | str, adapter: Path | str | None = None) -> AnyCheckpoint:
    """Open a model folder, a run, a `.gguf` or llama2.c `.bin` file, a name of the catalog, or a hub id or its address.

    An existing path has priority, see `resolve`, and a name with the suffix of a file is a path. Only headers are read,
    within a second and 200 MB for any file, valid or not.

    Args:
        source: The model.
        adapter: The folder or hub id of an adapter that is merged into its weights when they are read.

    Raises:
        CheckpointError, ConfigError, TokenizerError: Names the file and the field.
    """
    if not str(source):
        raise CheckpointError("the model name is empty", "a model folder, a run, a .gguf file, or a hub id")
    source = without_address(str(source))
    path = Path(source)
    with os_errors_as(CheckpointError, "read", path):
        is_folder, exists = path.is_dir(), path.exists()
    if not exists:
        if path.suffix in (".gguf", *_PART_SUFFIXES):
            raise CheckpointError(f"there is no file {path}", "check the path")
        path = resolve(source)
        is_folder = path.is_dir()
    checkpoint = _open_folder(path) if is_folder else _open_file(path)
    if isinstance(checkpoint, Checkpoint):
        _check_shapes(checkpoint.config, checkpoint.tensors, checkpoint.path)
    if adapter is None:
        return checkpoint
    opened = open_adapter(adapter)
    if not isinstance(checkpoint, Checkpoint):
        return replace(checkpoint, adapter=opened)
    config, tensors = opened.merge_into_decoder(checkpoint.config, checkpoint.tensors)
    return replace(checkpoint, config=config, tensors=tensors, packed=None)


def open_decoder_checkpoint(source: Path | str, purpose: str = "used") -> Checkpoint:
    """Open a checkpoint of an architecture that mlxlm's decoder implements.

    Args:
        source: As for `open_checkpoint`.
        purpose: What the checkpoint is for, in the error: "fine-tuned".

    Raises:
        CheckpointError, ConfigError, TokenizerError: As `open_checkpoint`; or only mlx_lm implements the architecture.
    """
    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    hint = None
    with suppress(CheckpointError):
        build_with_mlx_lm(checkpoint)
        hint = "mlxlm chat or mlxlm generate, which run this model as it is"
    reason = checkpoint.unsupported_reason
    raise CheckpointError(f"{source} can't be {purpose}: mlxlm's decoder has no {reason}", hint)


def open_module_checkpoint(source: Path | str, adapter: Path | str | None = None) -> WritableCheckpoint:
    """Open a checkpoint with the tensors of the modules that run it: those of mlxlm's decoder, or of mlx_lm's class.

    Raises:
        CheckpointError, ConfigError, TokenizerError: As `open_checkpoint`; or mlx_lm can't load the checkpoint.
    """
    checkpoint = open_checkpoint(source, adapter)
    return checkpoint if isinstance(checkpoint, Checkpoint) else to_modules(checkpoint)


def _open_file(path: Path) -> AnyCheckpoint:
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
    for file_format in _FILE_FORMATS:
        if file_format.matches(path, start):
            return file_format.open(path)
    if path.suffix in _PART_SUFFIXES:
        raise CheckpointError(f"{path} is one file of a model", f"its folder, {path.parent}")
    raise CheckpointError(f"{path} is not a model", "a model folder, a .gguf file or a llama2.c .bin file")


def _open_folder(path: Path) -> AnyCheckpoint:
    location = locate(path)
    file = location.root / "config.json"
    format = weights_format(location.weights)
    if format is None or not file.exists():
        models = gguf_models(path)  # on the hub, often next to the config.json of their source
        if len(models) == 1:
            for encoder in filter(is_image_encoder, path.glob("*.gguf")):
                warnings.warn(f"{encoder.name} is ignored: mlxlm reads text, not images", stacklevel=3)
            return _open_file(models[0][0])
        if models:
            names = ", ".join(files[0].name for files in models)
            raise CheckpointError(f"{path} has several GGUF files", f"one of them: {names}")
        if not file.exists() and meta.consolidated_files(path):
            return meta.open_meta(path)
        _refuse_adapter(path)
    values = read_json(location.root)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{file}: a configuration is a JSON object, not {type(values).__name__}")
    values = _add_eos_ids(values, location.root / "generation_config.json")
    if format is None:
        expected = "model*.safetensors, pytorch_model*.bin or .gguf file"
        raise CheckpointError(f"{location.weights} has no {expected}", "the folder of a model or a run")
    weights, tensors = location.weights, _FOLDER_TENSORS[format](location.weights)

    def tokenizer() -> Tokenizer:
        return load_tokenizer(location.root)

    if values.get("model_type") in _ENCODERS:
        problem = f"{path} is an encoder ({values['model_type']}), and mlxlm runs decoders"
        raise CheckpointError(problem, "for embeddings, Qwen/Qwen3-Embedding-0.6B")
    text_values = families.text_part(values)
    if text_values is not values:
        renamed = ((families.text_tensor_name(name), tensor) for name, tensor in tensors.items())
        values, tensors = text_values, {name: tensor for name, tensor in renamed if name is not None}
    embedding = embedding_config.read_folder(location.root, values)
    reason = families.unsupported_feature(values)
    if reason:
        return MlxLmCheckpoint(weights, format, values, tensors, tokenizer, reason, embedding=embedding)
    formats: dict[str, Format] = {}
    if quant_method := families.get_quant_method(values):
        tensors, formats = read_quantized(tensors, values["quantization_config"], str(weights))
    quantization = quantization_settings(formats) if formats else families.get_quantization_config(values)
    if unpacked := _unpacked_kv_b(quantization, tensors, str(weights)):
        tensors = {name: tensor for name, tensor in tensors.items() if ".kv_b_proj." not in name} | unpacked
        modules = [name.rpartition(".")[0] for name in unpacked]
        if formats:
            formats = {name: chosen for name, chosen in formats.items() if name not in modules}
        else:
            values = {**values, "quantization": {**quantization, **dict.fromkeys(modules, False)}}
    if not values.get("tie_word_embeddings") and _has_no_head(values, tensors, location.root):
        values = {**values, "tie_word_embeddings": True}
    config = config_from_hf(values, source=str(file))
    decoder_tensors = _decoder_tensors(config, tensors, weights)
    if formats:
        config = config.with_changes(quantization=quantization_settings(_decoder_formats(config, formats)))
    if quant_method == "gptq":
        decoder_tensors = without_zero_biases(decoder_tensors, config)
    return Checkpoint(weights, format, values, decoder_tensors, tokenizer, config, embedding=embedding)


def _unpacked_kv_b(quantization: Any, tensors: LazyTensors, source: str) -> dict[str, LazyTensor]:
    """The dequantized `kv_b_proj` of latent attention, of which the decoder has some rows transposed."""
    is_packed = any(name.endswith(".kv_b_proj.scales") for name in tensors)
    if not is_packed or not isinstance(quantization, Mapping) or any(validate_quantization(quantization)):
        return {}
    parts = {name: tensor for name, tensor in tensors.items() if ".kv_b_proj." in name}
    dequantize.unpacked_shapes(parts, quantization, source)  # raises for what can't be unpacked
    return dequantize.dequantize_to_scales(parts, quantization)


def _has_no_head(values: Mapping[str, Any], tensors: LazyTensors, folder: Path) -> bool:
    """Whether the weights are those of an embedding model without an output matrix."""
    classes = values.get("architectures")
    is_backbone = isinstance(classes, list) and len(classes) == 1 and str(classes[0]).endswith("Model")
    is_embedding_model = is_backbone or (folder / embedding_config.MODULES_FILE).exists()
    return is_embedding_model and not any(name.startswith(("lm_head.", "embed_out.")) for name in tensors)


def _refuse_adapter(path: Path) -> None:
    """Raise CheckpointError if a folder has a LoRA adapter of peft or mlx_lm, but no model."""
    file = path / CONFIG_FILE
    if not file.is_file():
        return
    values = read_json(file, error_type=CheckpointError)
    values = values if isinstance(values, Mapping) else {}
    base = values.get("base_model_name_or_path") or values.get("model")
    problem = f"{path} is a LoRA adapter, without the weights of {base or 'its base model'}"
    raise CheckpointError(problem, f"{base or 'its base model'} with --adapter {path}")


def _add_eos_ids(values: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Add the end-of-text tokens of generation_config.json, where chat models often have more.

    Fine-tuned models may name one beyond their vocabulary, which is left out.
    """
    settings = read_json(file) if file.exists() else None
    more = settings.get("eos_token_id") if isinstance(settings, Mapping) else None
    config_ids = token_id_list(values.get("eos_token_id"))
    ids = config_ids + [id for id in token_id_list(more) if id not in config_ids]
    if not all(type(id) is int and id >= 0 for id in token_id_list(more)):
        raise ConfigError(f"{file}: eos_token_id is {more!r}, it must be a token id or a list of them")
    nested = values.get("text_config")
    size = (nested if isinstance(nested, Mapping) and "vocab_size" in nested else values).get("vocab_size")
    ids = [id for id in ids if not is_unused_id(id, size)]
    if ids == config_ids:
        return values
    return {**values, "eos_token_id": ids[0] if len(ids) == 1 else ids or None}


def _decoder_tensors(config: ModelConfig, tensors: LazyTensors, folder: Path) -> dict[str, LazyTensor]:
    by_hf_name: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        hf_name = families.normalize_tensor_name(config, name)
        if hf_name in by_hf_name:
            raise CheckpointError(f"{folder}: {hf_name} occurs twice, with and without a prefix")
        if hf_name is not None:
            by_hf_name[hf_name] = tensor
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for_mlx = config.quantization is not None or families.is_mlx_layout(config, shapes)
    mappings = families.weight_mappings(config, for_mlx=for_mlx) + families.kv_b_mappings(config)
    return to_decoder_weights(mappings, by_hf_name, str(folder))


def _decoder_formats(config: ModelConfig, formats: Mapping[str, Format]) -> dict[str, Format]:
    """The formats of the decoder's modules from those of a file's; experts of one stack have the same."""
    homes = {name: m.modules for m in families.weight_mappings(config) for name in m.expert_names() or [m.name]}
    result: dict[str, Format] = {}
    for module, chosen in formats.items():
        name = families.normalize_tensor_name(config, f"{module}.weight")
        if name is not None:
            module = name.removesuffix(".weight")
            result |= dict.fromkeys(homes.get(module, (module,)), chosen)
    return result


def _check_shapes(config: ModelConfig, tensors: LazyTensors, path: Path) -> None:
    """Check that all weights are there, with the shapes that the configuration says, and no others."""
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if config.num_hidden_layers > len(layers):  # before building a decoder of that many layers
        missing = next(i for i in range(len(layers) + 1) if i not in layers)
        raise CheckpointError(
            f"{path}: the weights don't match the configuration: model.layers.{missing} is missing"
            f" (num_hidden_layers is {config.num_hidden_layers})"
        )
    dequantize.check_shapes(Decoder(config), tensors, config.quantization, str(path))

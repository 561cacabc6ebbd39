"""Write models in Hugging Face's layout, which transformers and mlx_lm open, quantized or not."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensors, dtype_sizes
from mlxlm.checkpoint.locations import FOLDER_FORMATS, locate
from mlxlm.checkpoint.map_weights import to_file_weights
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.checkpoint.safetensors import SHARD_BYTES, write_shards
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf, resolve_model_type, with_multimodal_type
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import MissingTokenizerError, TokenizerError
from mlxlm.utils.json_files import write_json

# Fields of the source's configuration about its files (code is not copied), RoPE and quantization.
ABOUT_FILES = {
    "_name_or_path", "auto_map", "custom_pipelines", "model_file", "dtype", "torch_dtype", "quantization",
    "quantization_config", "transformers_version",
}  # fmt: skip
_REPLACED = ABOUT_FILES | {"rope_parameters", "rope_scaling", "rope_theta"}
# Hugging Face's files of tokenizers, chat templates and generation settings.
_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def write(
    folder: Path,
    values: Mapping[str, Any],
    config: ModelConfig,
    tensors: LazyTensors,
    tokenizer: Tokenizer | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, the tokenizer and the weights, one tensor in memory at a time.

    Args:
        folder: An existing folder; use `atomic_new_folder`, so that a failed write leaves nothing.
        values: Hugging Face's configuration of the source. Fields that ModelConfig doesn't have are copied from it if
            the model type is the same.
        config: Configuration of the model. With `quantization`, the names are those of mlx_lm's modules.
        tensors: The decoder's tensors; quantized ones have `.scales` (and `.biases`). Dtypes are kept.
        tokenizer: None writes none; `copy_tokenizer` copies a source's files instead.
        shard_bytes: Maximum bytes of a safetensors file.

    Raises:
        CheckpointError: Names a tensor that can't be read or has values that are not finite, or a file that can't be
            written.
    """
    config = resolve_model_type(config)
    write_config(folder, values, config, _dtype(tensors))
    if tokenizer is not None:
        tokenizer.save(folder)
    format = "pt" if config.quantization is None else "mlx"
    write_shards(folder, _decoder_file_tensors(config, tensors), shard_bytes, finite=True, format=format)


def write_config(folder: Path, values: Mapping[str, Any], config: ModelConfig, dtype: str) -> None:
    """Write config.json and generation_config.json for weights in `dtype` ("float32"); see `write` for `values`."""
    write_json(folder / "config.json", _decoder_config(values, config, dtype))
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_ids = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if token_ids:
        write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})


def write_checkpoint(folder: Path, checkpoint: WritableCheckpoint) -> None:
    """Write an open checkpoint without its tokenizer, one tensor in memory at a time; see `write`."""
    if isinstance(checkpoint, Checkpoint):
        write(folder, checkpoint.hf_config, checkpoint.config, checkpoint.tensors, None)
        return
    write_json(folder / "config.json", config_values(checkpoint))
    write_shards(folder, checkpoint.tensors, finite=True)


def config_values(checkpoint: WritableCheckpoint) -> dict[str, Any]:
    """The config.json that `write_checkpoint` writes."""
    dtype = _dtype(checkpoint.tensors)
    if isinstance(checkpoint, Checkpoint):
        return _decoder_config(checkpoint.hf_config, resolve_model_type(checkpoint.config), dtype)
    values = {name: _finite(value) for name, value in checkpoint.hf_config.items() if name not in ABOUT_FILES}
    quantization = checkpoint.quantization
    # mlx_lm and the hub read either.
    both = {} if quantization is None else {"quantization": quantization, "quantization_config": quantization}
    return {**values, "torch_dtype": dtype, "dtype": dtype, **both}


def file_tensors(checkpoint: WritableCheckpoint) -> LazyTensors:
    """The tensors that `write_checkpoint` writes."""
    if isinstance(checkpoint, Checkpoint):
        return _decoder_file_tensors(resolve_model_type(checkpoint.config), checkpoint.tensors)
    return checkpoint.tensors


def _decoder_config(values: Mapping[str, Any], config: ModelConfig, dtype: str) -> dict[str, Any]:
    same_type = values.get("model_type") == config.model_type
    own = {
        **{name: value for name, value in (values if same_type else {}).items() if name not in _REPLACED},
        **config_to_hf(config),
        "torch_dtype": dtype,  # transformers 5 reads "dtype", others the older name
        "dtype": dtype,
    }
    return with_multimodal_type(own)


def _decoder_file_tensors(config: ModelConfig, tensors: LazyTensors) -> LazyTensors:
    return to_file_weights(families.weight_mappings(config, for_mlx=config.quantization is not None), tensors)


def _finite(value: Any) -> Any:
    """Write infinity, which JSON lacks, as transformers and mlx_lm do."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def _dtype(tensors: LazyTensors) -> str:
    """The floating-point dtype with the most bytes, by PyTorch's name."""
    return next((name for name, _ in dtype_sizes(tensors.values()).most_common() if "float" in name), "float32")


def copy_tokenizer(checkpoint: AnyCheckpoint, folder: Path) -> list[str]:
    """Copy the source's tokenizer files to `folder`, or write the tokenizer of another format.

    Returns:
        A warning if the source has no tokenizer.

    Raises:
        TokenizerError: The tokenizer can't be read.
    """
    warnings = check_tokenizer(checkpoint)
    if checkpoint.format in FOLDER_FORMATS:
        root = locate(checkpoint.path).root
        for name in _FILES:
            if (root / name).is_file():
                shutil.copyfile(root / name, folder / name)  # the hub's cache has symbolic links
    elif not warnings:
        checkpoint.load_tokenizer().save(folder)
    return warnings


def check_tokenizer(checkpoint: AnyCheckpoint) -> list[str]:
    """Return a warning if the checkpoint has no tokenizer; raise TokenizerError if it has one that can't be read."""
    try:
        checkpoint.load_tokenizer()
    except MissingTokenizerError as error:
        return [f"the model has no tokenizer: {error.message}"]
    except TokenizerError as error:
        hint = "; ".join(filter(None, (error.hint, "remove the tokenizer's files to write the weights only")))
        raise TokenizerError(f"the tokenizer can't be read: {error.message}", hint) from error
    return []

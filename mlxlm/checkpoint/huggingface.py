"""Models written in Hugging Face's layout, as transformers and mlx_lm open them, quantized or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxlm import families
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.checkpoint.safetensors import SHARD_BYTES, write_shards
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf, resolve_model_type
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.json_files import write_json

# What a source's configuration says of its own files (of code among them, which doesn't come along), or of how it
# positions and quantizes: the new one decides.
_NOT_KEPT = {
    "_name_or_path", "auto_map", "custom_pipelines", "model_file", "dtype", "torch_dtype", "quantization",
    "quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "transformers_version",
}  # fmt: skip


def write(
    folder: Path,
    values: Mapping[str, Any],
    config: ModelConfig,
    tensors: LazyTensors,
    tokenizer: Tokenizer | None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write config.json, generation_config.json, the tokenizer and the weights, one tensor in memory at a time.

    `values` is the source's configuration: fields that a ModelConfig doesn't have are kept from it, as far as the
    family is the same. `tensors` are the decoder's, their dtypes are kept to the bit; where `config.quantization` is
    set the quantized ones have `.scales` (and `.biases`), and the names are those of mlx_lm's modules. `tokenizer`
    None writes none: see `carry`, which keeps a source's own files.

    `folder` exists; use it within `atomic_new_folder`, so that nothing is left of a write that failed. Raises
    CheckpointError naming the tensor that can't be read or has values that are not finite, and the file if the
    disk refuses.
    """
    config, quantized = resolve_model_type(config), config.quantization is not None
    write_config(folder, values, config, _dtype(tensors))
    if tokenizer is not None:
        tokenizer.save(folder)
    stored = to_file_weights(families.weight_mappings(config, for_mlx=quantized), tensors)
    write_shards(folder, stored, shard_bytes, finite=True, format="mlx" if quantized else "pt")


def write_config(folder: Path, values: Mapping[str, Any], config: ModelConfig, dtype: str) -> None:
    """Write config.json and generation_config.json of weights in `dtype` ("float32"). `values`: see `write`."""
    kept = values if values.get("model_type") == config.model_type else {}
    content = {
        **{name: value for name, value in kept.items() if name not in _NOT_KEPT},
        **config_to_hf(config),
        "torch_dtype": dtype,  # transformers 5 reads "dtype", others the older name
        "dtype": dtype,
    }
    write_json(folder / "config.json", content)
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    known = {name: getattr(config, name) for name in ends if getattr(config, name) is not None}
    if known:
        write_json(folder / "generation_config.json", {"_from_model_config": True, **known})


def _dtype(tensors: LazyTensors) -> str:
    """The floating-point type of most values, in PyTorch's words."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if mx.issubdtype(tensor.dtype, mx.floating):
            sizes[str(tensor.dtype).removeprefix("mlx.core.")] += tensor.nbytes
    return sizes.most_common(1)[0][0] if sizes else "float32"

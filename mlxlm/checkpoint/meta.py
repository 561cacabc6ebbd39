"""Llama in the layout of Meta's downloads: `params.json`, `consolidated.NN.pth` and `tokenizer.model`.

The files are PyTorch's. A model for several GPUs has one file for each, with a part of every matrix: rows of those that
make queries, keys, values, gates and logits, columns of those that read them
(https://github.com/meta-llama/llama3, llama/model.py). The embedding is cut by columns in Llama 2, by rows since
Llama 3. Rotary pairs are neighbors, as in llama2.c.

`params.json` doesn't have the context length, nor the factor by which Llama 3.1 and 3.2 scale their rotary positions:
they follow from the settings that differ between these models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import pytorch
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.map_weights import to_decoder_weights
from mlxlm.config.numbers import is_count
from mlxlm.families import config_from_hf
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError
from mlxlm.utils.json_files import read_json_object

_PARAMS = "params.json"
_MAX_PARAMS = 1 << 20  # bytes; known files have about 200
_FILE = re.compile(r"consolidated\.(\d{2})\.pth")
_SETTINGS = {
    "dim", "ffn_dim_multiplier", "max_batch_size", "max_seq_len", "multiple_of", "n_heads", "n_kv_heads", "n_layers",
    "norm_eps", "rope_theta", "use_scaled_rope", "vocab_size",
}  # fmt: skip
# Module in a layer of the file -> in the decoder, and the axis along which files have parts of it (None: copies).
_LAYER_MODULES: dict[str, tuple[str, int | None]] = {
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "attention_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
}
_TOP_MODULES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)")
_IGNORED = "rope.freqs"  # rotary frequencies


def consolidated_files(folder: Path) -> list[Path]:
    """The `consolidated.NN.pth` of a folder with `params.json`, in order; empty if it has another layout."""
    if not (folder / _PARAMS).is_file():
        return []
    return sorted(file for file in folder.glob("consolidated.*.pth") if _FILE.fullmatch(file.name))


def open_meta(folder: Path) -> Checkpoint:
    """Open a folder with `consolidated_files`. Only headers are read.

    Raises:
        CheckpointError, ConfigError: Names the file and the field or the tensor.
    """
    files = consolidated_files(folder)
    for i, file in enumerate(files):
        if int(file.name.split(".")[1]) != i:
            raise CheckpointError(f"{folder}: consolidated.{i:02d}.pth is missing", "all files of the model")
    source = folder / _PARAMS
    params = read_json_object(source, _MAX_PARAMS, ConfigError)
    if unknown := params.keys() - _SETTINGS:
        raise ConfigError(f"{source}: {min(unknown)} isn't a setting of Llama 1, 2 or 3", "the model in safetensors")
    for name in ("dim", "n_heads", "n_layers"):
        if not is_count(params.get(name)):
            raise ConfigError(f"{source}: {name} is {params.get(name)!r}, it must be a positive number")
    tensors = _concatenated(folder, [pytorch.file_tensors(file) for file in files], params["dim"])
    values = _hf_config(params, tensors, folder)
    config = config_from_hf(values, source=str(source))
    mappings = [WeightMapping(name, (module,)) for name, module in _TOP_MODULES.items()]
    heads = {"attention.wq": config.num_attention_heads, "attention.wk": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        for name, (module, _) in _LAYER_MODULES.items():
            target = (f"model.layers.{layer}.{module}",)
            mappings.append(WeightMapping(f"layers.{layer}.{name}", target, interleaved=heads.get(name, 0)))
    return Checkpoint(
        path=folder,
        format="meta",
        hf_config=values,
        tensors=to_decoder_weights(mappings, tensors, str(folder)),
        load_tokenizer=lambda: _load_tokenizer(folder),
        config=config,
    )


def _concatenated(folder: Path, files: Sequence[LazyTensors], dim: int) -> dict[str, LazyTensor]:
    """The tensors of all files, whole."""
    result = {}
    for name, first in files[0].items():
        if name == _IGNORED:
            continue
        parts = [file[name] for file in files if name in file]
        if len(parts) != len(files):
            raise CheckpointError(f"{folder}: tensor {name} isn't in all of the {len(files)} files", "the whole model")
        axis = _axis(name, first, len(files), dim)
        result[name] = first if axis is None else _concatenate(folder, name, parts, axis)
    return result


def _axis(name: str, part: LazyTensor, files: int, dim: int) -> int | None:
    """The axis along which files have parts of a tensor; None if each has all of it."""
    module = name.removesuffix(".weight")
    if files == 1:
        return None
    if match := _LAYER.fullmatch(module):
        return _LAYER_MODULES.get(match[2], ("", None))[1]
    if module == "tok_embeddings" and part.shape[1:] != (dim,):
        return 1
    return 0 if module in ("tok_embeddings", "output") else None


def _concatenate(folder: Path, name: str, parts: Sequence[LazyTensor], axis: int) -> LazyTensor:
    first, shapes = parts[0], {part.shape for part in parts}
    if len(first.shape) != 2 or len(shapes) != 1 or {part.dtype for part in parts} != {first.dtype}:
        raise CheckpointError(f"{folder}: tensor {name} is not a matrix of one shape and dtype in all files")
    shape = tuple(size * len(parts) if i == axis else size for i, size in enumerate(first.shape))

    def read() -> mx.array:
        return mx.concatenate([part.read() for part in parts], axis=axis)

    return replace(first, shape=shape, nbytes=sum(part.nbytes for part in parts), read=read)


def _hf_config(params: Mapping[str, Any], tensors: LazyTensors, folder: Path) -> dict[str, Any]:
    """Hugging Face's configuration. Sizes that follow from a rule are those of the tensors."""
    sizes = []
    for name in ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight"):
        if name not in tensors or len(tensors[name].shape) != 2:
            raise CheckpointError(f"{folder}: there is no matrix {name}", "all files of the model")
        sizes.append(tensors[name].shape[0])
    theta, scaled = params.get("rope_theta"), bool(params.get("use_scaled_rope"))
    llama3 = theta == 500_000
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes[0],
        "hidden_size": params["dim"],
        "intermediate_size": sizes[1],
        "num_hidden_layers": params["n_layers"],
        "num_attention_heads": params["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_theta": theta or 10_000.0,
        "max_position_embeddings": params.get("max_seq_len") or _context_length(params, llama3, scaled),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": 128_000 if llama3 else 1,
        "eos_token_id": [128_001, 128_008, 128_009] if llama3 else 2,  # ends of texts, messages and turns
    }
    if scaled:
        factor = 32.0 if params["dim"] < 4096 else 8.0  # Llama 3.2's models of 1B and 3B, and Llama 3.1
        values["rope_scaling"] = {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    return values


def _context_length(params: Mapping[str, Any], llama3: bool, scaled: bool) -> int:
    if llama3:
        return 131_072 if scaled else 8192
    if params.get("rope_theta") == 1_000_000:  # Code Llama
        return 16_384
    return 2048 if params.get("norm_eps") == 1e-6 else 4096  # Llama 1, 2


def _load_tokenizer(folder: Path) -> Tokenizer:
    """`tokenizer.model`, which is next to the folders of the models in Llama 1 and 2."""
    parent = folder.absolute().parent / "tokenizer.model"
    return load_tokenizer(parent if not (folder / parent.name).is_file() and parent.is_file() else folder)

"""llama2.c's `.bin` files in the format that run.c reads (float32, version 0 of export.py).

Format: export.py and run.c of https://github.com/karpathy/llama2.c. The shapes follow from seven numbers in the
header, so a file's size must be exactly what they say.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.llama2c.tokenizer import find_tokenizer, read_tokenizer, tokenizer_bytes
from mlxlm.checkpoint.weight_mapping import to_decoder_weights, to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import unscaled_wavelengths
from mlxlm.families import config_to_hf
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError, os_errors_as
from mlxlm.utils.files import atomic_new_files

_MAGIC = b"24ka"  # the number 0x616b3432, "ak42", in little-endian order
_HEADER = struct.Struct("<7i")
_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
}
_MAX_LAYERS = 4096  # the deepest models in use have about 130; each layer costs nine entries before one is read
_TOKENIZER = "tokenizer.bin"


def open_llama2c(path: Path | str) -> Checkpoint:
    """Open a llama2.c model; its tokenizer is a `.bin` file beside it (see `find_tokenizer`).

    Only the header is read.

    Raises:
        CheckpointError: Names the file and the field of the header, or the tensor in which a truncated file ends.
    """
    path = Path(path)
    with os_errors_as(CheckpointError, "read", path):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
    config = _read_header(path, start)
    _check_size(path, size, config)
    tensors: dict[str, LazyTensor] = {}
    offset = _HEADER.size
    for name, shape in _tensor_order(config):
        if name:
            tensors[name] = _lazy_tensor(path, name, offset, shape)
        offset += 4 * math.prod(shape)
    return Checkpoint(
        path=path,
        format="llama2.c",
        hf_config=config_to_hf(config),
        tensors=to_decoder_weights(_weight_mappings(config), tensors, str(path)),
        load_tokenizer=lambda: read_tokenizer(find_tokenizer(path, config.vocab_size), config.vocab_size),
        config=config,
    )


def check_output_path(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> bytes:
    """Check that `write` can write this model to `path`; return the content of its `tokenizer.bin`.

    Raises as `write` does.
    """
    content = tokenizer_bytes(tokenizer, config.vocab_size)
    _check_representable(config)
    if path.name == _TOKENIZER:
        raise CheckpointError(f"{path} is the name of the tokenizer file", "model.bin")
    beside = path.with_name(_TOKENIZER)
    with os_errors_as(CheckpointError, "read", beside):
        if beside.exists() and (beside.stat().st_size != len(content) or beside.read_bytes() != content):
            raise CheckpointError(f"{beside} already exists and belongs to another model", "another output folder")
    return content


def write(path: Path | str, config: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer) -> None:
    """Write a file and `tokenizer.bin` beside it, one tensor in memory at a time.

    The model file appears last. A `tokenizer.bin` that already exists stays if it is the same.

    Raises:
        ConfigError: Names a field that run.c can't represent. It computes Llama with a rotary base of 10000 and an
            epsilon of 1e-5 for every model.
        TokenizerError: run.c would encode text differently.
        CheckpointError: `path` or another `tokenizer.bin` exists, or a tensor is missing, has no place in the file
            or has values that are not finite.
    """
    path = Path(path)
    tokenizer_content = check_output_path(path, config, tokenizer)
    tensors = to_file_weights(_weight_mappings(config), tensors)
    extra = tensors.keys() - {name for name, _ in _tensor_order(config)}
    if extra:
        raise CheckpointError(f"{min(extra)} has no place in a llama2.c file")
    with atomic_new_files(path) as folder:
        (folder / _TOKENIZER).write_bytes(tokenizer_content)
        with (folder / path.name).open("wb") as file:
            sizes = {field: getattr(config, name) for field, name in _FIELDS.items()}
            sizes["vocab_size"] *= 1 if config.tie_word_embeddings else -1
            file.write(_HEADER.pack(*sizes.values()))
            for name, shape in _tensor_order(config):
                file.write(_float32_values(name, shape, tensors) if name else _rope_tables(config))


def _read_header(path: Path, start: bytes) -> ModelConfig:
    """The configuration from the first bytes of a file."""
    if start[:4] == _MAGIC:
        raise CheckpointError(f"{path} has a format that run.c doesn't read", "llama2.c's export.py --version 0")
    if len(start) < _HEADER.size:
        raise CheckpointError(f"{path} is truncated: its header has {len(start)} of {_HEADER.size} bytes")
    values = dict(zip(_FIELDS, _HEADER.unpack(start), strict=True))
    tied, values["vocab_size"] = values["vocab_size"] > 0, abs(values["vocab_size"])
    for name, value in values.items():
        if value < 1:
            raise CheckpointError(f"{path}: {name} is {value}, it must be positive", "a llama2.c model")
    if values["n_layers"] > _MAX_LAYERS:
        raise CheckpointError(f"{path}: n_layers is {values['n_layers']}, more than {_MAX_LAYERS}")
    if values["dim"] % values["n_heads"]:
        raise CheckpointError(f"{path}: dim {values['dim']} is not a multiple of n_heads {values['n_heads']}")
    try:
        return _config({_FIELDS[name]: value for name, value in values.items()}, tied)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}") from None


def _config(sizes: Mapping[str, Any], tied: bool) -> ModelConfig:
    return ModelConfig(**sizes, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)


def _tensor_order(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the decoder's names and the shapes in the order of the file; "" is the table of rotary angles."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    kv = config.num_key_value_heads * head_dim
    layer_modules = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "mlp.up_proj": (inner, hidden),
    }
    yield "model.embed_tokens.weight", (config.vocab_size, hidden)
    for module, shape in layer_modules.items():
        for i in range(config.num_hidden_layers):
            yield f"model.layers.{i}.{module}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "", (2, config.max_position_embeddings, head_dim // 2)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _weight_mappings(config: ModelConfig) -> list[WeightMapping]:
    """Queries and keys have rotary pairs in neighbouring rows."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return [
        WeightMapping(name, (name,), interleaved=n)
        for i in range(config.num_hidden_layers)
        for name, n in ((f"model.layers.{i}.self_attn.{part}", n) for part, n in heads.items())
    ]


def _check_size(path: Path, size: int, config: ModelConfig) -> None:
    end = _HEADER.size
    for name, shape in _tensor_order(config):
        end += 4 * math.prod(shape)
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: {name or 'the rotary table'} ends {end - size} bytes past the end",
                "copy or download the file again",
            )
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, its header says {end}", "a llama2.c model")


def _lazy_tensor(path: Path, name: str, offset: int, shape: tuple[int, ...]) -> LazyTensor:
    def read() -> mx.array:
        with os_errors_as(CheckpointError, "read", path):
            try:
                return mx.array(np.memmap(path, np.float32, "r", offset, shape))
            except ValueError as error:  # the file has become shorter
                raise CheckpointError(f"{path}: {name} can't be read: {error}") from None

    return LazyTensor(shape, mx.float32, "F32", 4 * math.prod(shape), read)


def _check_representable(config: ModelConfig) -> None:
    """Raise ConfigError for a field that a llama2.c file can't represent."""
    plain = _config({name: getattr(config, name) for name in _FIELDS.values()}, config.tie_word_embeddings)
    ignored = {"model_type", "layer_types", "pad_token_id"}  # layer_types has a meaning with sliding_window only
    for field in fields(ModelConfig):
        value, expected = getattr(config, field.name), getattr(plain, field.name)
        if field.name in ignored or value == expected or (not value and not expected):
            continue
        if value is None and field.name in ("bos_token_id", "eos_token_id"):
            continue
        raise ConfigError(
            f"{field.name} is {value!r}, but llama2.c always uses {expected!r}", "a GGUF file or a folder as output"
        )


def _rope_tables(config: ModelConfig) -> bytes:
    """Cosines of all positions, then sines, float32 `[max_position_embeddings, D/2]` each.

    run.c skips them and computes its own; programs derived from its first version read them.
    """
    frequencies = 1 / np.array(unscaled_wavelengths(config.rope_theta, config.head_dim))
    angles = np.outer(np.arange(config.max_position_embeddings), frequencies)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32).tobytes()


def _float32_values(name: str, shape: tuple[int, ...], tensors: LazyTensors) -> memoryview:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{name} is missing")
    if tensor.shape != shape:
        raise CheckpointError(f"{name} is {list(tensor.shape)}, the configuration says {list(shape)}")
    value = tensor.read().astype(mx.float32)
    if not mx.isfinite(value).all().item():
        raise CheckpointError(f"{name} has values that are not finite", "an undamaged checkpoint")
    return np.ascontiguousarray(np.asarray(value)).data

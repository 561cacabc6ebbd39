"""llama2.c's `.bin` files: version 0 (legacy), 1 (float32) and 2 (int8 in groups) read, version 0 written.

Format: export.py and run.c of https://github.com/karpathy/llama2.c. The shapes follow from seven numbers in the
header, so that a file's size must be exactly what they say.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.llama2c_rope import rope_tables
from mlxlm.checkpoint.llama2c_tokenizer import find_tokenizer, read_tokenizer, tokenizer_bytes
from mlxlm.checkpoint.weight_mapping import to_decoder_weights, to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf
from mlxlm.families.weight_mapping import WeightMapping
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError, os_errors_as
from mlxlm.utils.files import atomic_new_files

_MAGIC = b"24ka"  # the number 0x616b3432, "ak42", in little-endian order
_NUMBERS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
_HEADER = 256  # bytes, versions 1 and 2
_LEGACY_HEADER = 28
_MOST_LAYERS = 4096  # the deepest models in use have about 130; each layer costs nine entries before one is read
_TOKENIZER = "tokenizer.bin"


@dataclass(frozen=True)
class _Header:
    """What the first bytes of a file say. `group_size` is of version 2, else 0."""

    version: int
    config: ModelConfig
    group_size: int

    @property
    def start(self) -> int:
        """Where the first tensor lies."""
        return _HEADER if self.version else _LEGACY_HEADER


def open_llama2c(path: Path | str) -> Checkpoint:
    """A llama2.c model; its tokenizer is a `.bin` file beside it (see `find_tokenizer`).

    Reads the header only. Raises CheckpointError naming the file and the field of the header, or the tensor in
    which a truncated file ends.
    """
    path = Path(path)
    with os_errors_as(CheckpointError, "read", path):
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(_HEADER)
    header = _header(path, start)
    config = header.config
    _check_size(path, size, header)
    stored: dict[str, LazyTensor] = {}
    offset = header.start
    for name, shape in _order(config, header.version):
        nbytes = _nbytes(shape, header.group_size)
        if name:
            stored[name] = _tensor(path, name, offset, shape, nbytes, header.group_size)
        offset += nbytes
    return Checkpoint(
        path=path,
        format="llama2.c",
        hf_config=config_to_hf(config),
        config=config,
        tensors=to_decoder_weights(_layout(config), stored, str(path)),
        load_tokenizer=lambda: read_tokenizer(find_tokenizer(path, config.vocab_size), config.vocab_size),
    )


def check_output_path(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> bytes:
    """Whether such a model can be at `path`: the content of its tokenizer.bin, or the errors of `write`."""
    words = tokenizer_bytes(tokenizer, config.vocab_size)
    _check_plain(config)
    if path.name == _TOKENIZER:
        raise CheckpointError(f"{path} is the name of the tokenizer", "model.bin")
    beside = path.with_name(_TOKENIZER)
    with os_errors_as(CheckpointError, "read", beside):
        if beside.exists() and (beside.stat().st_size != len(words) or beside.read_bytes() != words):
            raise CheckpointError(f"{beside} is there already, of another model", "an output in another folder")
    return words


def write(path: Path | str, config: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer) -> None:
    """Write a version 0 file in float32 and `tokenizer.bin` beside it, one tensor in memory at a time.

    run.c computes Llama with rotary base 10000 and epsilon 1e-5, whatever a model wants: ConfigError names the
    field of any other configuration. TokenizerError if run.c would encode text in another way. CheckpointError
    if `path` exists, if a tensor is missing, has no place in the file or has values that are not numbers.

    A `tokenizer.bin` that is there already stays if it is the same, and is an error if it is another. The model
    appears last, so that where it is, all is there.
    """
    path = Path(path)
    words = check_output_path(path, config, tokenizer)
    stored = to_file_weights(_layout(config), tensors)
    extra = stored.keys() - {name for name, _ in _order(config, version=0)}
    if extra:
        raise CheckpointError(f"{min(extra)} has no place in a llama2.c file")
    with atomic_new_files(path) as folder:
        (folder / _TOKENIZER).write_bytes(words)
        with (folder / path.name).open("wb") as file:
            file.write(_legacy_header(config))
            for name, shape in _order(config, version=0):
                if name:
                    file.write(_float32(name, shape, stored))
                else:
                    for rows in rope_tables(config):
                        file.write(rows)


def _header(path: Path, start: bytes) -> _Header:
    version = 0
    shared = True
    group_size = 0
    numbers_at = 0
    if start[:4] == _MAGIC:
        if len(start) < _HEADER:
            raise CheckpointError(f"{path} is truncated: its header has {len(start)} of {_HEADER} bytes")
        (version,) = struct.unpack_from("<i", start, 4)
        if version not in (1, 2):
            raise CheckpointError(f"{path}: version is {version}, it must be 1 or 2")
        numbers_at = 8
        if start[36] > 1:
            raise CheckpointError(f"{path}: shared_classifier is {start[36]}, it must be 0 or 1")
        shared = start[36] == 1
        if version == 2:
            (group_size,) = struct.unpack_from("<i", start, 37)
            if group_size < 1:
                raise CheckpointError(f"{path}: group_size is {group_size}, it must be a positive number")
    elif len(start) < _LEGACY_HEADER:
        raise CheckpointError(f"{path} is truncated: its header has {len(start)} of {_LEGACY_HEADER} bytes")
    values = dict(zip(_NUMBERS, struct.unpack_from("<7i", start, numbers_at), strict=True))
    if version == 0:
        shared = values["vocab_size"] > 0
        values["vocab_size"] = abs(values["vocab_size"])
    return _Header(version, _config(path, values, shared), group_size)


def _config(path: Path, values: dict[str, int], shared: bool) -> ModelConfig:
    for name, value in values.items():
        if value < 1:
            raise CheckpointError(f"{path}: {name} is {value}, it must be positive", "a llama2.c model")
    if values["n_layers"] > _MOST_LAYERS:
        raise CheckpointError(f"{path}: n_layers is {values['n_layers']}, more than {_MOST_LAYERS}")
    if values["dim"] % values["n_heads"]:
        raise CheckpointError(f"{path}: dim {values['dim']} is no multiple of n_heads {values['n_heads']}")
    try:
        return ModelConfig(
            hidden_size=values["dim"],
            intermediate_size=values["hidden_dim"],
            num_hidden_layers=values["n_layers"],
            num_attention_heads=values["n_heads"],
            num_key_value_heads=values["n_kv_heads"],
            vocab_size=values["vocab_size"],
            max_position_embeddings=values["max_seq_len"],
            tie_word_embeddings=shared,
            bos_token_id=1,
            eos_token_id=2,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error.message}") from None


def _order(config: ModelConfig, version: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the order of the file, under the decoder's names; "" is to be skipped."""
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_dim
    kv = config.num_key_value_heads * head

    def layers(part: str, *shape: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for i in range(config.num_hidden_layers):
            yield f"model.layers.{i}.{part}.weight", shape

    embedding = ("model.embed_tokens.weight", (config.vocab_size, hidden))
    norm = ("model.norm.weight", (hidden,))
    if version == 0:
        yield embedding
        yield from layers("input_layernorm", hidden)
    else:
        yield from layers("input_layernorm", hidden)
        yield from layers("post_attention_layernorm", hidden)
        yield norm
        yield embedding
    yield from layers("self_attn.q_proj", hidden, hidden)
    yield from layers("self_attn.k_proj", kv, hidden)
    yield from layers("self_attn.v_proj", kv, hidden)
    yield from layers("self_attn.o_proj", hidden, hidden)
    if version == 0:
        yield from layers("post_attention_layernorm", hidden)
    yield from layers("mlp.gate_proj", wide, hidden)
    yield from layers("mlp.down_proj", hidden, wide)
    yield from layers("mlp.up_proj", wide, hidden)
    if version == 0:
        yield norm
        yield "", (2, config.max_position_embeddings, head // 2)  # cosines and sines, which run.c computes itself
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, hidden)


def _layout(config: ModelConfig) -> list[WeightMapping]:
    """Queries and keys have rotary pairs in neighbouring rows."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return [
        WeightMapping(name, (name,), interleaved=n)
        for i in range(config.num_hidden_layers)
        for name, n in ((f"model.layers.{i}.self_attn.{part}", n) for part, n in heads.items())
    ]


def _nbytes(shape: tuple[int, ...], group_size: int) -> int:
    """Bytes of a tensor: float32, or in groups int8 with a float32 scale for each."""
    count = math.prod(shape)
    grouped = group_size and len(shape) == 2
    return count + 4 * (count // group_size) if grouped else 4 * count


def _check_size(path: Path, size: int, header: _Header) -> None:
    end = header.start
    for name, shape in _order(header.config, header.version):
        if header.group_size and len(shape) == 2 and math.prod(shape) % header.group_size:
            raise CheckpointError(
                f"{path}: group_size is {header.group_size}, {name} has {math.prod(shape)} values, which is no multiple"
            )
        end += _nbytes(shape, header.group_size)
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: {name or 'its rotary table'} ends {end - size} bytes past the end, "
                "if its header is right",
                "copy or download the file again",
            )
    if end != size:
        raise CheckpointError(f"{path} is {size} bytes long, by its header it has {end}", "a llama2.c model")


def _tensor(path: Path, name: str, offset: int, shape: tuple[int, ...], nbytes: int, group_size: int) -> LazyTensor:
    count = math.prod(shape)
    if not group_size or len(shape) == 1:
        return LazyTensor(
            shape, mx.float32, "F32", nbytes, lambda: mx.array(_mapped(path, name, np.float32, offset, shape))
        )

    def read() -> mx.array:
        values = mx.array(_mapped(path, name, np.int8, offset, (count // group_size, group_size)))
        scales = mx.array(_mapped(path, name, np.float32, offset + count, (count // group_size, 1)))
        return (values * scales).reshape(shape)  # int8 · float32 is float32

    return LazyTensor(shape, mx.float32, f"Q8 (groups of {group_size})", nbytes, read)


def _mapped(path: Path, name: str, dtype: type, offset: int, shape: tuple[int, ...]) -> np.ndarray:
    with os_errors_as(CheckpointError, "read", path):
        try:
            mapped = np.memmap(path, dtype, "r", offset, shape)
        except ValueError as error:  # the file has become shorter
            raise CheckpointError(f"{path}: {name} can't be read: {error}") from None
    return np.require(mapped, requirements="A")  # scales may begin anywhere


def _check_plain(config: ModelConfig) -> None:
    """Raises ConfigError for a field that a llama2.c file can't say."""
    plain = ModelConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
    )
    free = {"model_type", "layer_types", "pad_token_id"}  # a layer's type has a meaning with sliding_window only
    for field in fields(ModelConfig):
        found, wanted = getattr(config, field.name), getattr(plain, field.name)
        if field.name in free or found == wanted or not found and not wanted:
            continue
        if found is None and field.name in ("bos_token_id", "eos_token_id"):
            continue
        raise ConfigError(
            f"{field.name} is {found!r}, a llama2.c file can only mean {wanted!r}", "GGUF, or a folder as output"
        )


def _legacy_header(config: ModelConfig) -> bytes:
    return struct.pack(
        "<7i", config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads,
        config.num_key_value_heads, config.vocab_size if config.tie_word_embeddings else -config.vocab_size,
        config.max_position_embeddings,
    )  # fmt: skip


def _float32(name: str, shape: tuple[int, ...], tensors: LazyTensors) -> np.ndarray:
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{name} is missing")
    if tensor.shape != shape:
        raise CheckpointError(f"{name} is {list(tensor.shape)}, the configuration says {list(shape)}")
    value = tensor.read().astype(mx.float32)
    if not mx.isfinite(value).all().item():
        raise CheckpointError(f"{name} has values that are not finite numbers", "a checkpoint that is not broken")
    return np.ascontiguousarray(np.asarray(value))

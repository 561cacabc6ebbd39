"""GGUF files written: header, then one tensor after another, a few rows of it in memory."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.architectures import Architecture
from mlxlm.checkpoint.gguf.config_to_gguf import (
    ARRAY,
    BOOL,
    FLOAT,
    INT,
    STRING,
    architecture_for,
    compatibility_notes,
    config_metadata,
)
from mlxlm.checkpoint.gguf.ggml_types import GGML_TYPE_NUMBERS, GGML_TYPES
from mlxlm.checkpoint.gguf.rope import FACTORS, LONG, SHORT, llama3_factors
from mlxlm.checkpoint.gguf.tensors import encode_tensor
from mlxlm.checkpoint.gguf.tokenizer_to_gguf import tokenizer_metadata
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, lazy_tensor
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_file

OUTTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # llama_ftype in llama.h
_ALIGNMENT = 32
_FORMATS = {INT: "<I", 5: "<i", FLOAT: "<f", BOOL: "<?"}


@dataclass(frozen=True)
class WriteResult:
    """What became of a model. `others`: matrices that are not of the file's kind, and their types. `notes`: where
    llama.cpp does otherwise than the source; `tokens_may_differ`: by some of them it cuts some texts into other tokens."""

    others: Mapping[str, str]
    notes: tuple[str, ...]
    tokens_may_differ: bool


def write(
    path: Path | str, config: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer | None, kind: str = "F16"
) -> WriteResult:
    """Write a model that llama.cpp runs. `tensors` are the decoder's, not quantized; `kind` is one of KINDS.

    Vectors and tables of positions are in F32, as llama.cpp wants them. A matrix whose rows 32 doesn't divide can't
    be quantized and stays in F16. In a Q4_0 file the output head (the embedding, where they are one) is in Q8_0:
    each of its errors is an error of a logit, which is why llama.cpp's own quantizer gives it 6 bits (Q6_K) there.

    Raises CheckpointError or TokenizerError for what llama.cpp can't run, an existing `path`, and weights that are
    NaN; nothing is left at `path` then.
    """
    if kind not in OUTTYPES:
        raise CheckpointError(f"there is no kind of GGUF file {kind!r} to write", f"one of {', '.join(OUTTYPES)}")
    architecture = architecture_for(config)
    if any(name.endswith(".scales") for name in tensors):
        raise CheckpointError("quantized weights can't go to a GGUF file as they are", "the weights in 16 or 32 bits")
    stored = _stored(config, architecture, tensors)
    types = {name: _type_of(name, tensor, kind, config) for name, tensor in stored.items()}
    words, notes = tokenizer_metadata(tokenizer, config)
    metadata = {
        "general.architecture": (STRING, architecture.name),
        "general.type": (STRING, "model"),
        "general.name": (STRING, _title(Path(path).stem)),
        "general.file_type": (INT, _FILE_TYPES[kind]),
        "general.quantization_version": (INT, 2),
        **config_metadata(config, architecture),
        **words,
    }
    with atomic_new_file(path) as file:
        _write_header(file, metadata, stored, types)
        for name, tensor in stored.items():
            for chunk in encode_tensor(name, tensor, types[name]):
                file.write(chunk)
            _pad(file)
            mx.clear_cache()  # else MLX keeps up to a quarter of all memory in buffers of other sizes
    others = {n: types[n] for n, t in stored.items() if len(t.shape) > 1 and types[n] != kind and not _is_positions(n)}
    return WriteResult(others, (*compatibility_notes(config, architecture), *notes), tokens_may_differ=bool(notes))


def _title(name: str) -> str:
    """A model's name without what llama.cpp acts on: for a name with "phi3" or "phi-3" it asks for Phi-3's special
    tokens and strips spaces after them, for "modern-bert" for [MASK] (llama-vocab.cpp, any case)."""
    for words in (r"(phi)-?(3)", r"(modern)-(bert)"):
        name = re.sub(words, r"\1 \2", name, flags=re.IGNORECASE)
    return name.encode("utf-8", "replace").decode("utf-8")  # file names can have bytes that are no text


def _stored(config: ModelConfig, architecture: Architecture, tensors: LazyTensors) -> dict[str, LazyTensor]:
    """The file's tensors out of the decoder's."""
    if config.tie_word_embeddings and not architecture.ties_head:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    stored = to_file_weights(architecture.weight_mappings(config), tensors)
    if architecture.norm_offset:
        stored = {name: _plus_one(t) if name.endswith("norm.weight") else t for name, t in stored.items()}
    scaling = config.rope_scaling or {"rope_type": "default"}
    tables = {}
    if scaling["rope_type"] == "llama3":
        tables = {FACTORS: llama3_factors(scaling, config.rope_theta, config.head_dim)}
    elif scaling["rope_type"] == "longrope":
        tables = {LONG: scaling["long_factor"], SHORT: scaling["short_factor"]}
    return {**{name: lazy_tensor(mx.array(values)) for name, values in tables.items()}, **stored}


def _plus_one(tensor: LazyTensor) -> LazyTensor:
    return tensor.astype(mx.float32).transform(lambda value: value + 1)


def _is_positions(name: str) -> bool:
    return name == "position_embd.weight"


def _type_of(name: str, tensor: LazyTensor, kind: str, config: ModelConfig) -> str:
    if len(tensor.shape) == 1 or _is_positions(name):
        return "F32"
    if GGML_TYPES[GGML_TYPE_NUMBERS[kind]].block > 1 and tensor.shape[-1] % 32:
        return "F16"
    is_head = name == ("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    return "Q8_0" if kind == "Q4_0" and is_head else kind


def _write_header(
    file: BinaryIO, metadata: Mapping[str, tuple[int, Any]], stored: LazyTensors, types: Mapping[str, str]
) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(stored), len(metadata)))
    for key, (kind, value) in metadata.items():
        try:
            file.write(_text(key) + struct.pack("<I", kind) + _value(kind, value))
        except (struct.error, OverflowError):
            raise CheckpointError(f"{key} is {value}, which a GGUF file has no number for") from None
    offset = 0
    for name, tensor in stored.items():
        number = GGML_TYPE_NUMBERS[types[name]]
        shape = tensor.shape[::-1]
        file.write(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset))
        nbytes = math.prod(shape) // GGML_TYPES[number].block * GGML_TYPES[number].bytes
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    _pad(file)


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(_value(element, v) for v in values)
    return struct.pack(_FORMATS[kind], value)


def _text(value: str) -> bytes:
    content = value.encode("utf-8")
    return struct.pack("<Q", len(content)) + content


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))

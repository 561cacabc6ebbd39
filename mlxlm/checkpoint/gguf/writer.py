"""Write GGUF files: the header, then one tensor after another, a few rows in memory at a time."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.architecture import Architecture
from mlxlm.checkpoint.gguf.config_to_gguf import architecture_for, compatibility_notes, config_metadata
from mlxlm.checkpoint.gguf.ggml_types import ggml_type
from mlxlm.checkpoint.gguf.rope import rope_tensors
from mlxlm.checkpoint.gguf.tensors import encode_tensor
from mlxlm.checkpoint.gguf.tokenizer_to_gguf import tokenizer_metadata
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_file

OUTTYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}  # llama_ftype in llama.h
_POSITIONS = "position_embd.weight"


@dataclass(frozen=True)
class WriteResult:
    """What `write` wrote.

    Attributes:
        other_types: Matrices that are not of the requested type, and their types.
        notes: Where llama.cpp computes something else than the source.
        tokens_may_differ: Whether a note is about the tokenizer, so that some texts get other token ids.
    """

    other_types: Mapping[str, str]
    notes: tuple[str, ...]
    tokens_may_differ: bool


def write(
    path: Path | str, config: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer | None, outtype: str = "F16"
) -> WriteResult:
    """Write a model that llama.cpp runs.

    Vectors and position embeddings are F32, which llama.cpp requires. A matrix whose rows are not a multiple of 32
    can't be quantized and is F16. In a Q4_0 file the output head (the embedding, where they are tied) is Q8_0: its
    errors are errors of the logits, which is why llama.cpp's quantizer also gives it more bits (Q6_K).

    Args:
        path: The new file.
        config: The model's configuration.
        tensors: The decoder's tensors, not quantized.
        tokenizer: None writes a file without a tokenizer.
        outtype: One of OUTTYPES.

    Raises:
        CheckpointError: llama.cpp can't run the model, `path` exists, or a weight is NaN or infinite. Nothing is left
            at `path`.
        TokenizerError: llama.cpp can't run the tokenizer.
    """
    if outtype not in OUTTYPES:
        raise CheckpointError(f"unknown GGUF type {outtype!r}", f"one of {', '.join(OUTTYPES)}")
    architecture = architecture_for(config)
    if any(name.endswith(".scales") for name in tensors):
        raise CheckpointError("quantized weights can't be written to a GGUF file", "the weights in 16 or 32 bits")
    file_tensors = _file_tensors(config, architecture, tensors)
    types = {name: _tensor_type(name, tensor, outtype, config) for name, tensor in file_tensors.items()}
    tokenizer_values, tokenizer_notes = tokenizer_metadata(tokenizer, config)
    metadata = {
        "general.type": "model",
        "general.name": _model_name(Path(path).stem),
        "general.file_type": _FILE_TYPES[outtype],
        "general.quantization_version": 2,
        **config_metadata(config, architecture),
        **tokenizer_values,
    }
    with atomic_new_file(path) as file:
        write_header(file, architecture.name, metadata, file_tensors, types)
        for name, tensor in file_tensors.items():
            for chunk in encode_tensor(name, tensor, types[name]):
                file.write(chunk)
            _write_padding(file)
            mx.clear_cache()  # otherwise MLX keeps up to a quarter of the memory in buffers of other sizes
    matrices = [name for name, tensor in file_tensors.items() if len(tensor.shape) > 1 and name != _POSITIONS]
    other_types = {name: types[name] for name in matrices if types[name] != outtype}
    notes = (*compatibility_notes(config, architecture), *tokenizer_notes)
    return WriteResult(other_types, notes, tokens_may_differ=bool(tokenizer_notes))


def _model_name(name: str) -> str:
    """A name that llama.cpp doesn't act on.

    For a name with "phi3" or "phi-3" it looks for Phi-3's special tokens and strips spaces after them, for
    "modern-bert" it looks for [MASK] (llama-vocab.cpp, any case).
    """
    for pattern in (r"(phi)-?(3)", r"(modern)-(bert)"):
        name = re.sub(pattern, r"\1 \2", name, flags=re.IGNORECASE)
    return name.encode("utf-8", "replace").decode("utf-8")  # file names can have bytes that are not UTF-8


def _file_tensors(config: ModelConfig, architecture: Architecture, tensors: LazyTensors) -> dict[str, LazyTensor]:
    if config.tie_word_embeddings and not architecture.ties_head:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    result = to_file_weights(architecture.weight_mappings(config), tensors)
    if architecture.norm_offset:
        result = {name: _plus_one(t) if name.endswith("norm.weight") else t for name, t in result.items()}
    return {**rope_tensors(config), **result}


def _plus_one(tensor: LazyTensor) -> LazyTensor:
    return tensor.astype(mx.float32).transform(lambda value: value + 1)


def _tensor_type(name: str, tensor: LazyTensor, outtype: str, config: ModelConfig) -> str:
    if len(tensor.shape) == 1 or name == _POSITIONS:
        return "F32"
    if tensor.shape[-1] % ggml_type(outtype).block_size:
        return "F16"
    is_head = name == ("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    return "Q8_0" if outtype == "Q4_0" and is_head else outtype


def write_header(
    file: BinaryIO, architecture: str, metadata: Mapping[str, Any], tensors: LazyTensors, types: Mapping[str, str]
) -> None:
    """Write metadata and the table of tensors, padded to where the data begin.

    Args:
        file: An empty binary file.
        architecture: The value of `general.architecture`.
        metadata: Strings, bools, floats (written as float32), ints (uint32), and lists of strings, floats or ints
            (int32).
        tensors: By name, in the order of the data.
        types: The type of each tensor ("Q8_0").

    Raises:
        CheckpointError: Names a key with a number that GGUF can't represent.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.gguf_writer import WriterState

    writer = GGUFWriter(None, architecture)
    value_types = {str: GGUFValueType.STRING, bool: GGUFValueType.BOOL, float: GGUFValueType.FLOAT32}
    formats = {float: "<f", int: "<I"}
    for key, value in metadata.items():
        if isinstance(value, list):
            item_type = value_types.get(type(value[0]), GGUFValueType.INT32)
            writer.add_key_value(key, value, GGUFValueType.ARRAY, item_type)
            continue
        try:
            if type(value) in formats:
                struct.pack(formats[type(value)], value)
        except (struct.error, OverflowError):
            raise CheckpointError(f"{key} is {value}, which GGUF can't represent in 32 bits") from None
        writer.add_key_value(key, value, value_types.get(type(value), GGUFValueType.UINT32))
    for name, tensor in tensors.items():
        nbytes = ggml_type(types[name]).nbytes(tensor.shape)
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), nbytes, GGMLQuantizationType[types[name]])
    writer.fout, writer.state = [file], WriterState.EMPTY  # type: ignore[list-item]  # instead of a file that it opens
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    _write_padding(file)


def _write_padding(file: BinaryIO) -> None:
    from gguf.constants import GGUF_DEFAULT_ALIGNMENT

    file.write(bytes(-file.tell() % GGUF_DEFAULT_ALIGNMENT))

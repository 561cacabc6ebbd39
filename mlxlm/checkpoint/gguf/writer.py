"""Write GGUF files: the header, then one tensor after another, a few rows in memory at a time."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.architecture import SIZES, Architecture
from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES
from mlxlm.checkpoint.gguf.header import ggml_type
from mlxlm.checkpoint.gguf.k_quants import K_QUANTS, USE_IMPORTANCE
from mlxlm.checkpoint.gguf.rope_metadata import rope_metadata, rope_problems, rope_tensors, rope_type
from mlxlm.checkpoint.gguf.tensors import encode_tensor, mxfp4_blocks
from mlxlm.checkpoint.gguf.tokenizer_metadata import tokenizer_metadata
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, lazy_tensor
from mlxlm.checkpoint.map_weights import to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import gets_more_bits
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError

# Number in llama.cpp's llama_ftype, and the type of most matrices.
_FILE_TYPES = {
    "F32": (0, "F32"), "F16": (1, "F16"), "BF16": (32, "BF16"), "Q8_0": (7, "Q8_0"), "Q6_K": (18, "Q6_K"),
    "Q5_K_M": (17, "Q5_K"), "Q4_K_M": (15, "Q4_K"), "Q4_0": (2, "Q4_0"), "MXFP4": (38, "MXFP4"),
    "Q3_K_M": (12, "Q3_K"), "Q2_K": (10, "Q2_K"),
}  # fmt: skip
OUTTYPES = tuple(_FILE_TYPES)
# Instead of K-quants, for matrices whose rows are not a multiple of 256.
_SMALLER_BLOCKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
IMPORTANCE_OUTTYPES = tuple(name for name, (_, kind) in _FILE_TYPES.items() if kind in USE_IMPORTANCE)
_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")
_POSITIONS = "position_embd.weight"
# Besides vectors, biases and positions.
_FLOAT32 = (
    "ffn_gate_inp.weight", "ssm_conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d", "_norm.weight",
)  # fmt: skip


@dataclass(frozen=True)
class WriteResult:
    """What a writer wrote.

    Attributes:
        warnings: Where llama.cpp computes something else than the source, or what is missing.
        other_types: Matrices that are not of the requested type, and their types.
        outtype: The requested type of a GGUF file's matrices.
    """

    warnings: list[str] = field(default_factory=list)
    other_types: Mapping[str, str] = field(default_factory=dict)
    outtype: str | None = None


def write(
    path: Path,
    config: ModelConfig,
    tensors: LazyTensors,
    tokenizer: Tokenizer | None,
    outtype: str = "F16",
    importance: Mapping[str, np.ndarray] | None = None,
    mxfp4: Mapping[str, tuple[LazyTensor, LazyTensor]] | None = None,
) -> WriteResult:
    """Write a model that llama.cpp runs.

    Vectors and position embeddings are F32, which llama.cpp requires. A matrix whose rows are not a multiple of 32
    can't be quantized and is F16. In a Q4_0 file the output head (the embedding, where they are tied) is Q8_0: its
    errors are errors of the logits, which is why llama.cpp's quantizer also gives it more bits (Q6_K). The types and
    bytes of a K-quant file are those of llama.cpp's quantizer, without its exceptions for Falcon and the largest Llama.
    In an MXFP4 file all but the experts are Q8_0, as there.

    Args:
        path: The file; use `atomic_new_files`, so that a failed write leaves nothing.
        config: The model's configuration.
        tensors: The decoder's tensors, not quantized.
        tokenizer: None writes a file without a tokenizer.
        outtype: One of OUTTYPES.
        importance: Module of a matrix -> the mean square of the input of each column, `[width]` or for experts
            `[experts, width]`: llama.cpp's importance matrix. For the types in IMPORTANCE_OUTTYPES.
        mxfp4: Module of experts -> weights and scales in MLX's format, which are written as they are.

    Raises:
        CheckpointError: llama.cpp can't run the model, or a weight is NaN or infinite.
        TokenizerError: llama.cpp can't run the tokenizer.
    """
    architecture = architecture_for(config)
    file_tensors = _file_tensors(config, architecture, tensors)
    positions = _positions(file_tensors)
    types = {
        name: _tensor_type(name, tensor, outtype, config, positions[name], bool(importance))
        for name, tensor in file_tensors.items()
    }
    modules = {f"{mapping.name}.weight": mapping.modules[0] for mapping in architecture.weight_mappings(config)}
    columns = _file_importance(config, architecture, tensors, importance or {})
    packed = {name: mxfp4[module] for name, module in modules.items() if module in mxfp4} if mxfp4 else {}
    types |= dict.fromkeys(packed, "MXFP4")
    if outtype == "MXFP4" and outtype not in types.values():
        raise CheckpointError("MXFP4 is for experts, and this model has none", "Q4_K_M")
    tokenizer_values, tokenizer_notes = tokenizer_metadata(tokenizer, config)
    metadata = {
        "general.type": "model",
        "general.name": _model_name(path.stem),
        "general.file_type": _FILE_TYPES[outtype][0],
        "general.quantization_version": 2,
        **config_metadata(config, architecture),
        **tokenizer_values,
    }
    with path.open("wb") as file:
        write_header(file, architecture.name, metadata, file_tensors, types)
        for name, tensor in file_tensors.items():
            if name in packed:
                file.write(mxfp4_blocks(*(part.read() for part in packed[name])))
            else:
                for chunk in encode_tensor(name, tensor, types[name], columns.get(modules.get(name, name))):
                    file.write(chunk)
            _write_padding(file)
            mx.clear_cache()  # otherwise MLX keeps up to a quarter of the memory in buffers of other sizes
    matrices = [name for name, tensor in file_tensors.items() if not _stays_float32(name, tensor)]
    other_types = {name: types[name] for name in matrices if types[name] != _FILE_TYPES[outtype][1]}
    warnings = [*compatibility_notes(config, architecture), *tokenizer_notes]
    return WriteResult(warnings, other_types, outtype)


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
    tensors = architecture.reorder(config, tensors, True)
    result = to_file_weights(architecture.weight_mappings(config), tensors)
    return {**rope_tensors(config), **architecture.to_file(result, config)}


def _file_importance(
    config: ModelConfig, architecture: Architecture, tensors: LazyTensors, importance: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Importance weights with the columns in the order of a file, by module of the decoder."""
    rows = {}
    for module, columns in importance.items():
        name = f"{module}.weight"
        rows[name] = lazy_tensor(mx.broadcast_to(mx.array(columns)[..., None, :], tensors[name].shape))
    reordered = architecture.reorder(config, rows, True)
    return {name.removesuffix(".weight"): np.array(value.read()[..., 0, :]) for name, value in reordered.items()}


def _stays_float32(name: str, tensor: LazyTensor) -> bool:
    """Whether llama.cpp's converter writes float32 whatever the type of the matrices."""
    return len(tensor.shape) == 1 or name == _POSITIONS or name.endswith((".bias", *_FLOAT32))


def _tensor_type(
    name: str,
    tensor: LazyTensor,
    outtype: str,
    config: ModelConfig,
    position: tuple[int, int],
    has_importance: bool,
) -> str:
    if _stays_float32(name, tensor):
        return "F32"
    kind, width = _FILE_TYPES[outtype][1], tensor.shape[-1]
    is_head = name == ("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    if kind in K_QUANTS:
        kind = "Q6_K" if is_head else _mixed_type(name, outtype, config, position)
        kind = kind if width % ggml_type(kind).block_size == 0 else _SMALLER_BLOCKS[kind]
    elif outtype == "MXFP4" and "_exps." not in name or outtype == "Q4_0" and is_head:
        kind = "Q8_0"
    elif outtype == "Q4_0" and has_importance and "ffn_down" in name and position[0] < position[1] // 8:
        kind = "Q4_1"
    return kind if width % ggml_type(kind).block_size == 0 else "F16"


def _positions(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The layer of each tensor and the number of layers; of the values' projections, only layers with one count."""
    layers = {name: int(name.split(".")[1]) if name.startswith("blk.") else 0 for name in names}
    positions = {name: (layer, 1 + max(layers.values())) for name, layer in layers.items()}
    values = sorted(
        (n for n in layers if n.endswith(".weight") and n.split(".")[-2] in _VALUES), key=layers.__getitem__
    )
    return positions | {name: (index, len(values)) for index, name in enumerate(values)}


def _mixed_type(name: str, outtype: str, config: ModelConfig, position: tuple[int, int]) -> str:
    """The type of a matrix in a K-quant file, except for the head (`llama_tensor_get_type_impl`)."""
    kind, part = _FILE_TYPES[outtype][1], name.split(".")[-2]
    layer, layers = position
    has_more = outtype in ("Q4_K_M", "Q5_K_M") and gets_more_bits(layer, layers)
    if config.num_experts == 8 and part in ("attn_k", *_VALUES):
        return "Q8_0"
    if part in _VALUES:
        grouped = config.num_attention_heads // config.num_key_value_heads >= 4
        fewer = {"Q2_K": "Q4_K" if grouped else "Q3_K", "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K"}
    elif part.startswith("ffn_down"):
        fewer = {"Q2_K": "Q3_K", "Q3_K_M": "Q5_K" if layer < layers // 16 else "Q4_K"}
    elif part == "attn_output":
        fewer, has_more = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K"}, False
        if config.num_experts == 8:
            fewer = dict.fromkeys(("Q2_K", "Q3_K_M", "Q4_K_M"), "Q5_K")
    else:
        return kind
    return fewer.get(outtype, "Q6_K" if has_more else kind)


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


def architecture_for(config: ModelConfig) -> Architecture:
    """llama.cpp's architecture for a model.

    Raises:
        CheckpointError: llama.cpp has no such model, or doesn't implement a field, which is named.
    """
    problem = None
    for architecture in ARCHITECTURES.values():
        if config.model_type in architecture.families:
            problem = next(_problems(config, architecture), None)
            if problem is None:
                return architecture
    if problem is not None:
        message = f"this {config.model_type} model can't be written as GGUF for llama.cpp: {problem}"
        raise CheckpointError(message, "a folder as output")
    families = ", ".join(family for architecture in ARCHITECTURES.values() for family in architecture.families)
    raise CheckpointError(f"llama.cpp has no {config.model_type} models", f"a model of one of {families}")


def _problems(config: ModelConfig, architecture: Architecture) -> Iterator[str]:
    if config.hidden_act not in architecture.activations:
        yield f"hidden_act is {config.hidden_act!r}, its {architecture.name} has {architecture.activations[0]}"
    is_free = architecture.free_head_dim or config.kv_lora_rank is not None
    if not is_free and config.num_attention_heads * config.head_dim != config.hidden_size:
        yield f"num_attention_heads · head_dim is not hidden_size ({config.hidden_size})"
    out_bias = config.attention_bias if config.attention_out_bias is None else config.attention_out_bias
    biases = {"attention_bias": config.attention_bias, "attention_out_bias": out_bias, "mlp_bias": config.mlp_bias}
    for name, value in biases.items():
        optional = architecture.biases == "any" or (architecture.biases == "qkv" and name == "attention_bias")
        if not optional and value != (architecture.biases == "all"):
            yield f"{name} is {value}"
    if config.layer_types is not None and not architecture.sliding_window and not architecture.recurrent:
        yield "layer_types differ"
    yield from architecture.problems(config)
    yield from rope_problems(config, architecture)


def compatibility_notes(config: ModelConfig, architecture: Architecture) -> list[str]:
    """Describe where llama.cpp runs the file but computes something else than the source."""
    notes, window = [], config.sliding_window
    if window and not architecture.sliding_window and window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has no sliding window in {architecture.name}: beyond {window} tokens it attends to all of them"
        )
    if rope_type(config) == "longrope":
        notes.append("llama.cpp selects longrope's long factors by its context size, not by the length of the text")
    if rope_type(config) == "yarn" and not architecture.yarn_truncate:
        notes.append("llama.cpp rounds the bounds of YaRN, which this model doesn't (truncate is false)")
    if config.hidden_act == "gelu":
        notes.append("llama.cpp only has the tanh approximation of GELU")
    return notes


def config_metadata(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The model's metadata: keys with the architecture's prefix, values as `write_header` expects them."""
    values: dict[str, Any] = {
        **{key: getattr(config, name) for key, name in SIZES.items()},
        "vocab_size": config.vocab_size,
        architecture.norm_eps_key: float(config.rms_norm_eps),
    }
    if architecture.free_head_dim:
        values |= {f"attention.{part}_length": config.head_dim for part in ("key", "value")}
    if config.num_experts:
        values |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    if config.positions == "rope":
        values |= rope_metadata(config)
    if config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    if architecture.recurrent:
        values["attention.head_count_kv"] = [mixer.kv_heads for mixer, _ in config.layer_sublayers]
    values |= architecture.metadata(config)
    return {f"{architecture.name}.{short}": value for short, value in values.items()}

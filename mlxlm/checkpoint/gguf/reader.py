"""Open a GGUF file, or a model split over several: its configuration in Hugging Face's names, tensors and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.checkpoint import Checkpoint, FileFormat
from mlxlm.checkpoint.embedding_config import from_gguf
from mlxlm.checkpoint.gguf import affine
from mlxlm.checkpoint.gguf.architecture import SIZES, Architecture
from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES
from mlxlm.checkpoint.gguf.header import Header, MetadataReader, TensorInfo, read_header
from mlxlm.checkpoint.gguf.rope_metadata import ROPE_TENSORS, read_rope_parameters
from mlxlm.checkpoint.gguf.tensors import read_tensor
from mlxlm.checkpoint.gguf.tokenizer_metadata import read_tokenizer
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.checkpoint.locations import GGUF_PART
from mlxlm.checkpoint.map_weights import to_decoder_weights
from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.families import FAMILIES, config_from_hf, family_config, weight_mappings
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import CheckpointError

_MAX_PARTS = 1000
_MTP_LAYERS = "nextn_predict_layers"  # how many of block_count predict several tokens
_KV_HEADS, _WIDTH = "attention.head_count_kv", "feed_forward_length"


def open_gguf(path: Path | str) -> Checkpoint:
    """Open a GGUF file; any part of a split model ("...-00001-of-00003.gguf") opens all of them.

    Only headers are read.

    Raises:
        CheckpointError, ConfigError: Names the file and the key. Errors of the tokenizer are raised when it is loaded.
    """
    header = _join_parts(read_header(Path(path)))
    keys = MetadataReader(header)
    architecture = _architecture(keys)
    values = _read_hf_config(keys, architecture)
    config = config_from_hf(values, source=str(header.path))
    infos = {
        name: info
        for name, info in header.tensors.items()
        if name not in ROPE_TENSORS and not _is_unused(name, keys, config)
    }
    mappings = architecture.weight_mappings(config)

    def decoder_weights(tensors: LazyTensors) -> LazyTensors:
        loaded = to_decoder_weights(mappings, architecture.from_file(tensors), str(header.path))
        return architecture.reorder(config, loaded, False)

    described = {name: read_tensor(info) for name, info in infos.items()}
    embedding = from_gguf(header.metadata.get(f"{keys.architecture}.pooling_type"))

    def tokenizer() -> Tokenizer:
        return read_tokenizer(header)

    values, tensors = family_config(config), decoder_weights(described)
    opened = Checkpoint(header.path, "gguf", values, tensors, tokenizer, config, embedding=embedding)
    # Parts of a matrix with other groups, in this file or in mlx_lm's.
    parts = {part for m in weight_mappings(config, for_mlx=True) if m.per_head for part in m.modules}
    if (config.linear_value_head_dim or 0) % affine.GROUP_SIZE:  # groups that span heads can't be reordered
        parts |= {part for m in mappings for part in m.modules if part.endswith("linear_attn.out_proj")}
    modules = {m.name for m in mappings if not m.per_head and parts.isdisjoint(m.modules)}
    packed = decoder_weights(affine.packed_tensors(infos, described, modules))
    if (quantization := affine.quantization_config(packed)) is None:
        return opened
    return replace(opened, packed=opened.with_tensors(packed, quantization))


FORMAT = FileFormat(lambda path, start: start == b"GGUF" or path.suffix == ".gguf", open_gguf)


def _is_unused(name: str, keys: MetadataReader, config: ModelConfig) -> bool:
    """Whether a tensor isn't used.

    It belongs to the layers after the last one, which predict several tokens, or to keys and values of a layer that
    shares those of another one.
    """
    layer, _, tensor = name.removeprefix("blk.").partition(".")
    if not layer.isdecimal():
        return False
    is_mtp = keys.has(_MTP_LAYERS) and int(layer) >= config.num_hidden_layers
    return is_mtp or (config.shares_kv(int(layer)) and tensor.startswith(("attn_k", "attn_v")))


def _join_parts(header: Header) -> Header:
    """The header of all parts of a split model together, with the metadata of the first."""
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    name = GGUF_PART.fullmatch(header.path.name)
    if type(count) is not int or not 1 < count <= _MAX_PARTS or name is None or int(name[3]) != count:
        shown = count if isinstance(count, int) else "not a number"
        problem = f"split.count is {shown}, which doesn't match the file's name"
        raise CheckpointError(f"{header.path}: {problem}", "the original names of the parts, ...-00001-of-00002.gguf")
    parts: list[Header] = []
    tensors: dict[str, TensorInfo] = {}
    for i in range(1, count + 1):
        path = header.path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf")
        part = header if path == header.path else read_header(path)
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != i - 1:
            raise CheckpointError(f"{path}: split.no and split.count are not those of part {i} of {count}")
        if duplicates := part.tensors.keys() & tensors:
            raise CheckpointError(f"{path}: tensor {min(duplicates)} is also in another part")
        parts.append(part)
        tensors |= part.tensors
    return replace(parts[0], tensors=tensors)


def _architecture(keys: MetadataReader) -> Architecture:
    """The architecture of a file. Raises CheckpointError for one that this decoder doesn't have."""
    problem = f"general.architecture is {keys.architecture!r}, which this decoder doesn't support"
    keys.check(keys.architecture in ARCHITECTURES, problem, "one of " + ", ".join(ARCHITECTURES))
    architecture = ARCHITECTURES[keys.architecture]
    unexpected = keys.count("expert_count", 0) > 0 and not architecture.experts
    keys.check(not unexpected, f"{keys.architecture}.expert_count: this decoder's {keys.architecture} has no experts")
    return architecture


def _read_hf_config(keys: MetadataReader, architecture: Architecture) -> dict[str, Any]:
    """Build Hugging Face's configuration of a file.

    Raises:
        CheckpointError: Names the file and the key.
    """
    hidden, heads = _check_sizes(keys)
    head_dim = keys.count("attention.key_length", hidden // heads)
    layers, mtp_layers = keys.count("block_count"), keys.count(_MTP_LAYERS, 0)
    kv_heads = keys.counts(_KV_HEADS, layers) if keys.has(_KV_HEADS) else [heads] * layers
    recurrent = architecture.recurrent
    differ = any(n != max(kv_heads) and not (n == 0 and recurrent) for n in kv_heads) and not architecture.layer_sizes
    keys.check(not differ, f"{keys.architecture}.{_KV_HEADS} differs between the layers")
    expert_width, own_layers = keys.count("expert_feed_forward_length", 0) or None, bool(architecture.mlp_layer)
    widths_differ = own_layers or architecture.layer_sizes
    values = {
        "vocab_size": keys.header.tensors["token_embd.weight"].shape[0],
        **{name: keys.count(key) for key, name in SIZES.items() if key not in (_KV_HEADS, _WIDTH)},
        "num_hidden_layers": layers - mtp_layers,
        "num_key_value_heads": max(kv_heads),
        # Not in all files without dense layers.
        "intermediate_size": max(keys.counts(_WIDTH, layers)) if widths_differ else keys.count(_WIDTH, expert_width),
        "rms_norm_eps": keys.number(architecture.norm_eps_key),
        "tie_word_embeddings": not keys.has_tensor("output.weight"),
        **_read_token_ids(keys),
    }
    if architecture.free_head_dim:
        values["head_dim"] = head_dim
        equal = keys.count("attention.value_length", hidden // heads) == head_dim
        keys.check(equal, f"{keys.architecture}.attention.value_length differs from key_length")
    extra = architecture.read_fields(keys)
    model_type = extra.get("model_type", architecture.families[0])
    family = FAMILIES[model_type]
    values = {family.hf_names(name)[0]: value for name, value in values.items() if family.hf_names(name)}
    if recurrent and not own_layers:
        values["layer_types"] = [FULL if n else recurrent for n in kv_heads]
    if architecture.fixed_values.get("positions", "rope") == "rope" and extra.get("position_embedding_type") != "nope":
        rope = values["rope_parameters"] = read_rope_parameters(keys, head_dim, architecture.yarn_truncate)
        values |= {name: rope[name] for name in ("original_max_position_embeddings",) if name in rope}  # for Phi-3
    return {"model_type": model_type, **values, **extra}


def _check_sizes(keys: MetadataReader) -> tuple[int, int]:
    """The hidden size and the number of heads, after comparing the sizes that others are derived from with tensors."""
    tensors = keys.header.tensors
    shape = tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()
    keys.check(len(shape) == 2, "there is no matrix token_embd.weight")
    layers, name = keys.count("block_count"), keys.architecture
    keys.check(0 < layers <= len(tensors), f"{name}.block_count is {layers}, there are {len(tensors)} tensors")
    hidden, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    sizes = f"{name}.embedding_length is {hidden} and attention.head_count {heads}"
    keys.check(shape[1] == hidden and heads > 0, f"token_embd.weight is {list(shape)}, {sizes}")
    return hidden, heads


def _read_token_ids(keys: MetadataReader) -> dict[str, Any]:
    ids = {role: keys.id(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "padding", "eot", "eom")}
    ends = (ids[role] for role in ("eos", "eot", "eom"))
    eos = list(dict.fromkeys(id for id in ends if id is not None))
    values = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    return {**values, "eos_token_id": eos[0] if len(eos) == 1 else eos or None}

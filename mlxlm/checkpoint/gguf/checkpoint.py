"""Open a GGUF file, or a model split over several, as a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint, MlxLmCheckpoint
from mlxlm.checkpoint.gguf.config_from_gguf import get_architecture, read_hf_config
from mlxlm.checkpoint.gguf.metadata import MetadataReader
from mlxlm.checkpoint.gguf.reader import Header, TensorInfo, read_header
from mlxlm.checkpoint.gguf.rope import ROPE_TENSORS
from mlxlm.checkpoint.gguf.tensors import read_tensor
from mlxlm.checkpoint.gguf.tokenizer_from_gguf import read_tokenizer
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.locations import GGUF_PART
from mlxlm.checkpoint.weight_mapping import to_decoder_weights
from mlxlm.families import config_from_hf, family_config, unsupported_feature
from mlxlm.utils.errors import CheckpointError

_MAX_PARTS = 1000


def open_gguf(path: Path | str) -> AnyCheckpoint:
    """Open a GGUF file; any part of a split model ("...-00001-of-00003.gguf") opens all of them.

    Only headers are read.

    Raises:
        CheckpointError, ConfigError: Names the file and the key. Errors of the tokenizer are raised when it is loaded.
    """
    header = _join_parts(read_header(Path(path)))
    keys = MetadataReader(header)
    architecture = get_architecture(keys)
    values = read_hf_config(keys, architecture)
    reason = unsupported_feature(values)
    sizes = {**values, "model_type": "llama", "rope_parameters": None} if reason else values
    config = config_from_hf(sizes, source=str(header.path))
    tensors = {name: read_tensor(info) for name, info in header.tensors.items() if name not in ROPE_TENSORS}
    if architecture.norm_offset:
        tensors = {name: _minus_one(t) if name.endswith("norm.weight") else t for name, t in tensors.items()}
    tensors = to_decoder_weights(architecture.weight_mappings(config), tensors, str(header.path))
    if reason:
        return MlxLmCheckpoint(header.path, "gguf", values, tensors, lambda: read_tokenizer(keys), reason)
    return Checkpoint(header.path, "gguf", family_config(config), tensors, lambda: read_tokenizer(keys), config)


def _minus_one(tensor: LazyTensor) -> LazyTensor:
    return tensor.astype(mx.float32).transform(lambda value: value - 1)


def _join_parts(header: Header) -> Header:
    """The header of all parts of a split model together, with the metadata of the first."""
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    name = GGUF_PART.fullmatch(header.path.name)
    if type(count) is not int or not 1 < count <= _MAX_PARTS or name is None or int(name[3]) != count:
        raise CheckpointError(
            f"{header.path}: split.count is {count if isinstance(count, int) else 'not a number'}, "
            "which doesn't match the file's name",
            "the original names of the parts, ...-00001-of-00002.gguf",
        )
    parts: list[Header] = []
    tensors: dict[str, TensorInfo] = {}
    for i in range(1, count + 1):
        path = header.path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf")
        part = header if path == header.path else read_header(path)
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != i - 1:
            raise CheckpointError(f"{path}: split.no and split.count are not those of part {i} of {count}")
        duplicate = next((name for name in part.tensors if name in tensors), None)
        if duplicate:
            raise CheckpointError(f"{path}: tensor {duplicate} is also in another part")
        parts.append(part)
        tensors |= part.tensors
    first = parts[0]
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{first.path}: split.tensors.count is {expected}, the parts have {len(tensors)}")
    return replace(first, tensors=tensors)

"""A GGUF file, or a model split over several, as a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.gguf.config_from_gguf import MetadataReader, get_architecture, read_hf_config
from mlxlm.checkpoint.gguf.reader import Header, read_header
from mlxlm.checkpoint.gguf.rope import TABLES
from mlxlm.checkpoint.gguf.tensors import read_tensor
from mlxlm.checkpoint.gguf.tokenizer_from_gguf import read_tokenizer
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.weight_mapping import to_decoder_weights
from mlxlm.families import config_from_hf, family_config
from mlxlm.utils.errors import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1000


def open_gguf(path: Path | str) -> Checkpoint:
    """Open a GGUF file; of a split model ("...-00001-of-00003.gguf"), any part opens them all.

    Only headers are read. Raises CheckpointError or ConfigError naming the file and the field; the tokenizer's
    errors come when it is loaded.
    """
    header = _whole(read_header(Path(path)))
    keys = MetadataReader(header)
    architecture = get_architecture(keys)
    config = config_from_hf(read_hf_config(keys, architecture), source=str(header.path))
    tensors = {name: read_tensor(info) for name, info in header.tensors.items() if name not in TABLES}
    if architecture.norm_offset:
        tensors = {name: _minus_one(t) if name.endswith("norm.weight") else t for name, t in tensors.items()}
    modules = to_decoder_weights(architecture.weight_mappings(config), tensors, str(header.path))
    return Checkpoint(header.path, "gguf", family_config(config), config, modules, lambda: read_tokenizer(keys))


def _minus_one(tensor: LazyTensor) -> LazyTensor:
    return tensor.astype(mx.float32).transform(lambda value: value - 1)


def _whole(header: Header) -> Header:
    """The header of all parts together; metadata is that of the first."""
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    named = _PART.fullmatch(header.path.name)
    if type(count) is not int or not 1 < count <= _MOST_PARTS or named is None or int(named[3]) != count:
        raise CheckpointError(
            f"{header.path}: split.count is {count if isinstance(count, int) else 'no number'}, "
            "the file's name says otherwise",
            "the names that the parts were made with, ...-00001-of-00002.gguf",
        )
    first, tensors = None, {}
    for i in range(1, count + 1):
        path = header.path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf")
        part = header if path == header.path else read_header(path)
        if part.metadata.get("split.count") != count or part.metadata.get("split.no") != i - 1:
            raise CheckpointError(f"{path}: split.no and split.count are not those of part {i} of {count}")
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice:
            raise CheckpointError(f"{path}: tensor {twice} is in another part too")
        first = first or part
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(f"{first.path}: split.tensors.count is {expected}, the parts have {len(tensors)}")
    return replace(first, tensors=tensors)

"""Saves and loads prompt caches: safetensors files that name the model they belong to."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.state import cache_arrays, set_cache_arrays
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.safetensors import file_header, write_tensors
from mlxlm.config.numbers import is_int_at_least
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import atomic_new_file, atomic_write

FORMAT = "mlxlm-cache-1"
_IDS = "ids"
_RECREATE_HINT = "delete the file and create it again"


def save_prompt_cache(
    path: Path | str,
    caches: Sequence[KVCache],
    ids: Sequence[int],
    identity: Mapping[str, str],
    *,
    replace: bool = False,
) -> None:
    """Write the caches of one text to a file.

    The file is written atomically; if several processes write it, the last one wins. Only its owner can read it, since
    it contains the text.

    Args:
        path: The file. If it is a symbolic link and `replace` is set, the link's target is written.
        caches: One cache per layer.
        ids: All token IDs of the text.
        identity: Identifies the model and settings; `load_prompt_cache` returns it.
        replace: Allow replacing an earlier cache file (never another file).

    Raises:
        CheckpointError: `path` exists, the caches are empty or of mlx_lm's own types, or writing fails.
    """
    path = Path(path)
    if not ids or not all(isinstance(cache, KVCache) for cache in caches):
        kind = "without tokens" if not ids else "of the architecture's own type"
        raise CheckpointError(f"a cache {kind} can't be saved", "an architecture of mlxlm, after a prompt")
    tensors, dropped = {_IDS: lazy_tensor(mx.array(ids, dtype=mx.int32))}, []
    for layer, cache in enumerate(caches):
        arrays, lost = cache_arrays(cache)
        tensors.update((f"{layer}.{name}", lazy_tensor(array)) for name, array in arrays.items())
        dropped.append(lost)
    metadata = {"identity": json.dumps(dict(identity)), "dropped": json.dumps(dropped)}
    if replace:
        path = Path(os.path.realpath(path))
        if path.exists():
            _header(path)  # raises if it is not a cache file
        with os_errors_as(CheckpointError, "write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, mode=0o600) if replace else atomic_new_file(path, mode=0o600) as file:
        write_tensors(file, path, tensors, format=FORMAT, metadata=metadata)


def load_prompt_cache_identity(path: Path | str) -> dict[str, str]:
    """Return the `identity` that was saved with the caches. Reads the header only.

    Raises:
        CheckpointError: As for `load_prompt_cache`.
    """
    path = Path(path)
    return _identity(path, _header(path)[1])


def load_prompt_cache(path: Path | str, caches: Sequence[KVCache]) -> tuple[list[int], dict[str, str]]:
    """Load a file into `caches`, which must have the settings of the saved ones.

    Heads, head dim and dtype are checked by the next update, which raises GenerationError if they are different.

    Returns:
        The token IDs and the identity.

    Raises:
        CheckpointError: Not a cache file, damaged, or of caches with other settings. No cache is changed.
    """
    path = Path(path)
    tensors, metadata = _header(path)
    identity = _identity(path, metadata)
    ids, dropped = tensors.pop(_IDS, None), _parse(metadata, "dropped")
    if ids is None or ids.dtype != mx.int32 or len(ids.shape) != 1 or not ids.shape[0]:
        raise CheckpointError(f"{path} has no token IDs", _RECREATE_HINT)
    valid = isinstance(dropped, list) and all(is_int_at_least(n, 0) and n < 2**31 for n in dropped)
    if not valid or len(dropped) != len(caches):
        layers_of_file = f"caches of {len(dropped)} layers" if valid else "no layers"
        problem = f"{path} has {layers_of_file}, but the model has {len(caches)}"
        raise CheckpointError(problem, "the model that it was made with")
    layers: dict[str, dict[str, LazyTensor]] = {str(layer): {} for layer in range(len(caches))}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".")
        if layer not in layers:
            raise CheckpointError(f"{path}: unexpected tensor {name:.80}", _RECREATE_HINT)
        layers[layer][part] = tensor
    loaded = []
    for cache, (layer, layer_tensors), lost in zip(caches, layers.items(), dropped, strict=True):
        arrays = {name: tensor.read() for name, tensor in layer_tensors.items()}
        try:
            restored = cache.copy()
            set_cache_arrays(restored, arrays, lost)
        except ValueError as error:
            raise CheckpointError(f"{path}: layer {layer}: {error}", "the settings that it was made with") from None
        if restored.offset != ids.shape[0]:
            problem = f"{path}: layer {layer} has {restored.offset} tokens instead of {ids.shape[0]}"
            raise CheckpointError(problem, _RECREATE_HINT)
        loaded.append(restored)
    token_ids = ids.read()
    try:
        mx.eval(token_ids, [cache.state for cache in loaded])
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", _RECREATE_HINT) from None
    for cache, restored in zip(caches, loaded, strict=True):
        cache.__dict__ = restored.__dict__
    return token_ids.tolist(), identity


def _header(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    tensors, metadata = file_header(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a prompt cache file of mlxlm", "another path")
    return tensors, metadata


def _identity(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    identity = _parse(metadata, "identity")
    if not isinstance(identity, dict) or not all(isinstance(value, str) for value in identity.values()):
        raise CheckpointError(f"{path} doesn't say which model it was made with", _RECREATE_HINT)
    return identity


def _parse(metadata: Mapping[str, str], name: str) -> Any:
    """A value of the header, from JSON; None if it is missing or malformed."""
    try:
        return json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError):
        return None

"""Caches in a file: one of safetensors, which says what it was made with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.state import cache_arrays, set_cache_arrays
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.safetensors import file_header, write_tensors
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import atomic_new_file, atomic_write

FORMAT = "mlxlm-cache-1"
_IDS = "ids"
_ANEW = "delete it and let it be written anew"


def save_prompt_cache(
    path: Path | str,
    caches: Sequence[KVCache],
    ids: Sequence[int],
    identity: Mapping[str, str],
    *,
    replace: bool = False,
) -> None:
    """Write the caches of one text, the `ids` of all its tokens, and `identity`: what they belong to.

    The file appears whole or not at all, also where several processes write it: the last one stays. `replace`: it may
    take the place of an earlier cache file, never of another; a link stays a link.
    Raises CheckpointError if something is at `path`, for caches without tokens and those that a model of mlx_lm makes
    itself, and if the disk refuses.
    """
    path = Path(path)
    if not ids or not all(isinstance(cache, KVCache) for cache in caches):
        kind = "no tokens" if not ids else "a kind of its own"
        raise CheckpointError(f"a cache of {kind} can't be written", "a text that was read by a model of mlxlm")
    tensors, dropped = {_IDS: lazy_tensor(mx.array(ids, dtype=mx.int32))}, []
    for layer, cache in enumerate(caches):
        arrays, lost = cache_arrays(cache)
        tensors.update((f"{layer}.{name}", lazy_tensor(array)) for name, array in arrays.items())
        dropped.append(lost)
    metadata = {"identity": json.dumps(dict(identity)), "dropped": json.dumps(dropped)}
    if replace:
        path = Path(os.path.realpath(path))
        if path.exists():
            _header(path)  # that of an earlier cache
        with os_errors_as(CheckpointError, "write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
    with (atomic_write if replace else atomic_new_file)(path) as file:
        write_tensors(file, path, tensors, format=FORMAT, metadata=metadata)


def load_prompt_cache_identity(path: Path | str) -> dict[str, str]:
    """What the caches in a file belong to. Reads the header only; raises as `load_prompt_cache` does."""
    path = Path(path)
    return _identity(path, _header(path)[1])


def load_prompt_cache(path: Path | str, caches: Sequence[KVCache]) -> tuple[list[int], dict[str, str]]:
    """Let `caches`, made with the settings that the file's had, hold what is in it; return its ids and identity.

    Raises CheckpointError, and changes no cache, for what is no such file, is not whole, or is of caches with other
    settings. Heads, head dim and dtype are compared where the model next reads a token, which raises GenerationError.
    """
    path = Path(path)
    tensors, metadata = _header(path)
    identity = _identity(path, metadata)
    ids, dropped = tensors.pop(_IDS, None), _numbers(metadata.get("dropped"))
    if ids is None or ids.dtype != mx.int32 or len(ids.shape) != 1 or not ids.shape[0]:
        raise CheckpointError(f"{path} has no ids of tokens", _ANEW)
    if dropped is None or len(dropped) != len(caches):
        found = "no layers" if dropped is None else f"the caches of {len(dropped)} layers"
        raise CheckpointError(f"{path} has {found}, the model has {len(caches)}", "the model that it was made with")
    layers: dict[str, dict[str, LazyTensor]] = {str(layer): {} for layer in range(len(caches))}
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".")
        if layer not in layers:
            raise CheckpointError(f"{path}: there is no place for tensor {name:.80}", _ANEW)
        layers[layer][part] = tensor
    fresh = []
    for cache, (layer, found), lost in zip(caches, layers.items(), dropped, strict=True):
        arrays = {name: tensor.read() for name, tensor in found.items()}
        try:
            restored = cache.copy()
            set_cache_arrays(restored, arrays, lost)
        except ValueError as error:
            raise CheckpointError(f"{path}: layer {layer}: {error}", "the settings that it was made with") from None
        if restored.offset != ids.shape[0]:
            problem = f"{path}: layer {layer} has read {restored.offset} tokens, and not {ids.shape[0]}"
            raise CheckpointError(problem, _ANEW)
        fresh.append(restored)
    found = ids.read()
    try:
        mx.eval(found, [cache.state for cache in fresh])
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", _ANEW) from None
    for cache, restored in zip(caches, fresh, strict=True):
        cache.__dict__ = restored.__dict__
    return found.tolist(), identity


def _header(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    tensors, metadata = file_header(path)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a cache file of mlxlm", "another path")
    return tensors, metadata


def _identity(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        identity = json.loads(metadata.get("identity", ""))
    except (ValueError, RecursionError):
        identity = None
    if not isinstance(identity, dict) or not all(isinstance(value, str) for value in identity.values()):
        raise CheckpointError(f"{path} doesn't say what it was made with", _ANEW)
    return identity


def _numbers(text: str | None) -> list[int] | None:
    try:
        numbers = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return numbers if isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**31 for n in numbers) else None

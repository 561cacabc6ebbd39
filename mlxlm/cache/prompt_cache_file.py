"""The file format of keys and values: a prompt cache, the cache of a session, a text of the server's prefix cache.

A safetensors file. `ids` are the tokens of one text, int32; `LAYER.NAME` are the arrays of a layer's cache (see
`KVCache.arrays` and `RecurrentCache.arrays`). The metadata has the `format`, the `identity` of the model and settings,
and how many tokens each layer has `dropped`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.safetensors import file_header, write_tensors
from mlxlm.config.numbers import is_int_at_least
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import atomic_new_file, atomic_write

FileCache = KVCache | RecurrentCache  # the caches that a file can have
_FORMAT = "mlxlm-cache-1"
_IDS = "ids"
_NUM_SAMPLES = 64  # values hashed per parameter
_RECREATE_HINT = "delete the file and create it again"


def save_prompt_cache(
    path: Path | str,
    caches: Sequence[FileCache],
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
        identity: Identifies the model and settings.
        replace: Allow replacing an earlier cache file (never another file).

    Raises:
        CheckpointError: `path` exists, the caches are empty or of mlx_lm's own types, or writing fails.
    """
    path = Path(path)
    if not ids or not all(isinstance(cache, FileCache) for cache in caches):
        kind = "without tokens" if not ids else "of mlx_lm's own types"
        raise CheckpointError(f"a cache {kind} can't be saved", "a model of mlxlm, after a prompt")
    tensors, dropped = {_IDS: lazy_tensor(mx.array(ids, dtype=mx.int32))}, []
    for layer, cache in enumerate(caches):
        arrays, lost = cache.arrays()
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
        write_tensors(file, path, tensors, format=_FORMAT, metadata=metadata)


@dataclass(frozen=True)
class PromptCacheFile:
    """A file of keys and values whose header was read.

    Attributes:
        path: The file.
        ids: The tokens of the text, int32 `[S]`.
        identity: Identifies the model and settings.
    """

    path: Path
    ids: np.ndarray
    identity: dict[str, str]
    _metadata: dict[str, str]
    _tensors: dict[str, LazyTensor]

    def load(self, caches: Sequence[FileCache]) -> None:
        """Load the text into `caches`, which must have the settings of the saved ones.

        Heads, head dim and dtype are checked by the next update, which raises GenerationError if they are different.

        Raises:
            CheckpointError: The file is damaged, or of caches with other settings. No cache is changed.
        """
        dropped = _parse(self._metadata, "dropped")
        valid = isinstance(dropped, list) and all(is_int_at_least(n, 0) and n < 2**31 for n in dropped)
        if not valid or len(dropped) != len(caches):
            layers_of_file = f"caches of {len(dropped)} layers" if valid else "no layers"
            problem = f"{self.path} has {layers_of_file}, but the model has {len(caches)}"
            raise CheckpointError(problem, "the model that it was made with")
        layers: dict[str, dict[str, LazyTensor]] = {str(layer): {} for layer in range(len(caches))}
        for name, tensor in self._tensors.items():
            layer, _, part = name.partition(".")
            if layer not in layers:
                raise CheckpointError(f"{self.path}: unexpected tensor {name:.80}", _RECREATE_HINT)
            layers[layer][part] = tensor
        loaded = []
        for cache, (layer, tensors), lost in zip(caches, layers.items(), dropped, strict=True):
            restored = cache.copy()
            try:
                restored.set_arrays({name: tensor.read() for name, tensor in tensors.items()}, lost)
            except ValueError as error:
                hint = "the settings that it was made with"
                raise CheckpointError(f"{self.path}: layer {layer}: {error}", hint) from None
            if isinstance(restored, KVCache) and restored.offset != len(self.ids):
                problem = f"{self.path}: layer {layer} has {restored.offset} tokens instead of {len(self.ids)}"
                raise CheckpointError(problem, _RECREATE_HINT)
            loaded.append(restored)
        _eval(self.path, [cache.state for cache in loaded])
        for cache, restored in zip(caches, loaded, strict=True):
            cache.__dict__ = restored.__dict__


def open_prompt_cache(path: Path | str) -> PromptCacheFile:
    """Read the header of a file and its tokens.

    Raises:
        CheckpointError: Not a cache file, or damaged.
    """
    path = Path(path)
    tensors, metadata = _header(path)
    identity, ids = _parse(metadata, "identity"), tensors.pop(_IDS, None)
    if not isinstance(identity, dict) or not all(isinstance(value, str) for value in identity.values()):
        raise CheckpointError(f"{path} doesn't say which model it was made with", _RECREATE_HINT)
    if ids is None or ids.dtype != mx.int32 or len(ids.shape) != 1 or not ids.shape[0]:
        raise CheckpointError(f"{path} has no token IDs", _RECREATE_HINT)
    _eval(path, array := ids.read())
    return PromptCacheFile(path, np.array(array), identity, metadata, tensors)


def _header(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    tensors, metadata = file_header(path)
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a prompt cache file of mlxlm", "another path")
    return tensors, metadata


def _parse(metadata: Mapping[str, str], name: str) -> Any:
    """A value of the header, from JSON; None if it is missing or malformed."""
    try:
        return json.loads(metadata.get(name, ""))
    except (ValueError, RecursionError):
        return None


def _eval(path: Path, arrays: Any) -> None:
    try:
        mx.eval(arrays)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", _RECREATE_HINT) from None


def fingerprint(model: nn.Module) -> str:
    """Hash a model: SHA-256, in hexadecimal.

    Covers the configuration and the names, shapes, dtypes and evenly spaced samples of the parameters. Evaluates
    weights that are not loaded yet.
    """
    digest = hashlib.sha256()
    for name in ("config", "args"):  # mlxlm's models, mlx_lm's models
        settings = getattr(model, name, None)
        if is_dataclass(settings) and not isinstance(settings, type):
            digest.update(json.dumps(asdict(settings), sort_keys=True, default=str).encode())
    parameters = sorted(tree_flatten(model.parameters()))
    samples = [_sample(value) for _, value in parameters]
    mx.eval(samples)
    for (name, value), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(value: mx.array) -> mx.array:
    """The bytes of up to `_NUM_SAMPLES` values, including the first and the last."""
    flat = value.reshape(-1)
    if flat.size > _NUM_SAMPLES:
        flat = flat[mx.array([i * (flat.size - 1) // (_NUM_SAMPLES - 1) for i in range(_NUM_SAMPLES)])]
    return flat.view(mx.uint8) if flat.size else flat.astype(mx.uint8)

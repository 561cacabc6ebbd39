"""Which model a cache was made with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, is_dataclass

import numpy as np

from mlxlm.backend.mlx import mx, tree_flatten

_SAMPLES = 64  # values of each parameter


def fingerprint(model) -> str:
    """SHA-256, in hexadecimal, over a model's configuration and over the names, shapes, dtypes and evenly spaced
    samples of its parameters. Weights that are not read yet are read."""
    digest = hashlib.sha256()
    for name in ("config", "args"):  # ours, and that of mlx_lm's models
        if is_dataclass(settings := getattr(model, name, None)):
            digest.update(json.dumps(asdict(settings), sort_keys=True, default=str).encode())
    parameters = sorted(tree_flatten(model.parameters()))
    samples = [_sample(value) for _, value in parameters]
    mx.eval(samples)
    for (name, value), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def _sample(value: mx.array) -> mx.array:
    """The bytes of up to `_SAMPLES` values, the first and the last among them."""
    flat = value.reshape(-1)
    if flat.size > _SAMPLES:
        flat = flat[mx.array([i * (flat.size - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)])]
    return flat.view(mx.uint8) if flat.size else flat.astype(mx.uint8)

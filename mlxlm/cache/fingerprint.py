"""Identifies the model that a cache was made with."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, is_dataclass

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten

_NUM_SAMPLES = 64  # values hashed per parameter


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

"""RoPE in GGUF files: metadata keys and frequency tables from and to Hugging Face's `rope_parameters`.

llama.cpp stores Llama 3's scaling as a table of divisors, one per frequency, and "longrope"'s factors as two tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.architecture import Architecture
from mlxlm.checkpoint.gguf.header import MetadataReader, shortest_decimal
from mlxlm.checkpoint.gguf.tensors import read_tensor
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.config import ModelConfig
from mlxlm.config.rope_scaling import NOT_ROTATED, attention_factor, scaled_wavelengths, unscaled_wavelengths

_LLAMA3_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (_LLAMA3_FACTORS, _LONG_FACTORS, _SHORT_FACTORS)
_LLAMA3_CONTEXT = 8192  # original context length of Llama 3, which its GGUF files don't contain
# Of all Llama 3 models, and of Llama 4; not in their GGUF files.
_LLAMA3_BOUNDS = tuple({"low_freq_factor": 1.0, "high_freq_factor": high} for high in (4.0, 1.0))
_MAX_FREQUENCIES = 4096  # of a head; most have 64
_YARN_FIELDS = ("rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")


def rope_type(config: ModelConfig) -> str:
    """The `rope_type` of a configuration, "default" without a scaling."""
    return (config.rope_scaling or {}).get("rope_type", "default")


def rope_problems(config: ModelConfig, architecture: Architecture) -> Iterator[str]:
    """Yield why an architecture of llama.cpp can't compute the RoPE scaling of a configuration."""
    supported, yarn_truncate = architecture.rope_types, architecture.yarn_truncate
    scaling, kind = config.rope_scaling or {}, rope_type(config)
    if kind not in ("default", *supported):
        yield f"rope_type is {kind!r}, it supports {', '.join(supported)}"
    if kind == "longrope" and "factor" in scaling:
        yield "rope_scaling has a factor, it uses the ratio of the two context lengths"
    if kind == "proportional" and scaling.get("factor", 1) != 1:
        yield "rope_scaling has a factor"
    if kind == "llama3" and not any(bounds.items() <= scaling.items() for bounds in _LLAMA3_BOUNDS):
        yield "its low_freq_factor must be 1 and its high_freq_factor 4 or 1, since GGUF does not store them"
    if kind == "yarn" and scaling.get("truncate", True) != yarn_truncate:
        yield f"YaRN's truncate must be {str(yarn_truncate).lower()}"
    if kind == "yarn" and architecture.yarn_multiplier:
        mscales = {scaling.get("mscale"), scaling.get("mscale_all_dim")}
        if len(mscales) > 1 or None in mscales:
            yield "its YaRN needs equal mscale and mscale_all_dim"
    elif kind == "yarn" and not _is_plain_yarn(scaling):
        yield "its YaRN only supports an attention_factor of 0.1 · ln(factor) + 1"


def _is_plain_yarn(scaling: Mapping[str, Any]) -> bool:
    attention = scaling.get("attention_factor")
    others = {name for name, value in scaling.items() if name not in (*_YARN_FIELDS, "attention_factor") and value}
    default = 0.1 * math.log(scaling["factor"]) + 1
    return not others and (attention is None or abs(attention - default) < 1e-6)


def rope_metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of RoPE, keys below the architecture's prefix."""
    values: dict[str, Any] = {"rope.dimension_count": config.rotary_dims(), "rope.freq_base": float(config.rope_theta)}
    scaling, kind = config.rope_scaling or {}, rope_type(config)
    if kind in ("linear", "yarn", "longrope"):
        values["rope.scaling.type"] = kind
    if kind in ("linear", "yarn"):
        values["rope.scaling.factor"] = float(scaling["factor"])
    if kind in ("yarn", "llama3", "longrope"):
        values["rope.scaling.original_context_length"] = int(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        values["rope.scaling.attn_factor"] = float(attention_factor(scaling, config.max_position_embeddings))
    for name in ("beta_fast", "beta_slow"):
        if kind == "yarn" and name in scaling:
            values[f"rope.scaling.yarn_{name}"] = float(scaling[name])
    return values


def rope_tensors(config: ModelConfig) -> dict[str, LazyTensor]:
    """The frequency tables of a configuration, by tensor name."""
    scaling, kind = config.rope_scaling or {}, rope_type(config)
    tables = {}
    if kind == "proportional":
        dims = config.global_head_dim or config.head_dim
        tables = {_LLAMA3_FACTORS: _proportional_factors(scaling["partial_rotary_factor"], dims)}
    elif kind == "llama3":
        tables = {_LLAMA3_FACTORS: llama3_factors(scaling, config.rope_theta, config.head_dim)}
    elif kind == "longrope":
        tables = {_LONG_FACTORS: scaling["long_factor"], _SHORT_FACTORS: scaling["short_factor"]}
    return {name: lazy_tensor(mx.array(values)) for name, values in tables.items()}


def read_rope_parameters(keys: MetadataReader, head_dim: int, yarn_truncate: bool = True) -> dict[str, Any]:
    """Return Hugging Face's `rope_parameters` of a file. Raises CheckpointError, naming the key or the table."""
    theta = keys.number("rope.freq_base", 10_000.0)
    rotary_dims = keys.count("rope.dimension_count", head_dim)
    return {
        "rope_type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": rotary_dims / max(head_dim, 1),
        **(_read_scaling(keys, theta) or {}),
        **({} if yarn_truncate else {"truncate": False}),
    }


def _read_scaling(keys: MetadataReader, theta: float) -> dict[str, Any] | None:
    if keys.has_tensor(_LLAMA3_FACTORS):
        return _read_llama3(keys, theta)
    if keys.has_tensor(_LONG_FACTORS) or keys.has_tensor(_SHORT_FACTORS):
        return _read_longrope(keys)
    kind = keys.text(f"{keys.architecture}.rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    prefix = f"{keys.architecture}.rope.scaling"
    keys.check(kind == "yarn", f"{prefix}.type is {kind!r}, this decoder supports linear and yarn")
    for name in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        is_one = keys.number(f"rope.scaling.{name}", 1.0) in (1.0, -1.0)
        keys.check(is_one, f"{prefix}.{name} is not 1, which this decoder doesn't support")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }
    betas = {name: f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    return yarn | {name: keys.number(short) for name, short in betas.items() if keys.has(short)}


def _read_llama3(keys: MetadataReader, theta: float) -> dict[str, Any] | None:
    factors = _read_factors(keys, _LLAMA3_FACTORS)
    if (factors == 1).all():
        return None
    share = float((factors == 1).mean())
    if (factors == _proportional_factors(share, 2 * len(factors))).all():
        return {"rope_type": "proportional", "partial_rotary_factor": share}
    stored = keys.count("rope.scaling.original_context_length", 0)
    factor = float(factors.max())
    originals = dict.fromkeys((stored or _LLAMA3_CONTEXT, _LLAMA3_CONTEXT))
    for bounds, original in itertools.product(_LLAMA3_BOUNDS, originals):
        lengths = {"factor": factor, "original_max_position_embeddings": original}
        scaling = {"rope_type": "llama3", **lengths, **bounds}
        if factor > 1 and np.allclose(llama3_factors(scaling, theta, 2 * len(factors)), factors, rtol=1e-4):
            return scaling
    raise keys.error(f"{_LLAMA3_FACTORS} is not the scaling of a Llama 3 model, the only one that is supported")


def _read_longrope(keys: MetadataReader) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "short_factor": [shortest_decimal(factor) for factor in _read_factors(keys, _SHORT_FACTORS)],
        "long_factor": [shortest_decimal(factor) for factor in _read_factors(keys, _LONG_FACTORS)],
        "original_max_position_embeddings": original,
    }
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if original > 1 and abs(attention - attention_factor(scaling, keys.count("context_length"))) > 1e-6:
        scaling["attention_factor"] = attention
    return scaling


def _read_factors(keys: MetadataReader, name: str) -> np.ndarray:
    info = keys.header.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.type.name != "F32" or info.shape[0] > _MAX_FREQUENCIES:
        raise keys.error(f"{name} must be an F32 vector")
    return np.array(read_tensor(info).read())


def _proportional_factors(share: float, dims: int) -> np.ndarray:
    """The divisors of "proportional" RoPE, which rotates this share of the pairs of dimensions, float32."""
    rotated = int(share * dims / 2)
    return np.array([1.0] * rotated + [NOT_ROTATED] * (dims // 2 - rotated), np.float32)


def llama3_factors(scaling: Mapping[str, Any], theta: float, dims: int) -> np.ndarray:
    """The divisor of each of the `dims` / 2 frequencies, float32."""
    scaled = scaled_wavelengths(theta, dims, scaling)
    return (np.array(scaled) / unscaled_wavelengths(theta, dims)).astype(np.float32)

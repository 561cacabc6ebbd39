"""Architectures that mlxlm doesn't implement, loaded through mlx_lm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxlm._mlx import ON_CPU, nn
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.checkpoint.source import Checkpoint
from mlxlm.config_problems import is_count
from mlxlm.errors import CheckpointError

_NO_LIMIT = 2**31 - 1
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True)
class ForeignConfig:
    """What generation asks of the configuration of a model that mlx_lm provides."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_ids: frozenset[int]


def load_foreign(checkpoint: Checkpoint) -> tuple[nn.Module, ForeignConfig]:
    """The model that mlx_lm makes of an open checkpoint's folder. Code inside the folder is never run.

    Raises CheckpointError for whatever mlx_lm can't load.
    """
    from mlx_lm.utils import load_model

    folder, values = checkpoint.path, checkpoint.values
    try:
        model, _ = load_model(folder, lazy=True, trust_remote_code=False)
    except Exception as error:  # mlx_lm raises anything from KeyError to RuntimeError for a file it can't read
        kind = values.get("model_type")
        raise CheckpointError(f"{folder}: mlx_lm can't load this {kind} model: {error}") from error
    if ON_CPU:
        model.apply(as_float32)
    model.eval()
    nested = values.get("text_config")
    values = {**(nested if isinstance(nested, Mapping) else {}), **{k: v for k, v in values.items() if v is not None}}
    eos = values.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int for id in ends):
        raise CheckpointError(f"{folder}: eos_token_id is {eos!r}, it must be a token id or a list of them")
    return model, ForeignConfig(
        model_type=str(values.get("model_type")),
        vocab_size=_count(values, "vocab_size"),
        max_position_embeddings=_count(values, *_CONTEXT),
        eos_ids=frozenset(ends),
    )


def _count(values: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that has a positive whole number."""
    return next((values[name] for name in names if is_count(values.get(name))), _NO_LIMIT)

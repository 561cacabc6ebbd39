"""Architectures that mlxlm doesn't implement, loaded through mlx_lm.

Either the logits are those of the model that config.json describes, or loading fails with the field that mlx_lm
doesn't implement. Code inside a checkpoint's folder is never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mlxlm.backend.mlx import ON_CPU, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.mlx_lm_model import build_model
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.validation import is_count
from mlxlm.families import get_quantization_config
from mlxlm.utils.errors import CheckpointError

_NO_LIMIT = 2**31 - 1
_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")


@dataclass(frozen=True)
class MlxLmConfig:
    """What generation asks of the configuration of a model that mlx_lm provides."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_ids: frozenset[int]


def load_with_mlx_lm(checkpoint: Checkpoint) -> tuple[nn.Module, MlxLmConfig]:
    """The model that mlx_lm makes of an open checkpoint's folder. Code inside the folder is never run.

    Raises CheckpointError for whatever mlx_lm can't load, and for what it would compute wrongly.
    """
    folder, values = checkpoint.path, checkpoint.hf_config
    model, limit = build_with_mlx_lm(checkpoint)
    _load_weights(model, checkpoint)
    if ON_CPU:
        model.apply(as_float32)
    model.eval()
    nested = values.get("text_config")
    values = {**(nested if isinstance(nested, Mapping) else {}), **{k: v for k, v in values.items() if v is not None}}
    eos = values.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int for id in ends):
        raise CheckpointError(f"{folder}: eos_token_id is {eos!r}, it must be a token id or a list of them")
    longest = _count(values, model, *_CONTEXT)
    return model, MlxLmConfig(
        model_type=str(values.get("model_type")),
        vocab_size=_count(values, model, "vocab_size"),
        max_position_embeddings=min(longest, limit[0]) if limit else longest,
        eos_ids=frozenset(ends),
    )


def build_with_mlx_lm(checkpoint: Checkpoint) -> tuple[nn.Module, tuple[int, str] | None]:
    """The model without its weights, and the longest text that it computes as config.json says, with the field that it
    ignores beyond; None if it ignores nothing. Raises CheckpointError as `load_with_mlx_lm` does."""
    if checkpoint.format != "safetensors":
        problem = f"{checkpoint.path}: mlx_lm reads safetensors, not {checkpoint.format} files"
        raise CheckpointError(problem, "transformers: load it and save_pretrained() it")
    try:
        return build_model(checkpoint.hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error.message}", error.hint) from error.__cause__


def unconvertible_hint(checkpoint: Checkpoint) -> str | None:
    """What to try with a model that can be run but not converted or quantized; None if it can't be run either."""
    try:
        build_with_mlx_lm(checkpoint)
    except CheckpointError:
        return None
    return "mlxlm chat or mlxlm generate, which run it as it is"


def _load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill a model of mlx_lm by mlx_lm's own loader, which knows the many forms of quantized folders."""
    from mlx_lm.utils import load_model

    plan = get_quantization_config(checkpoint.hf_config)
    built = SimpleNamespace(from_dict=lambda config: model)
    try:
        load_model(
            checkpoint.path,
            lazy=True,
            model_config={} if plan is None else {"quantization": plan},
            get_model_classes=lambda config: (lambda args: args, built),
            trust_remote_code=False,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: {error.message}", error.hint) from None
    except Exception as error:  # mlx_lm raises anything from KeyError to RuntimeError for a file it can't read
        raise CheckpointError(f"{checkpoint.path}: {_misfit(str(error)) or _unreadable(checkpoint, error)}") from error


def _unreadable(checkpoint: Checkpoint, error: Exception) -> str:
    return f"mlx_lm can't load this {checkpoint.hf_config.get('model_type')} model: {error}"


def _misfit(text: str) -> str | None:
    """What MLX says of weights that aren't those of the model, as `open_checkpoint` says it."""
    if shapes := re.match(r"Expected shape (.+) but received shape (.+) for parameter (\S+)", text):
        return f"the weights don't fit the configuration: {shapes[3]} is {shapes[2]}, it must be {shapes[1]}"
    if not (names := re.match(r"(Missing|Received) (\d+) parameters(?: not in model)?:\s*(\S+?),?\.?(?:\s|$)", text)):
        return None
    problem = "is missing" if names[1] == "Missing" else "is not part of mlx_lm's model"
    more = f" (and {int(names[2]) - 1} more)" if names[2] != "1" else ""
    return f"the weights don't fit the configuration: {names[3]} {problem}{more}"


def _count(values: Mapping[str, Any], model: nn.Module, *names: str) -> int:
    """The first of these fields that has a positive whole number; where the file has none, the model's own default."""
    given = [values.get(name) for name in names]
    for part in (getattr(model, "language_model", None), model):
        given += [getattr(getattr(part, "args", None), name, None) for name in names]
    return next(filter(is_count, given), _NO_LIMIT)

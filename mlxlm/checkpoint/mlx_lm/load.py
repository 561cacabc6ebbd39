"""Load a checkpoint through mlx_lm: its model class and its weight loader, with mlxlm's checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mlxlm.backend.mlx import ON_CPU, nn
from mlxlm.checkpoint.checkpoint import MlxLmCheckpoint, token_id_list
from mlxlm.checkpoint.mlx_lm.build import build_model
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.numbers import is_count
from mlxlm.families import get_quantization_config
from mlxlm.utils.errors import CheckpointError, ConfigError

_NO_LIMIT = 2**31 - 1
_CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
)


@dataclass(frozen=True)
class MlxLmConfig:
    """The part of a configuration that generation needs, for a model of mlx_lm."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]


def load_with_mlx_lm(checkpoint: MlxLmCheckpoint) -> tuple[nn.Module, MlxLmConfig]:
    """Load the model of an open checkpoint through mlx_lm, in evaluation mode.

    Raises:
        CheckpointError: mlx_lm can't load the checkpoint, or would compute something else than config.json says.
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
    eos_ids = token_id_list(eos)
    if not all(type(id) is int for id in eos_ids):
        raise CheckpointError(f"{folder}: eos_token_id is {eos!r}, it must be a token id or a list of them")
    context = _count(values, model, *_CONTEXT_FIELDS)
    return model, MlxLmConfig(
        model_type=str(values.get("model_type")),
        vocab_size=_count(values, model, "vocab_size"),
        max_position_embeddings=min(context, limit[0]) if limit else context,
        eos_token_ids=frozenset(eos_ids),
    )


def build_with_mlx_lm(checkpoint: MlxLmCheckpoint) -> tuple[nn.Module, tuple[int, str] | None]:
    """Build the model of a checkpoint without its weights.

    Returns:
        The model, and the length up to which it computes what config.json says, with the name of the field that it
        ignores beyond that length; None if there is no such limit.

    Raises:
        CheckpointError: As `load_with_mlx_lm`.
    """
    if checkpoint.format == "pytorch":
        message = f"{checkpoint.path}: mlx_lm reads safetensors, not pytorch files"
        raise CheckpointError(message, "load and save_pretrained() the model with transformers")
    try:
        return build_model(checkpoint.hf_config)
    except (CheckpointError, ConfigError) as error:
        raise error.prefixed(checkpoint.path, CheckpointError) from error.__cause__


def _load_weights(model: nn.Module, checkpoint: MlxLmCheckpoint) -> None:
    """Load a folder's weights with mlx_lm's own loader, which knows many forms of quantization, a file's with ours."""
    from mlx_lm.utils import load_model

    quantization = get_quantization_config(checkpoint.hf_config)
    model_args = SimpleNamespace(from_dict=lambda config: model)
    try:
        if checkpoint.format == "gguf":
            weights = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
            model.load_weights(list(model.sanitize(weights).items()))
            return
        load_model(
            checkpoint.path,
            lazy=True,
            model_config={} if quantization is None else {"quantization": quantization},
            get_model_classes=lambda config: (lambda args: args, model_args),
            trust_remote_code=False,
        )
    except CheckpointError as error:
        raise error.prefixed(checkpoint.path, CheckpointError) from None
    except Exception as error:  # mlx_lm raises anything from KeyError to RuntimeError for a file it can't read
        unreadable = f"mlx_lm can't load this {checkpoint.hf_config.get('model_type')} model: {error}"
        raise CheckpointError(f"{checkpoint.path}: {_mismatch(str(error)) or unreadable}") from error


def _mismatch(text: str) -> str | None:
    """Reword MLX's error about weights that aren't those of the model as `open_checkpoint` words it."""
    if shapes := re.match(r"Expected shape (.+) but received shape (.+) for parameter (\S+)", text):
        return f"the weights don't match the configuration: {shapes[3]} is {shapes[2]}, it must be {shapes[1]}"
    if not (names := re.match(r"(Missing|Received) (\d+) parameters(?: not in model)?:\s*(\S+?),?\.?(?:\s|$)", text)):
        return None
    problem = "is missing" if names[1] == "Missing" else "is not part of mlx_lm's model"
    more = f" (and {int(names[2]) - 1} more)" if names[2] != "1" else ""
    return f"the weights don't match the configuration: {names[3]} {problem}{more}"


def _count(values: Mapping[str, Any], model: nn.Module, *names: str) -> int:
    """Return the first of these fields that is a positive integer, else the model's default."""
    candidates = [values.get(name) for name in names]
    for part in (getattr(model, "language_model", None), model):
        candidates += [getattr(getattr(part, "args", None), name, None) for name in names]
    return next(filter(is_count, candidates), _NO_LIMIT)

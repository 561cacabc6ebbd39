"""Embeddings of texts: the mean of a language model's last hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlm.backend.mlx import mx
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import GenerationError


def embed(lm: LoadedModel, ids: Sequence[int]) -> list[float]:
    """The mean of the hidden states after the final norm over all tokens, scaled to length 1.

    A model that was trained to predict text isn't trained for this: such embeddings compare texts, but worse than
    those of an embedding model.

    Raises:
        GenerationError: For no tokens, more than the model's context, and a model that shows no hidden states.
    """
    backbone, limit = getattr(lm.model, "model", None), lm.config.max_position_embeddings
    if backbone is None:
        raise GenerationError("this model has no embeddings: its hidden states can't be read", "a Llama-like model")
    if not 0 < len(ids) <= limit:
        raise GenerationError(f"the text has {len(ids)} tokens, and the model embeds 1 to {limit}", "parts of it")
    if not all(0 <= id < lm.config.vocab_size for id in ids):
        raise GenerationError(
            "the text has ids that this model doesn't have", f"ids from 0 to {lm.config.vocab_size - 1}"
        )
    context = Context(lm.model)
    context.trim_to_prefix(ids)  # tells the caches how long the text is
    total = mx.zeros(0)
    for start in range(0, len(ids), PREFILL_STEP_SIZE):
        hidden = backbone(mx.array([ids[start : start + PREFILL_STEP_SIZE]]), cache=context.caches)
        part = hidden[0].astype(mx.float32).sum(axis=0)
        total = part if start == 0 else total + part
        eval_caches(context.caches, total)
    return (total / mx.maximum(mx.linalg.norm(total), 1e-12)).tolist()

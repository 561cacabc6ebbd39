"""The log-probabilities of the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.logprobs import SampledLogprobs, TokenLogprobs
from mlxlm.generation.request import max_new_tokens_for

_CHUNK_SIZE = 256  # tokens whose logits are computed at once: [256, V] float32 is 128 MB for 128k tokens


def prompt_logprobs(lm: LoadedModel, ids: Sequence[int], top_logprobs: int = 0) -> list[TokenLogprobs]:
    """The log-probability of each token but the first, and the most likely tokens in its place.

    Raises:
        GenerationError: For a prompt that is empty, too long or has unknown ids.
    """
    context = Context(lm.model)
    max_new_tokens_for(lm, ids, context.kv)
    context.trim_to_prefix(ids)  # tells the caches how long the text is
    found: list[TokenLogprobs] = []
    for start in range(0, len(ids) - 1, _CHUNK_SIZE):
        chunk = mx.array([ids[start : start + _CHUNK_SIZE + 1]])
        logits = lm.model(chunk[:, :-1], cache=context.caches)[0]
        sampled = SampledLogprobs.compute(logits, chunk[0, 1:], top_logprobs)
        eval_caches(context.caches, sampled.tokens, *sampled.arrays())
        found += (sampled.read(row, lm.tokenizer.token_bytes) for row in range(chunk.shape[1] - 1))
    return found

"""How likely a model finds a given text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import Context, eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.kernels import cross_entropy
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_CHUNK = 256  # tokens whose logits are made at once: [256, V] float32 is 128 MB for 128k tokens


@dataclass(frozen=True)
class Score:
    """The log-probabilities (natural) that a model gives a text.

    `tokens` are the text's ids, `logprobs` one number for each: None for a first token with nothing before it, which no
    model predicts. `total` is their sum; `bits_per_byte` = -total / ln 2 / bytes of the text that was predicted (nan
    where that is empty).
    """

    tokens: list[int]
    logprobs: list[float | None]
    total: float
    bits_per_byte: float


def score(lm: LoadedModel, text: str, *, prompt: str = "") -> Score:
    """The log-probability of `text`, as the continuation of `prompt`.

    The tokenizer's special tokens stand in front as in `generate`, and are not part of the score. Text and prompt
    are encoded apart, as a model meets a prompt and its own tokens. Raises GenerationError for an empty text, one that
    with the prompt is longer than the model's context, and where the model's logits are not numbers.
    """
    if not isinstance(text, str) or not isinstance(prompt, str):
        raise GenerationError("text or prompt is no text", "both as strings")
    if not text:
        raise GenerationError("the text to score is empty", "one character or more")
    before, tokens = _encoded(lm, text, prompt)
    limit = lm.config.max_position_embeddings
    if len(before) + len(tokens) > limit:
        raise GenerationError(
            f"text and prompt have {len(before) + len(tokens)} tokens, and the model's context {limit}",
            "a shorter text, or parts of it",
        )
    predicted = _logprobs(lm.model, [*before, *tokens])
    logprobs: list[float | None] = [*([] if before else [None]), *predicted[max(0, len(before) - 1) :]]
    total = math.fsum(value for value in logprobs if value is not None)
    unpredicted = 0 if before else len(first_token_bytes(lm.tokenizer, tokens[0]))
    count = len(text.encode("utf-8")) - unpredicted
    return Score(tokens, logprobs, total, -total / math.log(2) / count if count > 0 else math.nan)


def first_token_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """What the first token of a text stands for in it, without a space that `encode` has put in front."""
    spelled = tokenizer.token_bytes(id) if tokenizer.has_byte_tokens else tokenizer.decode([id]).encode("utf-8")
    return spelled.removeprefix(b" ") if tokenizer.adds_dummy_prefix else spelled


def _encoded(lm: LoadedModel, text: str, prompt: str) -> tuple[list[int], list[int]]:
    """What stands before the text, and the text."""
    if prompt:
        return lm.tokenizer.encode(prompt), lm.tokenizer.encode(text, continues=True)
    return lm.tokenizer.prefix_token_ids, lm.tokenizer.encode(text, add_special_tokens=False)


def _logprobs(model, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i from 1."""
    context, found, pairs = Context(model), [], list(pairwise(ids))
    context.trim_to_prefix(ids, 0)  # tells the caches how long the text is
    for start in range(0, len(pairs), _CHUNK):
        part = pairs[start : start + _CHUNK]
        logits = model(mx.array([[a for a, _ in part]]), cache=context.caches)[0]
        values = -cross_entropy(logits, mx.array([b for _, b in part]))
        eval_caches(context.caches, values)
        found += values.tolist()
    if any(math.isnan(value) for value in found):
        raise GenerationError("the model's logits are not numbers", "a checkpoint without NaN")
    return found

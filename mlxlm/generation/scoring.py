"""Passes over a given text: its log-probability, and that of a prompt's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import KVOptions
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel, loaded
from mlxlm.generation.request import max_new_tokens_for
from mlxlm.generation.result import SampledLogprobs, TokenLogprobs
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_CHUNK_SIZE = 256  # tokens whose logits are computed at once: [256, V] float32 is 128 MB for 128k tokens


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a text under a model.

    Attributes:
        tokens: The text's ids.
        logprobs: The natural log-probability of each token; None for a first token with nothing before it, which no
            model predicts.
        total: Their sum.
        bits_per_byte: -total / ln 2 / bytes of the predicted text; NaN if no byte was predicted.
    """

    tokens: list[int]
    logprobs: list[float | None]
    total: float
    bits_per_byte: float


def score(lm: LoadedModel | str | Path, text: str, *, prompt: str = "") -> Score:
    """The log-probability of `text` as the continuation of `prompt`.

    The tokenizer's special tokens come first, as in `generate`, and aren't scored. Text and prompt are encoded
    separately, as a model sees a prompt and its own tokens.

    Args:
        lm: The model, or its name, path or hub id; see `mlxlm.load`.
        text: The text to score.
        prompt: The text before it, which isn't scored.

    Raises:
        GenerationError: For an empty text, a text and prompt longer than the model's context, and a model whose logits
            are not numbers.
    """
    lm = loaded(lm)
    lm.check_whole("scores")
    if not isinstance(text, str) or not isinstance(prompt, str):
        raise GenerationError("text and prompt must be strings", "mlxlm.score(lm, 'text', prompt='prompt')")
    if not text:
        raise GenerationError("the text to score is empty", "one character or more")
    if prompt:
        before, tokens = lm.tokenizer.encode(prompt), lm.tokenizer.encode(text, continues=True)
    else:
        before, tokens = lm.tokenizer.prefix_token_ids, lm.tokenizer.encode(text, add_special_tokens=False)
    context_length = lm.config.max_position_embeddings
    if len(before) + len(tokens) > context_length:
        raise GenerationError(
            f"text and prompt have {len(before) + len(tokens)} tokens, and the model's context {context_length}",
            "a shorter text, or parts of it",
        )
    predicted = [value for part in _sampled(lm.model, [*before, *tokens]) for value in part.logprobs.tolist()]
    if any(math.isnan(value) for value in predicted):
        raise GenerationError("the model's logits are not numbers", "a checkpoint without NaN")
    logprobs: list[float | None] = [*([] if before else [None]), *predicted[max(0, len(before) - 1) :]]
    total = math.fsum(value for value in logprobs if value is not None)
    unpredicted = 0 if before else len(first_token_bytes(lm.tokenizer, tokens[0]))
    num_bytes = len(text.encode("utf-8")) - unpredicted
    return Score(tokens, logprobs, total, -total / math.log(2) / num_bytes if num_bytes > 0 else math.nan)


def first_token_bytes(tokenizer: Tokenizer, id: int) -> bytes:
    """The bytes of a text's first token, without a space that `encode` has put in front."""
    content = tokenizer.token_bytes(id) if tokenizer.has_byte_tokens else tokenizer.decode([id]).encode("utf-8")
    return content.removeprefix(b" ") if tokenizer.adds_dummy_prefix else content


def prompt_logprobs(lm: LoadedModel, ids: Sequence[int], top_logprobs: int = 0) -> list[TokenLogprobs]:
    """The log-probability of each token but the first, and the most likely tokens in its place.

    Raises:
        GenerationError: For a prompt that is empty, too long or has unknown ids.
    """
    max_new_tokens_for(lm, ids, KVOptions())
    lm.check_whole("log-probabilities of prompts")
    parts = _sampled(lm.model, ids, top_logprobs)
    return [part.read(row, lm.tokenizer.token_bytes) for part in parts for row in range(part.tokens.size)]


def _sampled(model: nn.Module, ids: Sequence[int], top_logprobs: int = 0) -> Iterator[SampledLogprobs]:
    """Yield the log-probabilities of all tokens but the first, `_CHUNK_SIZE` at a time, computed."""
    context = Context(model)
    context.trim_to_prefix(ids)  # tells the caches how long the text is
    for start in range(0, len(ids) - 1, _CHUNK_SIZE):
        chunk = mx.array([ids[start : start + _CHUNK_SIZE + 1]])
        logits = model(chunk[:, :-1], cache=context.caches)[0]
        sampled = SampledLogprobs.compute(logits, chunk[0, 1:], top_logprobs)
        eval_caches(context.caches, sampled.tokens, *sampled.arrays())
        yield sampled

"""DRY ("don't repeat yourself", p-e-w 2024): a penalty for tokens that would extend a repeated sequence."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.logit_filters import Numbers
from mlxlm.generation.options import GenerationOptions
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_MAX_PENALTY = 1e6  # bans a token as well as any larger penalty; an infinite one would give NaN


def apply_dry(logits: mx.array, numbers: Numbers, tokens: mx.array, match_lengths: mx.array) -> mx.array:
    """Penalize every token that would extend a repetition of the last n tokens, n >= dry_allowed_length.

    The penalty is dry_multiplier * dry_base^(n - dry_allowed_length), for the largest n of each token.

    Args:
        logits: float32 `[R, V]`.
        numbers: Those of the options of DRY, by name.
        tokens: int32 `[R, W]`, the last W tokens, -1 for none and for sequence breakers.
        match_lengths: int32 `[R, W]`, see `update_match_lengths`.
    """
    window = tokens.shape[1]
    lengths = mx.minimum(match_lengths, mx.arange(1, window + 1))[:, :-1]  # no match starts before the window
    next_tokens = tokens[:, 1:]
    excess = lengths - numbers["dry_allowed_length"]
    penalty = numbers["dry_multiplier"] * mx.power(numbers["dry_base"], excess)
    applies = (excess >= 0) & (next_tokens >= 0)
    penalty = mx.where(applies, mx.minimum(penalty, _MAX_PENALTY), 0)
    rows = mx.arange(logits.shape[0])[:, None]
    return logits - mx.zeros(logits.shape).at[rows, mx.maximum(next_tokens, 0)].maximum(penalty)


def update_match_lengths(match_lengths: mx.array, tokens: mx.array, new: mx.array) -> mx.array:
    """Match lengths after one more token, so that a token costs one step.

    `match_lengths[i]` is the number of tokens ending at i that equal the last tokens. With a new token it becomes
    `match_lengths[i - 1] + 1` where `tokens[i]` is that token, and 0 elsewhere.

    Args:
        match_lengths: int32 `[R, W]`, before the new token.
        tokens: int32 `[R, W]`, the last W tokens, the new one included.
        new: int32 `[R, 1]`, the new token, -1 for a sequence breaker.
    """
    # The tokens have moved one to the left, so that entry i is what was at i - 1. The last entry, where the new token
    # matches itself, isn't read.
    return mx.where((tokens == new) & (new >= 0), match_lengths + 1, 0)


def initial_match_lengths(tokens: np.ndarray) -> np.ndarray:
    """The match lengths `[W]` of a prompt's last W tokens; -1 matches nothing."""
    size = len(tokens)
    match_lengths = np.zeros(size, np.int32)
    matching = np.arange(size) < size - 1
    for back in range(size):
        token = tokens[size - 1 - back]
        matching[back:] &= tokens[: size - back] == token
        matching[:back] = False
        if token < 0 or not matching.any():
            break
        match_lengths += matching
    return match_lengths


def mask_breakers(tokens: mx.array, breakers: mx.array | None) -> mx.array:
    """`tokens` with -1 for sequence breakers. `breakers`: the mask of `dry_breaker_mask`."""
    if breakers is None:
        return tokens
    return mx.where(breakers[mx.clip(tokens, 0, len(breakers) - 1)], -1, tokens)


def dry_breaker_mask(options: GenerationOptions, tokenizer: Tokenizer | None) -> mx.array | None:
    """Which tokens contain one of `dry_sequence_breakers`. Cached; computed in a second or less.

    Returns:
        bool `[vocab_size + 1]`; the last entry, for ids without a token, is False. None if DRY or its breakers are off.

    Raises:
        GenerationError: If there is no tokenizer, or no token contains a breaker of several characters.
    """
    if not options.dry_multiplier or not options.dry_sequence_breakers:
        return None
    if tokenizer is None:
        raise GenerationError("dry_sequence_breakers need a tokenizer", "dry_sequence_breakers=()")
    return _breaker_mask(options.dry_sequence_breakers, tokenizer)


@lru_cache(maxsize=8)
def _breaker_mask(breakers: tuple[str, ...], tokenizer: Tokenizer) -> mx.array:
    texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
    for name, id in tokenizer.special_tokens.items():
        texts[id] = name.encode("utf-8")
    mask = [False] * (len(texts) + 1)
    for breaker in breakers:
        content = breaker.encode("utf-8", "surrogatepass")
        ids = [id for id, text in enumerate(texts) if content in text]
        if not ids and len(breaker) > 1:
            raise GenerationError(
                f"dry_sequence_breakers: no token contains {breaker!r}", "a single character, such as ':'"
            )
        for id in ids:
            mask[id] = True
    return mx.array(mask)

"""Logit bias and penalties for repeated tokens: the repetition, presence and frequency penalties, and DRY."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from mlxlm.backend.mlx import compile_on_gpu, mx
from mlxlm.generation.logit_filters import Number, Numbers
from mlxlm.generation.options import GenerationOptions
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_MAX_PENALTY = 1e6  # bans a token as well as any larger penalty; an infinite one would give NaN
_NUMBERS = (
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry_multiplier", "dry_base", "dry_allowed_length"
)  # fmt: skip


@dataclass(frozen=True)
class PenaltyState:
    """The earlier tokens that penalties depend on, for R rows, on the device. None for a penalty that is off.

    Attributes:
        recent_tokens: int32 `[R, repetition_context_size]`, -1 before the first token.
        token_counts: int32 `[R, V]`, how often each token was generated.
        dry_tokens: int32 `[R, dry_penalty_last_n]`, -1 before the first token and for every sequence breaker.
        dry_match_lengths: int32 `[R, dry_penalty_last_n]`, see `update_match_lengths`.
    """

    recent_tokens: mx.array | None = None
    token_counts: mx.array | None = None
    dry_tokens: mx.array | None = None
    dry_match_lengths: mx.array | None = None

    @classmethod
    def from_prompt(
        cls, options: GenerationOptions, prompt: Sequence[int], vocab_size: int, breakers: mx.array | None
    ) -> PenaltyState:
        """The state of one row after its prompt. `breakers`: see `dry_breaker_mask`."""
        recent_tokens = token_counts = dry_tokens = dry_match_lengths = None
        if options.repetition_penalty != 1:
            recent_tokens = mx.array(_last_tokens(prompt, options.repetition_context_size))[None]
        if options.presence_penalty or options.frequency_penalty:
            token_counts = mx.zeros((1, vocab_size), mx.int32)
        if options.dry_multiplier:
            tokens = np.array(mask_breakers(mx.array(_last_tokens(prompt, options.dry_penalty_last_n)), breakers))
            dry_tokens, dry_match_lengths = mx.array(tokens)[None], mx.array(initial_match_lengths(tokens))[None]
        return cls(recent_tokens, token_counts, dry_tokens, dry_match_lengths)

    @classmethod
    def stack_rows(cls, rows: Sequence[tuple[PenaltyState, int]]) -> PenaltyState:
        """Stack row `rows[i][1]` of state `rows[i][0]`. All rows of one state, in order, are that state itself."""
        first = rows[0][0]
        if all(state is first for state, _ in rows) and [row for _, row in rows] == list(range(first.num_rows)):
            return first
        return cls(*(_stack([(getattr(state, f.name), row) for state, row in rows]) for f in fields(cls)))

    @property
    def empty(self) -> bool:
        """Whether all penalties are off."""
        return all(array is None for array in self.arrays)

    @property
    def num_rows(self) -> int:
        """R; 1 if all penalties are off."""
        return next((len(array) for array in self.arrays if array is not None), 1)

    def with_tokens(self, tokens: mx.array, breakers: mx.array | None) -> PenaltyState:
        """The state after one more token in each row, `tokens` `[R]`."""
        return self if self.empty else PenaltyState(*_add_tokens(self.arrays, tokens, breakers))

    @property
    def arrays(self) -> tuple[mx.array | None, ...]:
        """All arrays, in the order above."""
        return self.recent_tokens, self.token_counts, self.dry_tokens, self.dry_match_lengths


@compile_on_gpu
def _add_tokens(
    arrays: tuple[mx.array | None, ...], tokens: mx.array, breakers: mx.array | None
) -> tuple[mx.array | None, ...]:
    recent_tokens, token_counts, dry_tokens, dry_match_lengths = arrays
    tokens = tokens.astype(mx.int32)[:, None]
    if recent_tokens is not None:
        recent_tokens = mx.concatenate([recent_tokens[:, 1:], tokens], axis=1)
    if token_counts is not None:
        token_counts = token_counts.at[mx.arange(len(tokens))[:, None], tokens].add(1)
    if dry_tokens is not None:
        tokens = mask_breakers(tokens, breakers)
        dry_tokens = mx.concatenate([dry_tokens[:, 1:], tokens], axis=1)
        dry_match_lengths = update_match_lengths(dry_match_lengths, dry_tokens, tokens)
    return recent_tokens, token_counts, dry_tokens, dry_match_lengths


def penalty_numbers(options: GenerationOptions) -> dict[str, float]:
    """The numbers of the penalties, by the names of their options."""
    return {name: getattr(options, name) for name in _NUMBERS}


def apply_penalties(logits: mx.array, numbers: Numbers, state: PenaltyState, logit_bias: mx.array | None) -> mx.array:
    """Apply logit bias, repetition, presence and frequency penalties, and DRY, in this order.

    Args:
        logits: `[R, V]`, any float dtype.
        numbers: Those of `penalty_numbers`.
        state: The earlier tokens of each row.
        logit_bias: What to add to the logits, float32 `[V]`.

    Returns:
        float32 `[R, V]`.
    """
    logits = logits.astype(mx.float32)
    if logit_bias is not None:
        logits = logits + logit_bias
    if state.recent_tokens is not None:
        logits = apply_repetition_penalty(logits, state.recent_tokens, numbers["repetition_penalty"])
    if state.token_counts is not None:
        logits = apply_count_penalties(
            logits, state.token_counts, numbers["presence_penalty"], numbers["frequency_penalty"]
        )
    if state.dry_tokens is not None:
        logits = apply_dry(logits, numbers, state.dry_tokens, state.dry_match_lengths)
    return logits


def apply_repetition_penalty(logits: mx.array, recent_tokens: mx.array, penalty: Number) -> mx.array:
    """Divide positive logits of `recent_tokens` by `penalty`, multiply negative ones (Keskar et al. 2019, 4.1).

    Args:
        logits: float32 `[R, V]`.
        recent_tokens: int32 `[R, n]`, -1 for no token, which only tokens follow.
        penalty: Above 1 makes the tokens less likely.
    """
    last = recent_tokens[:, -1:]
    ids = mx.maximum(mx.where(recent_tokens >= 0, recent_tokens, last), 0)
    values = mx.take_along_axis(logits, ids, axis=-1)
    penalized = mx.where(values < 0, values * penalty, values / penalty)
    return mx.put_along_axis(logits, ids, mx.where(last >= 0, penalized, values), axis=-1)


def apply_count_penalties(
    logits: mx.array, token_counts: mx.array, presence_penalty: Number, frequency_penalty: Number
) -> mx.array:
    """Subtract the presence penalty once from every generated token, the frequency penalty for each occurrence.

    As in OpenAI's API. `token_counts`: int32 `[R, V]`.
    """
    return logits - ((token_counts > 0) * presence_penalty + token_counts * frequency_penalty)


def apply_dry(logits: mx.array, numbers: Numbers, tokens: mx.array, match_lengths: mx.array) -> mx.array:
    """DRY, "don't repeat yourself" (p-e-w 2024): penalize tokens that would extend a repetition of the last n tokens.

    The penalty is dry_multiplier * dry_base^(n - dry_allowed_length), for the largest n >= dry_allowed_length of each.

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


def _last_tokens(prompt: Sequence[int], count: int) -> np.ndarray:
    """The last `count` tokens, int32, padded with -1 at the front."""
    tokens = np.full(count, -1, np.int32)
    last = prompt[-count:]
    tokens[count - len(last) :] = last
    return tokens


def _stack(rows: list[tuple[mx.array | None, int]]) -> mx.array | None:
    arrays = [array[row : row + 1] for array, row in rows if array is not None]
    return mx.concatenate(arrays) if arrays else None

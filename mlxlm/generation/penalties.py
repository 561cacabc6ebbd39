"""Logit bias and penalties for repeated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mlxlm.backend.mlx import compile_on_gpu, mx
from mlxlm.generation.dry import apply_dry, initial_match_lengths, mask_breakers, update_match_lengths
from mlxlm.generation.logit_filters import Number, Numbers
from mlxlm.generation.options import GenerationOptions


@dataclass(frozen=True)
class PenaltyState:
    """The earlier tokens that penalties depend on, for R rows, on the device. None for a penalty that is off.

    Attributes:
        recent_tokens: int32 `[R, repetition_context_size]`, -1 before the first token.
        token_counts: int32 `[R, V]`, how often each token was generated.
        dry_tokens: int32 `[R, dry_penalty_last_n]`, -1 before the first token and for every sequence breaker.
        dry_match_lengths: int32 `[R, dry_penalty_last_n]`, see `dry.update_match_lengths`.
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
    names = [
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
    ]
    return {name: getattr(options, name) for name in names}


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


def _last_tokens(prompt: Sequence[int], count: int) -> np.ndarray:
    """The last `count` tokens, int32, padded with -1 at the front."""
    tokens = np.full(count, -1, np.int32)
    last = prompt[-count:]
    tokens[count - len(last) :] = last
    return tokens


def _stack(rows: list[tuple[mx.array | None, int]]) -> mx.array | None:
    arrays = [array[row : row + 1] for array, row in rows if array is not None]
    return mx.concatenate(arrays) if arrays else None

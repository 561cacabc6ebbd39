"""What changes the logits before a draw: biases, and penalties for what was said already."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.options import SamplingOptions
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_HARDEST = 1e6  # a larger DRY penalty bans no more than this one, and an infinite one would leave no number


@dataclass(frozen=True)
class PenaltyState:
    """What the penalties of some rows look back on; all of it on the device, each array's first axis the rows.

    recent_tokens: int32 `[R, repetition_window]`, -1 before the first token; None without a repetition penalty.
    token_counts: int32 `[R, V]`, how often each token was generated; None without a penalty for it.
    dry_tokens: int32 `[R, dry_window]`, -1 before the first token and for every breaker; None without DRY.
    dry_match_lengths: int32 `[R, dry_window]`: how many tokens that end there equal the last tokens of all. With a new token t,
        matches[i] becomes matches[i - 1] + 1 where said[i] = t and 0 elsewhere, so that a token costs one step.
    """

    recent_tokens: mx.array | None = None
    token_counts: mx.array | None = None
    dry_tokens: mx.array | None = None
    dry_match_lengths: mx.array | None = None

    @classmethod
    def of(cls, options: SamplingOptions, prompt: Sequence[int], size: int, breakers: mx.array | None) -> PenaltyState:
        """One row, after `prompt`, for a vocabulary of `size`."""
        recent_tokens = token_counts = dry_tokens = dry_match_lengths = None
        if options.repetition_penalty != 1:
            recent_tokens = mx.array(_last(prompt, options.repetition_context_size))[None]
        if options.presence_penalty or options.frequency_penalty:
            token_counts = mx.zeros((1, size), mx.int32)
        if options.dry_multiplier:
            tokens = _last(prompt, options.dry_penalty_last_n)
            if breakers is not None:
                tokens = np.array(_without_breakers(mx.array(tokens), breakers))
            dry_tokens, dry_match_lengths = mx.array(tokens)[None], mx.array(_matches(tokens))[None]
        return cls(recent_tokens, token_counts, dry_tokens, dry_match_lengths)

    @classmethod
    def stack_rows(cls, rows: Sequence[tuple[PenaltyState, int]]) -> PenaltyState:
        """The rows `history[i]` of every pair side by side; those of one history in its order as they are."""
        first = rows[0][0]
        if all(history is first for history, _ in rows) and [row for _, row in rows] == list(range(first.rows)):
            return first
        return cls(*(_joined([(getattr(h, f.name), row) for h, row in rows]) for f in fields(cls)))

    @property
    def empty(self) -> bool:
        """Whether no penalty looks back."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def rows(self) -> int:
        return next((len(array) for field in fields(self) if (array := getattr(self, field.name)) is not None), 1)

    def with_token(self, tokens: mx.array, breakers: mx.array | None) -> PenaltyState:
        """With one more token in each row, `[R]`."""
        recent_tokens, token_counts, dry_tokens, dry_match_lengths = (
            self.recent_tokens,
            self.token_counts,
            self.dry_tokens,
            self.dry_match_lengths,
        )
        tokens = tokens.astype(mx.int32)[:, None]
        if recent_tokens is not None:
            recent_tokens = mx.concatenate([recent_tokens[:, 1:], tokens], axis=1)
        if token_counts is not None:
            token_counts = token_counts.at[mx.arange(len(tokens))[:, None], tokens].add(1)
        if dry_tokens is not None:
            tokens = tokens if breakers is None else _without_breakers(tokens, breakers)
            dry_tokens = mx.concatenate([dry_tokens[:, 1:], tokens], axis=1)
            # The tokens have moved one to the left: what matched before a token lies at its place. Nothing reads the
            # last entry, where the last token matches itself.
            dry_match_lengths = mx.where((dry_tokens == tokens) & (tokens >= 0), dry_match_lengths + 1, 0)
        return PenaltyState(recent_tokens, token_counts, dry_tokens, dry_match_lengths)


def apply_penalties(
    logits: mx.array, options: SamplingOptions, history: PenaltyState, biases: tuple[mx.array, mx.array] | None = None
) -> mx.array:
    """The logits `[R, V]` as float32, after logit_bias and the penalties, in this order:

    1. logit_bias, added: `biases`, ids and float32 values;
    2. repetition penalty, on every token of the last repetition_window, prompt included: positive logits divided by
       it, negative ones multiplied (Keskar et al. 2019, 4.1);
    3. presence penalty, subtracted once from every token generated, and frequency penalty, for each time it was
       (as in OpenAI's interface);
    4. DRY ("don't repeat yourself", p-e-w 2024): where the last n tokens, n >= dry_allowed_length, stood in the last
       dry_window before, the token that followed them there loses dry_multiplier * dry_base^(n - dry_allowed_length),
       for the largest n.
    """
    logits = logits.astype(mx.float32)
    if biases is not None:
        ids, values = biases
        logits = logits.at[:, ids].add(values)
    if history.recent_tokens is not None:
        ids = mx.maximum(history.recent_tokens, 0)
        values = mx.take_along_axis(logits, ids, axis=-1)
        penalty = options.repetition_penalty
        ids = mx.where(history.recent_tokens >= 0, ids, logits.shape[-1])
        values = mx.where(values < 0, values * penalty, values / penalty)
        # One more column takes what stands for no token.
        spare = mx.zeros((logits.shape[0], 1))
        logits = mx.put_along_axis(mx.concatenate([logits, spare], axis=-1), ids, values, axis=-1)[:, :-1]
    if history.token_counts is not None:
        generated = (
            history.token_counts > 0
        ) * options.presence_penalty + history.token_counts * options.frequency_penalty
        logits = logits - generated
    if history.dry_tokens is not None:
        logits = logits - _dry_penalties(logits.shape, options, history)
    return logits


def _dry_penalties(shape: tuple[int, ...], options: SamplingOptions, history: PenaltyState) -> mx.array:
    window = history.dry_tokens.shape[1]
    lengths = mx.minimum(history.dry_match_lengths, mx.arange(1, window + 1))[:, :-1]  # no match goes beyond the window
    following = history.dry_tokens[:, 1:]
    penalty = options.dry_multiplier * mx.power(options.dry_base, lengths - options.dry_allowed_length)
    applies = (lengths >= options.dry_allowed_length) & (following >= 0)
    penalty = mx.where(applies, mx.minimum(penalty, _HARDEST), 0)
    rows = mx.arange(shape[0])[:, None]
    return mx.zeros(shape).at[rows, mx.maximum(following, 0)].maximum(penalty)


def _last(prompt: Sequence[int], window: int) -> np.ndarray:
    tokens = np.full(window, -1, np.int32)
    given = prompt[-window:]
    tokens[window - len(given) :] = given
    return tokens


def _matches(tokens: np.ndarray) -> np.ndarray:
    """`PenaltyState.dry_match_lengths` after these tokens, `[W]`."""
    size = len(tokens)
    dry_match_lengths = np.zeros(size, np.int32)
    alive = np.arange(size) < size - 1
    for back in range(size):
        wanted = tokens[size - 1 - back]
        alive[back:] &= tokens[: size - back] == wanted
        alive[:back] = False
        if wanted < 0 or not alive.any():
            break
        dry_match_lengths += alive
    return dry_match_lengths


def _joined(rows: list[tuple[mx.array | None, int]]) -> mx.array | None:
    return None if rows[0][0] is None else mx.concatenate([array[row : row + 1] for array, row in rows])


def _without_breakers(tokens: mx.array, breakers: mx.array) -> mx.array:
    return mx.where(breakers[mx.clip(tokens, 0, len(breakers) - 1)], -1, tokens)


_breakers: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], mx.array]] = weakref.WeakKeyDictionary()


def dry_breaker_mask(options: SamplingOptions, tokenizer: Tokenizer | None) -> mx.array | None:
    """Bool `[vocab_size + 1]`, the tokens whose text has one of `dry_sequence_breakers` in it (the last entry, for ids without a
    token, is False); None where nothing needs it. Made once per tokenizer, in a second or less.

    Raises GenerationError for a breaker of several characters that no token has in it: it could never act.
    """
    if not options.dry_multiplier or not options.dry_sequence_breakers:
        return None
    if tokenizer is None:
        raise GenerationError("dry_sequence_breakers need a tokenizer", "dry_sequence_breakers=()")
    made = _breakers.setdefault(tokenizer, {})
    if options.dry_sequence_breakers not in made:
        texts = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        for name, id in tokenizer.special_tokens.items():
            texts[id] = name.encode("utf-8")
        table = [False] * (len(texts) + 1)
        for breaker in options.dry_sequence_breakers:
            sought = breaker.encode("utf-8", "surrogatepass")
            found = [id for id, text in enumerate(texts) if sought in text]
            if not found and len(breaker) > 1:
                raise GenerationError(
                    f"dry_sequence_breakers: no token contains {breaker!r}", "one character, such as ':'"
                )
            for id in found:
                table[id] = True
        made[options.dry_sequence_breakers] = mx.array(table)
    return made[options.dry_sequence_breakers]

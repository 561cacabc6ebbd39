"""From logits to tokens: seeded draws, each row by its own settings and noise, all on the device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Sequence

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.constraint import Grammar, apply_token_bitmask
from mlxlm.generation.gumbel_noise import gumbel_noise, token_noise
from mlxlm.generation.logit_filters import filter_logits
from mlxlm.generation.logprobs import SampledLogprobs, TokenLogprobs
from mlxlm.generation.options import SamplingOptions
from mlxlm.generation.penalties import PenaltyState, apply_penalties, dry_breaker_mask
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

# The options that decide what happens to a row's logits: rows with the same ones are drawn together.
_SHAPING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
)


class Sampler:
    """Draws the tokens of one text: `sampler(logits [1, V]) -> token [1]`, int32, without reading either. The token is
    -1 where the highest logit isn't finite; `accept` raises for it.

    The order: logit bias, repetition penalty, presence and frequency penalties, DRY, the constraint, temperature,
    top-k, typical, top-p, min-p, XTC, and the draw: the token of the highest logit plus noise of Gumbel's
    distribution, which follows the softmax of the logits (Gumbel 1954; Maddison et al. 2014, 2). With temperature 0
    it is the highest logit after the constraint.

    The noise of token t is a function of the seed and of t alone, so that a text depends neither on what else the
    process draws nor on the rows that are drawn with it, and that a model whose logits are like another's mostly draws
    the same tokens with the same seed.

    With a constraint `needs_last_token` is True: a draw needs to know every token before it, by `accept`.
    """

    def __init__(
        self,
        options: SamplingOptions,
        prompt: Sequence[int],
        seed: int,
        *,
        tokenizer: Tokenizer | None = None,
        grammar: Grammar | None = None,
    ):
        """`prompt`: the ids before the text, which the repetition penalty and DRY look back on. `tokenizer`: needed
        for DRY's breakers. `grammar`: what `options` constrain the text to, compiled.

        Raises GenerationError for DRY's breakers without a tokenizer, or for those that it doesn't have.
        """
        self.options = options
        self._prompt = prompt
        self._seed = seed
        self._step = 0
        self._breakers = dry_breaker_mask(options, tokenizer)
        biases = np.array(list(options.logit_bias), np.int32), np.array(list(options.logit_bias.values()), np.float32)
        self._biases = tuple(map(mx.array, biases)) if options.logit_bias else None
        self._logprobs = options.logprobs
        self._matcher = grammar and grammar.matcher()
        self._history: tuple[PenaltyState, int] | None = None  # a row of one that rows drawn together share
        self._drawn: deque[tuple[SampledLogprobs, int]] = deque()
        self._ahead: mx.array | None = None  # the logits of the last `verify_draft`
        shaping = (getattr(options, name) for name in _SHAPING)
        # Biases as bytes, which are hashed once and not at every draw.
        self._shaping = *shaping, *(array.tobytes() for array in biases), id(self._breakers), self.needs_last_token

    @property
    def _kind(self) -> Hashable:
        """What rows that are drawn together have in common."""
        return self._shaping, self._logprobs

    @property
    def needs_last_token(self) -> bool:
        """Whether the next draw needs the value of the last token."""
        return self._matcher is not None

    @property
    def finished(self) -> bool:
        """Whether the text is all that a constraint asks for, and nothing can follow."""
        return self._matcher is not None and self._matcher.finished

    @property
    def error(self) -> str | None:
        """Why a constraint can't go on: it must not be drawn from then. None if it can, or there is none."""
        return None if self._matcher is None else self._matcher.error

    @property
    def constraint_error(self) -> str | None:
        """Why the text, if it ends with the tokens observed, isn't what a constraint asks for; None if it is."""
        return None if self._matcher is None else self._matcher.constraint_error

    def constraint_error_of(self, text: str) -> str | None:
        """`constraint_error`, of a text that a stop string has cut short."""
        return None if self._matcher is None else self._matcher.constraint_error_of(text)

    def accept(self, token: int) -> None:
        """Tell the token that was drawn, in order; where the sampler `needs_last_token`, before the next draw.

        Raises GenerationError for -1: the model's logits weren't numbers.
        """
        if token < 0:
            raise GenerationError(
                "the model's logits are not numbers", "a checkpoint without NaN; for float16, the model in float32"
            )
        if self._matcher is not None:
            self._matcher.consume(token)

    def __call__(self, logits: mx.array) -> mx.array:
        """Draw the next token `[1]` from logits `[1, V]`. Raises GenerationError for a logit_bias or logprobs beyond
        the vocabulary."""
        return sample_batch([self], logits)

    def verify_draft(self, logits: mx.array, draft: mx.array) -> tuple[mx.array, mx.array]:
        """What is drawn at each of k + 1 places if the draft's tokens before it are, and by how much.

        `logits` `[k + 1, V]`, `draft` `[k]`: tokens `[k + 1]`, and float32 `[k + 1]` the lead of each over the
        runner-up, in units of the logits. A lead says nothing of a token at the very threshold of a filter, which
        rounding may keep or drop. Nothing advances. Reads `draft` only with a constraint.
        """
        places = range(len(logits))
        history, row = self._started(logits.shape[-1])
        histories = [(history, row)]
        for place in places[1:]:
            if not history.empty:
                history, row = self._after(history, row, draft[place - 1 : place])
            histories.append((history, row))
        token_bitmask = None if self._matcher is None else self._matcher.draft_token_bitmasks(draft.tolist())
        steps = [(self._seed, self._step + place) for place in places]
        scores = _scores(logits, self, PenaltyState.stack_rows(histories), token_bitmask, steps)
        best = mx.sort(mx.topk(scores, min(2, scores.shape[-1]), axis=-1), axis=-1)
        self._ahead = logits
        return _winners(scores), (best[:, -1] - best[:, 0]) * (self.options.temperature or 1)

    def accept_draft(self, tokens: mx.array) -> None:
        """Take `tokens` `[n]` as drawn: the first n of what the last `verify_draft` returned, whose logits are theirs."""
        history, row = self._started(self._ahead.shape[-1])
        for place in range(len(tokens)):
            if not history.empty:
                history, row = self._after(history, row, tokens[place : place + 1])
        self._history = history, row
        self._step += len(tokens)
        self._keep_logprobs([self], self._ahead[: len(tokens)], tokens)
        self._ahead = None

    def fork(self) -> Sampler:
        """A sampler at the same place of the same text, with the same noise and its own future."""
        other = copy.copy(self)
        other._matcher = self._matcher and self._matcher.copy()
        other._drawn = deque()
        other._logprobs = None  # nobody reads them
        return other

    def pop_logprobs(self) -> TokenLogprobs | None:
        """Those of the oldest token drawn that weren't taken yet; None without the option. Reads the device."""
        if not self._drawn:
            return None
        drawn, row = self._drawn.popleft()
        return drawn.read(row)

    def _started(self, vocab_size: int) -> tuple[PenaltyState, int]:
        if self._history is None:
            self.options.check_vocabulary(vocab_size)
            self._history = PenaltyState.of(self.options, self._prompt, vocab_size, self._breakers), 0
        return self._history

    def _after(self, history: PenaltyState, row: int, token: mx.array) -> tuple[PenaltyState, int]:
        return PenaltyState.stack_rows([(history, row)]).with_token(token, self._breakers), 0

    @staticmethod
    def _keep_logprobs(samplers: Sequence[Sampler], logits: mx.array, tokens: mx.array) -> mx.array:
        """`tokens`, which can't be evaluated without what is kept: no logits wait for someone to read a number."""
        n = samplers[0]._logprobs
        if n is None:
            return tokens
        drawn = SampledLogprobs.of(logits, tokens, n)
        for row in range(len(tokens)):
            samplers[row % len(samplers)]._drawn.append((drawn, row))
        return mx.depends([tokens], drawn.arrays())[0]


def sample_batch(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """A token for each row of logits `[R, V]`, drawn by its own sampler: `[R]`, evaluating nothing.

    Each row is what its sampler alone draws, bit for bit. Rows of equal settings are drawn together.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler._kind, []).append(row)
    if len(groups) == 1:
        return _draw(samplers, logits)
    drawn = [_draw([samplers[row] for row in rows], logits[mx.array(rows)]) for rows in groups.values()]
    places = np.argsort([row for rows in groups.values() for row in rows])
    return mx.concatenate(drawn)[mx.array(places)]


def _draw(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    first = samplers[0]
    history = PenaltyState.stack_rows([sampler._started(logits.shape[-1]) for sampler in samplers])
    token_bitmask = [sampler._matcher.token_bitmask() for sampler in samplers] if first.needs_last_token else None
    steps = [(sampler._seed, sampler._step) for sampler in samplers]
    tokens = _winners(_scores(logits, first, history, token_bitmask, steps))
    history = history if history.empty else history.with_token(tokens, first._breakers)
    for row, sampler in enumerate(samplers):
        sampler._history = history, row
        sampler._step += 1
    return Sampler._keep_logprobs(samplers, logits, tokens)


def _scores(
    logits: mx.array,
    sampler: Sampler,
    history: PenaltyState,
    token_bitmask: Sequence[np.ndarray] | None,
    steps: Sequence[tuple[int, int]],
) -> mx.array:
    """What the highest of is drawn: `[R, V]`. `sampler`: that of any row, for what they have in common. `steps`: seed
    and number of the token of every row."""
    options, biases = sampler.options, sampler._biases
    if biases is not None or not history.empty:
        logits = apply_penalties(logits, options, history, biases)
    if token_bitmask is not None:
        logits = apply_token_bitmask(logits, token_bitmask)
    if options.temperature == 0:  # no filter takes the likeliest token away
        return logits
    noises = [token_noise(*step) for step in steps]
    excluded = [coin < options.xtc_probability for _, coin in noises]
    excluding = mx.array(excluded) if any(excluded) else None
    return filter_logits(logits, options, excluding) + gumbel_noise([key for key, _ in noises], logits.shape[-1])


def _winners(scores: mx.array) -> mx.array:
    """The place of the highest score of each row, int32 `[R]`; -1 where that isn't a finite number, and neither was
    the highest logit."""
    return mx.where(mx.isfinite(scores.max(axis=-1)), mx.argmax(scores, axis=-1).astype(mx.int32), -1)

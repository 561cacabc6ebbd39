"""Sampling: from logits to tokens, on the device, with a seed per text."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.constraint import Grammar
from mlxlm.generation.logits_processor import LogitsProcessor
from mlxlm.generation.logprobs import SampledLogprobs, TokenLogprobs
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.penalties import PenaltyState, dry_breaker_mask
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

SamplerSnapshot = tuple[tuple[PenaltyState, int] | None, int]  # penalty state and its row, number of tokens drawn


class Sampler:
    """Draws the tokens of one text: `sampler(logits [1, V]) -> token [1]`, int32, without evaluating either.

    The order of the steps is that of `GenerationOptions`. The last is the draw: the highest logit plus Gumbel noise,
    which follows the softmax of the logits (Gumbel 1954; Maddison et al. 2014, section 2). At temperature 0 it is the
    highest logit. The token is -1 if the highest logit isn't finite; `accept` raises for it.

    The noise of token t depends on the seed and on t alone. So a text depends neither on what else the process draws
    nor on the other rows of a batch, and two similar models mostly draw the same tokens with the same seed.

    Attributes:
        options: The settings.
        processor: What is done to the logits.
        matcher: The state of the constraint, None without one.
        seed: The seed of the text.
        step: How many tokens were drawn.
        num_logprobs: How many of the most likely tokens to report for each token; None for no log-probabilities.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt: Sequence[int],
        seed: int,
        *,
        tokenizer: Tokenizer | None = None,
        grammar: Grammar | None = None,
    ):
        """Prepare to draw the tokens that follow `prompt`.

        Args:
            options: The settings.
            prompt: The ids before the text, for the repetition penalty and DRY.
            seed: The seed of the noise.
            tokenizer: Needed for DRY's sequence breakers.
            grammar: The compiled constraint of `options`.

        Raises:
            GenerationError: For sequence breakers that this tokenizer can't have.
        """
        self.options, self.seed, self.step = options, seed, 0
        self.processor = LogitsProcessor(options, dry_breaker_mask(options, tokenizer))
        self.matcher = None if grammar is None else grammar.matcher()
        self.num_logprobs = options.logprobs
        self._prompt = prompt
        self._penalty_row: tuple[PenaltyState, int] | None = None  # a row of a state that a batch may share
        self._logprobs: deque[tuple[SampledLogprobs, int]] = deque()

    @property
    def needs_last_token(self) -> bool:
        """Whether the value of the last token must be known before the next draw, as with a constraint."""
        return self.matcher is not None

    @property
    def ended(self) -> bool:
        """Whether the constraint allows no further token."""
        return self.matcher is not None and (self.matcher.finished or self.matcher.error is not None)

    def accept(self, token: int) -> None:
        """Advance the constraint by a drawn token; before the next draw if the sampler `needs_last_token`.

        Raises:
            GenerationError: For -1: the model's logits were not finite.
        """
        if token < 0:
            raise GenerationError(
                "the model's logits are not numbers", "a checkpoint without NaN; for float16, the model in float32"
            )
        if self.matcher is not None:
            self.matcher.consume(token)

    def __call__(self, logits: mx.array) -> mx.array:
        """Draw the next token, int32 `[1]`, from logits `[1, V]`.

        Raises:
            GenerationError: For logit_bias or logprobs beyond the vocabulary.
        """
        return sample_batch([self], logits)

    def penalty_row(self, vocab_size: int) -> tuple[PenaltyState, int]:
        """The penalty state of this text: a state, and its row there."""
        if self._penalty_row is None:
            self.options.check_vocabulary(vocab_size)
            state = PenaltyState.from_prompt(self.options, self._prompt, vocab_size, self.processor.breakers)
            self._penalty_row = state, 0
        return self._penalty_row

    def advance(self, penalty_row: tuple[PenaltyState, int], count: int = 1) -> None:
        """Note that `count` tokens were drawn, after which `penalty_row` is the penalty state."""
        self._penalty_row = penalty_row
        self.step += count

    def snapshot(self) -> SamplerSnapshot:
        """The state before the next draw, for `restore`. Without that of the constraint, which `accept` advances."""
        return self._penalty_row, self.step

    def restore(self, snapshot: SamplerSnapshot) -> None:
        """Return to a snapshot. Log-probabilities that weren't popped are dropped."""
        self._penalty_row, self.step = snapshot
        self._logprobs.clear()

    def verify_draft(self, logits: mx.array, draft: mx.array, margin: float | None) -> tuple[mx.array, mx.array | None]:
        """Draw at every position of a draft, as if the draft's tokens before it had been drawn. Advances nothing.

        `draft` is read only with a constraint.

        Args:
            logits: `[k + 1, V]`.
            draft: `[k]`.
            margin: As for `sample_with_certainty`.

        Returns:
            The tokens, int32 `[k + 1]`, and whether they are certain, bool `[k + 1]`; None if `margin` is None.
        """
        penalty_rows = self._penalty_rows(logits.shape[-1], draft)
        bitmasks = None if self.matcher is None else self.matcher.draft_token_bitmasks(draft.tolist())
        steps = [(self.seed, self.step + position) for position in range(len(logits))]
        return self.processor.draw(logits, PenaltyState.stack_rows(penalty_rows), bitmasks, steps, margin)

    def accept_draft(self, logits: mx.array, tokens: mx.array) -> None:
        """Take `tokens` `[n]`, the first n that `verify_draft` returned for `logits`, as drawn."""
        self.advance(self._penalty_rows(logits.shape[-1], tokens)[-1], len(tokens))
        record_logprobs([self], logits[: len(tokens)], tokens)

    def fork(self) -> Sampler:
        """A sampler in the same state, with the same noise, that advances on its own. It records no logprobs."""
        other = copy.copy(self)
        other.matcher = self.matcher and self.matcher.copy()
        other.num_logprobs, other._logprobs = None, deque()
        return other

    def add_logprobs(self, sampled: SampledLogprobs, row: int) -> None:
        """Keep row `row` of `sampled` for `pop_logprobs`."""
        self._logprobs.append((sampled, row))

    def pop_logprobs(self, bytes_of: Callable[[int], bytes | None] = lambda token: None) -> TokenLogprobs | None:
        """The log-probabilities of the oldest token not popped yet; None without the option. Waits for the device."""
        if not self._logprobs:
            return None
        sampled, row = self._logprobs.popleft()
        return sampled.read(row, bytes_of)

    def _penalty_rows(self, vocab_size: int, tokens: mx.array) -> list[tuple[PenaltyState, int]]:
        """The penalty state now, and after each of `tokens` `[n]`: n + 1 entries."""
        rows = [self.penalty_row(vocab_size)]
        for position in range(len(tokens)):
            state, row = rows[-1]
            if not state.empty:
                state = PenaltyState.stack_rows([(state, row)])
                state, row = state.with_tokens(tokens[position : position + 1], self.processor.breakers), 0
            rows.append((state, row))
        return rows


def sample_batch(samplers: Sequence[Sampler], logits: mx.array) -> mx.array:
    """Draw a token for each row of logits `[R, V]` with its own sampler: int32 `[R]`, without evaluating anything.

    Each row is bit for bit what its sampler draws alone. Rows with equal settings are drawn together.
    """
    return sample_with_certainty(samplers, logits, None)[0]


def sample_with_certainty(
    samplers: Sequence[Sampler], logits: mx.array, margin: float | None
) -> tuple[mx.array, mx.array | None]:
    """`sample_batch`, and which tokens are certain: those that no change of the logits by `margin` / 2 each can change.

    Tokens drawn with typical sampling, or where XTC removes tokens, are never certain.

    Returns:
        The tokens, int32 `[R]`, and whether they are certain, bool `[R]`; None if `margin` is None.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, sampler in enumerate(samplers):
        key = sampler.processor.key, sampler.num_logprobs, sampler.needs_last_token
        groups.setdefault(key, []).append(row)
    if len(groups) == 1:
        return _sample_group(samplers, logits, margin)
    drawn = [_sample_group([samplers[i] for i in rows], logits[mx.array(rows)], margin) for rows in groups.values()]
    tokens, certain = zip(*drawn, strict=True)
    order = mx.array(np.argsort([row for rows in groups.values() for row in rows]))
    return mx.concatenate(tokens)[order], None if margin is None else mx.concatenate(certain)[order]


def _sample_group(
    samplers: Sequence[Sampler], logits: mx.array, margin: float | None
) -> tuple[mx.array, mx.array | None]:
    """Sample for samplers with the same processor key and number of logprobs, all or none with a matcher."""
    processor = samplers[0].processor
    state = PenaltyState.stack_rows([sampler.penalty_row(logits.shape[-1]) for sampler in samplers])
    matchers = [sampler.matcher for sampler in samplers if sampler.matcher is not None]
    bitmasks = [matcher.token_bitmask() for matcher in matchers] or None
    steps = [(sampler.seed, sampler.step) for sampler in samplers]
    tokens, certain = processor.draw(logits, state, bitmasks, steps, margin)
    state = state.with_tokens(tokens, processor.breakers)
    for row, sampler in enumerate(samplers):
        sampler.advance((state, row))
    return record_logprobs(samplers, logits, tokens), certain


def record_logprobs(samplers: Sequence[Sampler], logits: mx.array, tokens: mx.array) -> mx.array:
    """Record the log-probabilities of `tokens` `[R]`, drawn from logits `[R, V]`, if requested.

    `samplers` has one sampler per row, or one for all rows.

    Returns:
        `tokens`, which now depend on the log-probabilities: evaluating them frees the logits.
    """
    num_logprobs = samplers[0].num_logprobs
    if num_logprobs is None:
        return tokens
    sampled = SampledLogprobs.compute(logits, tokens, num_logprobs)
    for row in range(len(tokens)):
        samplers[row % len(samplers)].add_logprobs(sampled, row)
    return mx.depends([tokens], sampled.arrays())[0]

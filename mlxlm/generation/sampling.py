"""Sampling: from logits to tokens, on the device, with a seed per text.

The steps are penalties, constraint, temperature, filters and the draw. On a GPU, all of it is one compiled function:
decoding a token with a small model takes about 200 launches, and each operation of a sampler that isn't fused would be
one more. What changes with the request or the token, such as the temperature and the keys of the noise, is an array, so
that the function isn't traced again. On a CPU, compiling takes seconds, and a launch costs nothing.

On a CPU it also tells which draws are certain, see `certainty`.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import fields

import numpy as np

from mlxlm.backend.mlx import ON_CPU, compile_on_gpu, mx
from mlxlm.generation.certainty import certain_draws, certain_filtered_draws, margin_numbers
from mlxlm.generation.constraint import Grammar, apply_token_bitmask, stack_token_bitmasks, without_tokens
from mlxlm.generation.gumbel_noise import negative_gumbel_noise, token_noise
from mlxlm.generation.logit_filters import (
    FilteredLogits,
    FilterOptions,
    Numbers,
    apply_filters,
    apply_temperature,
    filter_numbers,
)
from mlxlm.generation.options import GenerationOptions, PenaltyOptions
from mlxlm.generation.penalties import PenaltyState, apply_penalties, dry_breaker_mask, penalty_numbers
from mlxlm.generation.result import SampledLogprobs, TokenLogprobs
from mlxlm.generation.sampling_functions import SamplingFunctions
from mlxlm.kernels.metal import scalar
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

# What is done to the logits of a row depends on these, and on logit_bias, which is compared as bytes.
_SHARED = tuple(field.name for kind in (FilterOptions, PenaltyOptions) for field in fields(kind))


class LogitsProcessor:
    """From a model's logits to tokens, for all rows with the same settings.

    Attributes:
        options: The settings.
        breakers: The mask of DRY's sequence breakers.
        key: Equal for processors that do the same, so that their rows can be drawn together.
    """

    def __init__(self, options: GenerationOptions, breakers: mx.array | None):
        self.options, self.breakers = options, breakers
        self._bias_ids = np.array(list(options.logit_bias), np.int32)
        self._bias_values = np.array(list(options.logit_bias.values()), np.float32)
        shared = (getattr(options, name) for name in _SHARED)
        self.key: Hashable = (*shared, self._bias_ids.tobytes(), self._bias_values.tobytes(), id(breakers))
        self._arguments: dict[tuple[int, float | None], tuple[Numbers, mx.array | None]] = {}  # that tokens share

    def draw(
        self,
        logits: mx.array,
        state: PenaltyState,
        token_bitmasks: Sequence[np.ndarray] | None,
        steps: Sequence[tuple[int, int]],
        margin: float | None,
    ) -> tuple[mx.array, mx.array | None]:
        """Draw a token from each row of logits `[R, V]`.

        Args:
            logits: `[R, V]`, any float dtype.
            state: The earlier tokens of each row.
            token_bitmasks: The tokens that each row may draw; None for all.
            steps: Each row's seed and the number of its token.
            margin: See `sample_with_certainty`. None on a GPU.

        Returns:
            The tokens, int32 `[R]`, -1 if the highest logit isn't finite; and whether they are certain, bool `[R]`.
        """
        options, vocab_size = self.options, logits.shape[-1]
        key = vocab_size, margin
        if key not in self._arguments:
            self._arguments[key] = self._numbers(vocab_size, margin), self._bias(vocab_size)
        numbers, bias = self._arguments[key]
        words = None if token_bitmasks is None else stack_token_bitmasks(token_bitmasks, vocab_size)
        if options.temperature == 0:
            return _draw(logits, numbers, state.arrays, bias, words, None, None)
        noises = [token_noise(*step) for step in steps]
        xtc = [coin < options.xtc_probability for _, coin in noises]
        keys = mx.array([key for key, _ in noises], mx.uint32)
        return _draw(logits, numbers, state.arrays, bias, words, keys, mx.array(xtc) if any(xtc) else None)

    def mask(self, logits: mx.array, state: PenaltyState, token_bitmasks: Sequence[np.ndarray] | None) -> mx.array:
        """Apply what precedes the temperature alone: `logit_bias`, the penalties and the bitmasks; as in `draw`."""
        vocab_size = logits.shape[-1]
        bias = self._bias(vocab_size)
        if bias is not None or not state.empty:
            logits = apply_penalties(logits, self._numbers(vocab_size, None), state, bias)
        if token_bitmasks is None:
            return logits
        return apply_token_bitmask(logits, stack_token_bitmasks(token_bitmasks, vocab_size))

    def _numbers(self, vocab_size: int, margin: float | None) -> Numbers:
        numbers = filter_numbers(self.options, vocab_size) | penalty_numbers(self.options)
        if margin is not None:
            numbers |= margin_numbers(self.options, margin, vocab_size)
        return numbers if ON_CPU else {name: scalar(number, mx.float32) for name, number in numbers.items()}

    def _bias(self, vocab_size: int) -> mx.array | None:
        if not len(self._bias_ids):
            return None
        bias = np.zeros(vocab_size, np.float32)
        bias[self._bias_ids] = self._bias_values
        return mx.array(bias)


@compile_on_gpu
def _draw(
    logits: mx.array,
    numbers: Numbers,
    penalties: tuple[mx.array | None, ...],
    logit_bias: mx.array | None,
    bitmask: mx.array | None,
    keys: mx.array | None,
    xtc_rows: mx.array | None,
) -> tuple[mx.array, mx.array | None]:
    """`LogitsProcessor.draw`, with arrays and None for all that is off: greedy without `keys`."""
    state = PenaltyState(*penalties)
    if logit_bias is not None or not state.empty:
        logits = apply_penalties(logits, numbers, state, logit_bias)
    if bitmask is not None:
        logits = apply_token_bitmask(logits, bitmask)
    highest = logits.max(axis=-1, keepdims=True)
    margin = numbers.get("margin")
    if keys is None:  # no filter removes the most likely token
        tokens = _argmax(logits, highest)
        return tokens, None if margin is None else certain_draws(logits, tokens, margin)
    logits = apply_temperature(logits, highest, numbers["temperature"])
    filtered = apply_filters(FilteredLogits(logits, xtc_rows=xtc_rows), numbers)
    noise = negative_gumbel_noise(keys, logits.shape[-1])
    scores = filtered.logits - noise
    tokens = _argmax(scores, highest)
    if margin is None:
        return tokens, None
    if filtered.logits is logits:
        return tokens, certain_draws(scores, tokens, margin)
    return tokens, certain_filtered_draws(logits, noise, tokens, numbers, filtered)


def _argmax(scores: mx.array, highest: mx.array) -> mx.array:
    """The index of the highest score of each row, int32 `[R]`; -1 if `highest` `[R, 1]` isn't finite."""
    return mx.where(mx.isfinite(highest.squeeze(-1)), mx.argmax(scores, axis=-1).astype(mx.int32), -1)


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
        functions: The caller's, which take part.
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
        eos_token_ids: Collection[int] = (),
        functions: SamplingFunctions | None = None,
    ):
        """Prepare to draw the tokens that follow `prompt`.

        Args:
            options: The settings.
            prompt: The ids before the text, for the repetition penalty and DRY.
            seed: The seed of the noise.
            tokenizer: Needed for DRY's sequence breakers.
            grammar: The compiled constraint of `options`.
            eos_token_ids: Tokens that end the text, which `min_tokens` forbids at first.
            functions: Functions of the caller. A sampler with them is one of a batch of its own.

        Raises:
            GenerationError: For sequence breakers that this tokenizer can't have.
        """
        self.options, self.seed, self.step = options, seed, 0
        self.processor = LogitsProcessor(options, dry_breaker_mask(options, tokenizer))
        self.matcher = None if grammar is None else grammar.matcher()
        self.num_logprobs, self.functions = options.logprobs, functions
        self._eos_token_ids, self._min_tokens = eos_token_ids, options.min_tokens if eos_token_ids else 0
        self._prompt, self._accepted = prompt, list[int]()
        self._penalty_row: tuple[PenaltyState, int] | None = None  # a row of a state that a batch may share
        self._logprobs: deque[tuple[SampledLogprobs, int]] = deque()

    @property
    def needs_last_token(self) -> bool:
        """Whether the value of the last token must be known before the next draw, as with a constraint."""
        return self.matcher is not None or self.functions is not None

    @property
    def is_masked(self) -> bool:
        """Whether the next token isn't free: `token_bitmasks` has something to say."""
        return self.matcher is not None or self.step < self._min_tokens

    def token_bitmasks(self, vocab_size: int, draft: mx.array | None = None) -> list[np.ndarray] | None:
        """The tokens that may be drawn next, and after each of `draft`; None for all.

        See `Matcher.token_bitmask`. `draft` is read only with a constraint.
        """
        if not self.is_masked:
            return None
        if self.matcher is not None:
            bitmasks = self.matcher.draft_token_bitmasks([] if draft is None else draft.tolist())
        else:
            everything = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
            bitmasks = [everything] * (1 if draft is None else len(draft) + 1)
        for position in range(min(len(bitmasks), self._min_tokens - self.step)):
            bitmasks[position] = without_tokens(bitmasks[position], self._eos_token_ids)
        return bitmasks

    @property
    def ended(self) -> bool:
        """Whether the constraint allows no further token."""
        return self.matcher is not None and (self.matcher.finished or self.matcher.error is not None)

    def accept(self, token: int) -> None:
        """Advance the constraint by a drawn token; before the next draw if the sampler `needs_last_token`.

        Raises:
            GenerationError: For -1: the model's logits were not finite.
        """
        if token < 0 and self.functions is not None and self.functions.logits_processors:
            problem = "after the logits processors, no logit is finite, or one is NaN"
            raise GenerationError(problem, "processors that leave a token with a finite logit")
        if token < 0:
            raise GenerationError(
                "the model's logits are not numbers", "a checkpoint without NaN; for float16, the model in float32"
            )
        if self.matcher is not None:
            self.matcher.consume(token)
        if self.functions is not None:
            self._accepted.append(token)

    def process(self, logits: mx.array) -> mx.array:
        """Return logits `[1, V]` after the caller's processors."""
        return logits if self.functions is None else self.functions.process([*self._prompt, *self._accepted], logits)

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

        Args:
            logits: `[k + 1, V]`.
            draft: `[k]`.
            margin: As for `sample_with_certainty`.

        Returns:
            The tokens, int32 `[k + 1]`, and whether they are certain, bool `[k + 1]`; None if `margin` is None.
        """
        penalty_rows = self._penalty_rows(logits.shape[-1], draft)
        bitmasks = self.token_bitmasks(logits.shape[-1], draft)
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
        alone = None if sampler.functions is None else id(sampler)
        key = sampler.processor.key, sampler.num_logprobs, sampler.needs_last_token, sampler.is_masked, alone
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
    """Sample for samplers with the same processor key and number of logprobs, all or none of them masked.

    Only one with the caller's functions; its token counts as certain, since it is computed alone.
    """
    first = samplers[0]
    processor, functions, processed = first.processor, first.functions, first.process(logits)
    vocab_size = logits.shape[-1]
    state = PenaltyState.stack_rows([sampler.penalty_row(vocab_size) for sampler in samplers])
    bitmasks = [bitmask for sampler in samplers for bitmask in sampler.token_bitmasks(vocab_size) or ()] or None
    steps = [(sampler.seed, sampler.step) for sampler in samplers]
    if functions is not None and functions.sampler is not None:
        tokens, certain = functions.draw(processor.mask(processed, state, bitmasks)), None
    else:
        tokens, certain = processor.draw(processed, state, bitmasks, steps, margin)
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

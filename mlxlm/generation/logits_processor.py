"""From a model's logits to tokens: penalties, constraint, temperature, filters and the draw, in this order.

On a GPU, all of it is one compiled function: decoding a token with a small model takes about 200 launches, and each
operation of a sampler that isn't fused would be one more. What changes with the request or the token, such as the
temperature and the keys of the noise, is an array, so that the function isn't traced again. On a CPU, compiling takes
seconds, and a launch costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np

from mlxlm.backend.mlx import ON_CPU, compile_on_gpu, mx
from mlxlm.generation.certainty import certain_draws, certain_filtered_draws, margin_numbers
from mlxlm.generation.constraint import apply_token_bitmask, stack_token_bitmasks
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
from mlxlm.generation.penalties import PenaltyState, apply_penalties, penalty_numbers
from mlxlm.kernels.metal import scalar

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
            token_bitmasks: The tokens that each row's constraint allows; None without constraints.
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

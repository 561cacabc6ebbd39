"""From a model's logits to tokens: penalties, constraint, temperature, filters and the draw, in this order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.certainty import certain_draws, certain_filtered_draws
from mlxlm.generation.constraint import apply_token_bitmask
from mlxlm.generation.gumbel_noise import gumbel_noise, token_noise
from mlxlm.generation.logit_filters import apply_filters, apply_temperature
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.penalties import PenaltyState, apply_penalties

# Options that don't change how the logits of a row are processed. logit_bias does, and is compared as bytes.
_PER_TEXT = (
    "seed", "deterministic", "logprobs", "json_schema", "regex", "choice", "grammar", "logit_bias", "max_tokens", "stop"
)  # fmt: skip
_SHARED = tuple(field.name for field in fields(GenerationOptions) if field.name not in _PER_TEXT)


class LogitsProcessor:
    """From a model's logits to tokens, for all rows with the same settings.

    Attributes:
        options: The settings.
        breakers: The mask of DRY's sequence breakers.
        key: Equal for processors that do the same, so that their rows can be drawn together.
    """

    def __init__(self, options: GenerationOptions, breakers: mx.array | None):
        ids = np.array(list(options.logit_bias), np.int32)
        values = np.array(list(options.logit_bias.values()), np.float32)
        self.options, self.breakers = options, breakers
        self._logit_bias = (mx.array(ids), mx.array(values)) if len(ids) else None
        shared = (getattr(options, name) for name in _SHARED)
        self.key: Hashable = (*shared, ids.tobytes(), values.tobytes(), id(breakers))

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
            margin: See `sample_with_certainty`.

        Returns:
            The tokens, int32 `[R]`, -1 if the highest logit isn't finite; and whether they are certain, bool `[R]`.
        """
        options = self.options
        if self._logit_bias is not None or not state.empty:
            logits = apply_penalties(logits, options, state, self._logit_bias)
        if token_bitmasks is not None:
            logits = apply_token_bitmask(logits, token_bitmasks)
        if margin is not None:  # a repetition penalty multiplies or divides differences between logits
            margin *= max(options.repetition_penalty, 1 / options.repetition_penalty)
        if options.temperature == 0:  # no filter removes the most likely token
            tokens = _argmax(logits)
            return tokens, None if margin is None else certain_draws(logits, tokens, margin)
        noises = [token_noise(*step) for step in steps]
        xtc = [coin < options.xtc_probability for _, coin in noises]
        xtc_rows = mx.array(xtc) if any(xtc) else None
        logits = apply_temperature(logits.astype(mx.float32), options.temperature)
        filtered, candidates = apply_filters(logits, options, xtc_rows)
        noise = gumbel_noise([key for key, _ in noises], logits.shape[-1])
        scores = filtered + noise
        tokens = _argmax(scores)
        if margin is None:
            return tokens, None
        margin /= options.temperature
        if filtered is logits:
            return tokens, certain_draws(scores, tokens, margin)
        certain = certain_filtered_draws(logits, noise, tokens, margin, options, candidates)
        return tokens, certain if xtc_rows is None else certain & ~xtc_rows


def _argmax(scores: mx.array) -> mx.array:
    """The index of the highest score of each row, int32 `[R]`; -1 if that score isn't finite."""
    return mx.where(mx.isfinite(scores.max(axis=-1)), mx.argmax(scores, axis=-1).astype(mx.int32), -1)

"""Functions of the caller that take part in sampling: logits processors and samplers, as in mlx_lm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.kernels import log_softmax
from mlxlm.utils.errors import GenerationError

LogitsFunction = Callable[[mx.array, mx.array], mx.array]
SamplerFunction = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class SamplingFunctions:
    """Functions of the caller that take part in drawing the tokens of one text, with the signatures of mlx_lm.

    They are called once for each token, on the thread that computes.

    Attributes:
        logits_processors: Each gets the ids of prompt and text, int32 `[T]`, and the logits, `[1, V]`, and returns
            logits. They come before everything that the options do.
        sampler: Gets the log-probabilities, float32 `[1, V]`, and returns the token, an integer `[1]`. It replaces the
            temperature, the filters and the draw.
    """

    logits_processors: tuple[LogitsFunction, ...] = ()
    sampler: SamplerFunction | None = None

    @classmethod
    def of(cls, logits_processors: Sequence[Any], sampler: Any) -> SamplingFunctions | None:
        """Make one, or None without functions. Raises GenerationError for anything else than functions."""
        if not isinstance(logits_processors, Sequence) or not all(map(callable, logits_processors)):
            problem = f"logits_processors is {logits_processors!r:.100}"
            raise GenerationError(problem, "a list of functions of tokens and logits")
        if sampler is not None and not callable(sampler):
            raise GenerationError(f"sampler is {sampler!r:.100}", "a function of log-probabilities")
        return cls(tuple(logits_processors), sampler) if logits_processors or sampler else None

    def process(self, ids: Sequence[int], logits: mx.array) -> mx.array:
        """Return the logits `[1, V]` after the processors. Raises GenerationError for another shape."""
        tokens, shape = mx.array(ids, mx.int32), logits.shape
        for processor in self.logits_processors:
            logits = _call(processor, tokens, logits)
            if not isinstance(logits, mx.array) or logits.shape != shape:
                what = logits.shape if isinstance(logits, mx.array) else type(logits).__name__
                raise GenerationError(f"a logits processor returned {what}", f"an array of the shape {shape}")
        return logits

    def draw(self, logits: mx.array) -> mx.array:
        """Return the token that the sampler draws from logits `[1, V]`, int32 `[1]`. Raises GenerationError."""
        assert self.sampler is not None
        token, vocab_size = _call(self.sampler, log_softmax(logits)), logits.shape[-1]
        if isinstance(token, mx.array | np.ndarray):
            token = token.item() if token.size == 1 else f"an array of the shape {token.shape}"
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            raise GenerationError(f"the sampler returned {token!s:.60}", f"a token id, from 0 to {vocab_size - 1}")
        return mx.array([int(token)], mx.int32)


def _call(function: Callable[..., Any], *arguments: mx.array) -> Any:
    """Call a function of the caller, and evaluate what it returns."""
    try:
        value = function(*arguments)
        mx.eval(value)
        return value
    except RuntimeError as error:
        if "no Stream" not in str(error):
            raise
        problem = "a logits processor or sampler uses an array that was made in another thread and isn't evaluated"
        raise GenerationError(problem, "mx.eval(array) where it is made") from None

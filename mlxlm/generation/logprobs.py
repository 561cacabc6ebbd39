"""Log-probabilities of sampled tokens and of the most likely ones, in the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.kernels import log_softmax


class TokenLogprob(NamedTuple):
    """A token and its natural log-probability.

    Attributes:
        token: The id.
        logprob: The log-probability.
        bytes: The bytes of UTF-8 that the token adds to the text here, possibly part of a character's; b"" for end
            tokens and other special tokens; None if the text of the tokenizer's tokens depends on their neighbors.
    """

    token: int
    logprob: float
    bytes: bytes | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """A sampled token, and the most likely tokens in its place, in descending order.

    Log-probabilities are the model's, before any option of GenerationOptions has changed the logits.
    """

    token: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...]
    bytes: bytes | None = None


@dataclass(frozen=True)
class SampledLogprobs:
    """The log-probabilities of one draw of R rows, on the device until they are read.

    Attributes:
        tokens: `[R]`.
        logprobs: `[R]`.
        top_ids: `[R, n]`.
        top_logprobs: `[R, n]`.
    """

    tokens: mx.array
    logprobs: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    @classmethod
    def compute(cls, logits: mx.array, tokens: mx.array, n: int) -> SampledLogprobs:
        """From tokens `[R]` sampled from logits `[R, V]`, with the n most likely tokens."""
        all_logprobs = log_softmax(logits)
        logprobs = mx.take_along_axis(all_logprobs, tokens[:, None], axis=-1)[:, 0]
        if n == 0:
            empty = mx.zeros((len(tokens), 0))
            return cls(tokens, logprobs, empty, empty)
        ids = mx.argpartition(-all_logprobs, min(n, all_logprobs.shape[-1] - 1), axis=-1)[:, :n]
        top_logprobs = mx.take_along_axis(all_logprobs, ids, axis=-1)
        order = mx.argsort(-top_logprobs, axis=-1)
        ids, top_logprobs = (mx.take_along_axis(x, order, axis=-1) for x in (ids, top_logprobs))
        return cls(tokens, logprobs, ids, top_logprobs)

    def arrays(self) -> list[mx.array]:
        """What the device has to compute."""
        return [self.logprobs, self.top_ids, self.top_logprobs]

    def read(self, row: int, bytes_of: Callable[[int], bytes | None]) -> TokenLogprobs:
        """The log-probabilities of one row, with the bytes of each token. Waits for the device."""
        token, logprob, top_ids, top_logprobs = (values[row] for values in self._values)
        top = tuple(map(TokenLogprob, top_ids, top_logprobs, map(bytes_of, top_ids)))
        return TokenLogprobs(token, logprob, top, bytes_of(token))

    @cached_property
    def _values(self) -> list[list[Any]]:
        # Whole arrays: slicing one row would be a computation of its own, queued behind the step in flight.
        return [array.tolist() for array in (self.tokens, *self.arrays())]

"""Log-probabilities of drawn tokens and of the likeliest ones, in the model's own distribution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.kernels import log_softmax


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability, and the bytes of UTF-8 that it adds to the text at this place.

    bytes: part of a character's, where a token is that; b"" for end tokens and other special ones; None where the
    tokenizer's tokens aren't bytes, because their text depends on their neighbours.
    """

    token: int
    logprob: float
    bytes: bytes | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """A token as TokenLogprob, and the likeliest tokens in its place, the likeliest first.

    Log-probabilities are the model's, before any setting of SamplingOptions has changed them.
    """

    token: int
    logprob: float
    top_logprobs: tuple[TokenLogprob, ...]
    bytes: bytes | None = None

    def with_bytes(self, bytes_of: Callable[[int], bytes | None]) -> TokenLogprobs:
        """The same with the bytes of every token."""
        top_logprobs = tuple(entry._replace(bytes=bytes_of(entry.token)) for entry in self.top_logprobs)
        return replace(self, top_logprobs=top_logprobs, bytes=bytes_of(self.token))


@dataclass(frozen=True)
class SampledLogprobs:
    """Those of one draw of several rows, on the device until they are read."""

    tokens: mx.array  # [R]
    chosen: mx.array  # [R]
    top_ids: mx.array  # [R, n]
    top_logprobs: mx.array  # [R, n]

    @classmethod
    def compute(cls, logits: mx.array, tokens: mx.array, n: int) -> SampledLogprobs:
        """Of tokens `[R]` drawn from logits `[R, V]`, with the n likeliest."""
        logprobs = log_softmax(logits)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        if n == 0:
            nothing = mx.zeros((len(tokens), 0))
            return cls(tokens, chosen, nothing, nothing)
        ids = mx.argpartition(-logprobs, min(n, logprobs.shape[-1] - 1), axis=-1)[:, :n]
        top_logprobs = mx.take_along_axis(logprobs, ids, axis=-1)
        order = mx.argsort(-top_logprobs, axis=-1)
        ids, top_logprobs = (mx.take_along_axis(x, order, axis=-1) for x in (ids, top_logprobs))
        return cls(tokens, chosen, ids, top_logprobs)

    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top_logprobs]

    def read(self, row: int) -> TokenLogprobs:
        tokens, chosen, top_ids, top_logprobs = self._values
        return TokenLogprobs(tokens[row], chosen[row], tuple(map(TokenLogprob, top_ids[row], top_logprobs[row])))

    @cached_property
    def _values(self) -> list[list]:
        # Whole arrays: taking a row out of one would be a step of its own, behind what the device has in work already.
        return [array.tolist() for array in (self.tokens, *self.arrays())]

"""Chunks, results, timings and log-probabilities of generated texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.kernels import log_softmax
from mlxlm.utils.errors import TokenizerError
from mlxlm.utils.json_files import parse_json


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


MEASURING = "plain steps are measured first"
FinishReason = Literal["stop", "eos", "length", "context", "constraint"]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function.

    Attributes:
        id: What the result refers to.
        name: The function.
        arguments: JSON object as text; "" for none.
    """

    id: str
    name: str
    arguments: str

    def parsed_arguments(self) -> dict[str, Any]:
        """Return the arguments as a dict. Raise TokenizerError if they aren't a JSON object."""
        name = f"the arguments of the call of {self.name}"
        hint = 'a JSON object, such as {"city": "Paris"}'
        content = (self.arguments.strip() or "{}").encode("utf-8", "surrogatepass")
        value = parse_json(content, name, TokenizerError, hint)
        if not isinstance(value, dict):
            raise TokenizerError(f"{name} are not a JSON object", hint)
        return value


@dataclass(frozen=True)
class GenerationChunk:
    """A piece of a text: what one token adds. In a chat, also a part of that, or a call of a function.

    Attributes:
        text: The added text; "" while a character or a stop string is incomplete.
        token: The token's id; None for a piece that no token ends.
        finish_reason: Set on the last chunk only.
        logprob: The log-probabilities, if requested.
        reasoning: Whether the text is reasoning before an answer. Only a chat separates it.
        tool_call: A call that the chat runs next or, with a `tool_result`, has run.
        tool_result: The result of the call.
    """

    text: str
    token: int | None = None
    finish_reason: FinishReason | None = None
    logprob: TokenLogprobs | None = None
    reasoning: bool = False
    tool_call: ToolCall | None = None
    tool_result: str | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of one text; None for what hasn't been measured yet.

    In a batch, the rates are those of one row while the others run, too.

    Attributes:
        time_to_first_token: Seconds.
        prompt_tokens_per_second: Rate of reading the prompt's tokens that were not in the cache, up to the first new
            token.
        tokens_per_second: Rate of the new tokens after the first one.
        peak_memory_bytes: MLX's peak memory since the text began, weights included.
        queue_seconds: How long the text waited before its prompt was read.
    """

    time_to_first_token: float | None
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int
    queue_seconds: float | None = None


@dataclass
class SpeculationStats:
    """Statistics of one text.

    Attributes:
        proposed: Drafted tokens.
        accepted: How many of them were accepted.
        rounds: Forward passes over drafts.
        num_redecoded: Tokens that were too close to the runner-up, and were decoded again in a plain step.
        reason: Why nothing is being drafted; None if something is.
    """

    proposed: int = 0
    accepted: int = 0
    rounds: int = 0
    num_redecoded: int = 0
    reason: str | None = MEASURING

    @property
    def active(self) -> bool:
        """Whether tokens are being drafted."""
        return self.reason is None

    @property
    def acceptance_rate(self) -> float | None:
        """The fraction of drafted tokens that were accepted; None before there were any."""
        return self.accepted / self.proposed if self.proposed else None


@dataclass(frozen=True)
class GenerationResult:
    """A generated text and its statistics.

    Attributes:
        text: The text, without the stop string or the end token.
        tokens: The generated ids, including the end token or those of the stop string.
        prompt_tokens: The number of tokens of the prompt.
        cached_tokens: How many of them were in the cache already.
        finish_reason: "eos" for an end token or a completed constraint, "stop" for a stop string, "length" for
            max_tokens, "context" if the model's context is full, "constraint" if no token of this model can fulfill
            the constraint, None if the text was left before its end.
        seed: The seed of the text.
        timings: Seconds and rates.
        logprobs: The log-probabilities of each of `tokens`, if requested.
        constraint_error: Why a constrained text doesn't fulfill its constraint; None if it does.
        speculation: The statistics of speculative decoding, if it was used.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason | None
    seed: int
    timings: Timings
    logprobs: list[TokenLogprobs] | None = None
    constraint_error: str | None = None
    speculation: SpeculationStats | None = None

"""What a text is made of, and what is reported of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from mlxlm.generation.logprobs import TokenLogprobs
    from mlxlm.generation.speculative import SpeculationStats

FinishReason = Literal["stop", "eos", "length", "context", "constraint"]


@dataclass(frozen=True)
class GenerationChunk:
    """What one token adds to the text: "" while a character or a stop string is undecided.

    `finish_reason` is set on the last chunk only; `logprob` where log-probabilities were asked for.
    """

    text: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprobs | None = None


@dataclass(frozen=True)
class Timings:
    """Seconds and rates of one text; None for what hasn't been measured yet.

    prompt_tokens_per_second counts the tokens that were read, not those already in the cache, up to the
    first new token; tokens_per_second the new tokens after the first. In a batch, both are those of one row while
    the others run beside it. peak_memory_bytes is MLX's highest use meanwhile, weights included.
    """

    time_to_first_token: float | None
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class GenerationResult:
    """A text and how it came about.

    `tokens` are the ids generated, with the end token or the stop string's, if any. `finish_reason`:
    "eos" an end token or the end of what a constraint asks for, "stop" a stop string, "length" max_tokens, "context"
    the model's context is full, "constraint" nothing that this model can say would fulfil the constraint, None if the
    text was left before its end.
    `cached_tokens` of the `prompt_tokens` didn't have to be read. `logprobs`, where they were asked for: those of each
    token of `tokens`. `constraint_error`: why a constrained text doesn't fulfil its constraint, None if it does.
    `speculation`: what came of the tokens proposed, where any were.
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

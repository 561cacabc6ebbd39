"""Chunks, results and timings of generated texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mlxlm.generation.logprobs import TokenLogprobs

MEASURING = "plain steps are measured first"
FinishReason = Literal["stop", "eos", "length", "context", "constraint"]


@dataclass(frozen=True)
class GenerationChunk:
    """What one token adds to the text.

    Attributes:
        text: The added text; "" while a character or a stop string is incomplete.
        token: The token's id.
        finish_reason: Set on the last chunk only.
        logprob: The log-probabilities, if requested.
    """

    text: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprobs | None = None


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
    """

    time_to_first_token: float | None
    prompt_tokens_per_second: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int


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

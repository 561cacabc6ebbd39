"""The reply of chat completions and completions: `choices`, one for each text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from mlxlm.generation import GenerationChunk, GenerationResult
from mlxlm.server.errors import to_api_error
from mlxlm.server.events import data_event
from mlxlm.server.reply import Event, Reply
from mlxlm.server.schemas import TextRequest
from mlxlm.server.texts import Texts


class Choice(Protocol):
    """Builds an entry of `choices` from the chunks of a text."""

    reasoning_tokens: int

    def start(self) -> dict[str, Any] | None:
        """Return the entry of the event before the first chunk, if there is one."""

    def push(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk, and return the entries of its events."""

    def complete(self) -> dict[str, Any]:
        """Return the entry of a response that isn't streamed."""


class ChoicesReply(Reply):
    """A response with all choices, or a stream whose events have one choice each.

    Args:
        texts: The texts that are being generated.
        choices: One for each text.
        prompt_tokens: The number of tokens of all prompts.
        body: The request.
        head: The id, object and model of the response and of each event.
    """

    last_line = b"data: [DONE]\n\n"

    def __init__(
        self, texts: Texts, choices: Sequence[Choice], prompt_tokens: int, body: TextRequest, head: dict[str, Any]
    ):
        super().__init__(texts)
        self._choices, self._prompt_tokens, self._body = choices, prompt_tokens, body
        self._head = {**head, "created": int(time.time())}

    def start(self) -> list[Event]:
        """Return the role of each message, or each prompt that is echoed."""
        return [self._event(first) for choice in self._choices if (first := choice.start()) is not None]

    def push(self, index: int, chunk: GenerationChunk) -> list[Event]:
        """Add a chunk, and return its events."""
        return [self._event(part) for part in self._choices[index].push(chunk)]

    def finish(self, results: Sequence[GenerationResult]) -> list[Event]:
        """Return the usage, if the request asks for it."""
        return [{"choices": [], **self._statistics(results)}] if self._body.include_usage else []

    def complete(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the response."""
        choices = [choice.complete() for choice in self._choices]
        return {**self._head, "choices": choices, **self._statistics(results)}

    def encode(self, event: Event) -> bytes:
        """Encode an event."""
        return data_event(self._head | event)

    def encode_error(self, error: Exception) -> bytes:
        """Encode an error."""
        return data_event(to_api_error(error).body())

    def _event(self, choice: dict[str, Any]) -> Event:
        return {"choices": [choice], **({"usage": None} if self._body.include_usage else {})}

    def _statistics(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """The usage, and the timings of a single text."""
        usage = {"usage": self._usage(results)}
        return {**usage, "timings": _timings(results[0])} if len(results) == 1 else usage

    def _usage(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Count the tokens. The prompt of several samples counts once."""
        completion_tokens = sum(len(result.tokens) for result in results)
        cached_tokens = sum(result.cached_tokens for result in results[:: self._body.n])
        reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        }


def _timings(result: GenerationResult) -> dict[str, Any]:
    """The `timings` of llama.cpp's server. The time of the first token belongs to the prompt."""
    timings, num_decoded = result.timings, len(result.tokens) - 1
    first, speed = timings.time_to_first_token, timings.tokens_per_second
    return {
        "cache_n": result.cached_tokens,
        "prompt_n": result.prompt_tokens - result.cached_tokens,
        "prompt_ms": first and 1000 * first,
        "prompt_per_second": timings.prompt_tokens_per_second,
        "predicted_n": len(result.tokens),
        "predicted_ms": speed and 1000 * num_decoded / speed,
        "predicted_per_second": speed,
    }

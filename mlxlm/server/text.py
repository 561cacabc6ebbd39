"""One text of a request, from its submission to its end: reasoning, text and tool calls, with log-probabilities."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from mlxlm.chat.answer_parser import AnswerParser, Kind, Part, Piece
from mlxlm.generation import (
    FinishReason,
    GenerationChunk,
    GenerationOptions,
    GenerationResult,
    QueueFullError,
    Request,
    TextStream,
)
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.result import TokenLogprob, TokenLogprobs
from mlxlm.server.errors import ApiError
from mlxlm.server.models import ServedModel
from mlxlm.tokenizer import Tokenizer

# OpenAI's finish reasons. If no token can continue a constraint, the text is incomplete, as with a length limit.
_FINISH_REASONS: dict[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "constraint": "length",
}
_NEGATIVE_INFINITY = -9999.0  # as in OpenAI's API: JSON has no infinity


class Text:
    """A text that a client waits for.

    Attributes:
        index: Its number in the request.
        request: What the engine generates.
        stream: Its chunks, as the engine generates them; set by `submit`.
        result: The whole text with its statistics, when it has ended.
        logprobs: The log-probabilities of its tokens so far, as `take_logprobs` has returned them.
        finish_reason: Why it has ended, in OpenAI's words; None if it hasn't.
        reasoning_tokens: The number of tokens of the reasoning, its tags included.
    """

    stream: TextStream

    def __init__(self, index: int, request: Request, parser: AnswerParser | None = None):
        """Create a text that isn't submitted yet.

        Args:
            index: See `Text`.
            request: See `Text`.
            parser: Splits an answer into its parts; None for a text without reasoning and calls.
        """
        self.index, self.request = index, request
        self.result: GenerationResult | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.reasoning_tokens = 0
        self._logprob_buffer, self._ready = LogprobBuffer(), list[TokenLogprobs]()
        self._parser = parser or AnswerParser()

    @property
    def parts(self) -> list[Part]:
        """Its parts so far."""
        return self._parser.parts

    @property
    def calls(self) -> list[Part]:
        """The tool calls so far."""
        return self._parser.calls

    def text_of(self, kind: Kind) -> str:
        """The text of all parts of a kind so far."""
        return self._parser.text(kind)

    def submit(self, model: ServedModel) -> TextStream:
        """Begin to generate the text.

        Raises:
            ApiError: 429 if too many texts wait already.
            GenerationError: The model can't serve the prompt or its options, or memory has no room for them.
        """
        try:
            self.stream = model.engine.submit(self.request)
        except QueueFullError as error:
            raise ApiError(429, str(error), code="queue_full", headers={"retry-after": "2"}) from None
        return self.stream

    def push(self, chunk: GenerationChunk) -> list[Piece]:
        """Add a chunk, and return what is decided. A text that has ended has at least one part, even if it is empty."""
        self._ready += self._logprob_buffer.push(chunk.logprob, chunk.text, chunk.finish_reason)
        was_reasoning = self._parser.in_reasoning
        pieces = self._parser.push(chunk.text, chunk.finish_reason)
        is_reasoning = any(piece.part.kind == "reasoning" for piece in pieces)
        self.reasoning_tokens += was_reasoning or self._parser.in_reasoning or is_reasoning
        if chunk.finish_reason is not None:
            if not self.parts:
                self.parts.append(Part("text"))
                pieces.append(Piece(self.parts[0], "", True))
            self.finish_reason = _FINISH_REASONS[chunk.finish_reason]
            if self.calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        return pieces

    def take_logprobs(self) -> list[TokenLogprobs]:
        """The log-probabilities of tokens whose text has begun since the last call."""
        ready, self._ready = self._ready, []
        self.logprobs += ready
        return ready


def sample_requests(
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    eos_token_ids: frozenset[int],
    n: int,
    skip_special_tokens: bool = True,
) -> list[Request]:
    """`n` requests for each prompt, with a different seed each. A single request keeps the seed of the options."""
    if options.seed is None:
        options = options.with_seed(random_seed())
    skip = skip_special_tokens
    requests = [Request(prompt, options, eos_token_ids, skip_special_tokens=skip) for prompt in prompts]
    if len(prompts) * n == 1:
        return requests
    return [request.sample(str(number), k) for number, request in enumerate(requests, 1) for k in range(n)]


class LogprobBuffer:
    """Holds back the log-probabilities of tokens until their text is streamed.

    Those of a stop string and of the EOS token, which are not part of the text, are dropped.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()  # with the byte offset of each token
        self._token_bytes = self._text_bytes = 0

    def push(self, logprob: TokenLogprobs | None, text: str, finish_reason: FinishReason | None) -> list[TokenLogprobs]:
        """Add a token and the text that was streamed with it; return the tokens whose text has begun."""
        if logprob is not None:
            self._waiting.append((self._token_bytes, logprob))
            self._token_bytes += len(logprob.bytes or b"")
        self._text_bytes += len(text.encode())
        ended = finish_reason is not None and finish_reason != "stop"
        if finish_reason == "eos" and self._waiting and self._waiting[-1][1].bytes == b"":
            self._waiting.pop()
        ready = []
        while self._waiting and (ended or self._is_ready(*self._waiting[0])):
            ready.append(self._waiting.popleft()[1])
        return ready

    def _is_ready(self, start: int, logprob: TokenLogprobs) -> bool:
        return start < self._text_bytes or not logprob.bytes and start <= self._text_bytes


def describe_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Log-probabilities as in chat completions and the Responses API."""

    def describe(entry: TokenLogprob | TokenLogprobs) -> dict[str, Any]:
        content = None if entry.bytes is None else list(entry.bytes)
        return {"token": token_text(entry, tokenizer), "logprob": finite(entry.logprob), "bytes": content}

    return [{**describe(entry), "top_logprobs": [describe(top) for top in entry.top_logprobs]} for entry in entries]


def token_text(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> str:
    """The text of a token: a special token's name, and � for a part of a character."""
    content = entry.bytes or tokenizer.token_bytes(entry.token, skip_special_tokens=False)
    return content.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Round a log-probability for JSON, and replace infinity."""
    return round(logprob, 6) if math.isfinite(logprob) else _NEGATIVE_INFINITY

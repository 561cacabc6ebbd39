"""Log-probabilities in the formats of OpenAI's API, in step with the streamed text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

from mlxlm.generation import FinishReason
from mlxlm.generation.logprobs import TokenLogprob, TokenLogprobs
from mlxlm.tokenizer import Tokenizer

_NEGATIVE_INFINITY = -9999.0  # as in OpenAI's API: JSON has no infinity


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


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of chat completions."""
    content = []
    for entry in entries:
        top = [_entry(candidate, tokenizer) for candidate in entry.top_logprobs]
        content.append({**_entry(entry, tokenizer), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprobs], offset: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of completions. `offset` is where the text of the entries starts, in characters.

    The log-probability of a text's first token, which nothing predicts, is NaN.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(token_text(entry, tokenizer)) if entry.bytes != b"" else 0  # special tokens have no text
    tops = [
        None
        if math.isnan(entry.logprob)
        else {token_text(top, tokenizer): finite(top.logprob) for top in entry.top_logprobs}
        for entry in entries
    ]
    return {
        "tokens": [token_text(entry, tokenizer) for entry in entries],
        "token_logprobs": [None if math.isnan(entry.logprob) else finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _entry(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": token_text(entry, tokenizer),
        "logprob": finite(entry.logprob),
        "bytes": None if entry.bytes is None else list(entry.bytes),
    }


def token_text(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> str:
    """The text of a token: a special token's name, and � for a part of a character."""
    content = entry.bytes or tokenizer.token_bytes(entry.token, skip_special_tokens=False)
    return content.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    """Round a log-probability for JSON, and replace infinity."""
    return round(logprob, 6) if math.isfinite(logprob) else _NEGATIVE_INFINITY

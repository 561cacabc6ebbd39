"""One answer, streamed to the screen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import closing

from mlxlm.chat.answer import ChatChunk
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.screen import ReasoningDisplay, open_screen
from mlxlm.generation import FinishReason

# Starts an answer: `chat.ask`, `chat.retry` or `chat.edit` with its message, called with `on_prefill`.
StartAnswer = Callable[[Callable[[int], None]], Generator[ChatChunk, None, None]]


def stream_answer(
    chat: Chat, start: StartAnswer, reasoning: ReasoningDisplay, markdown: bool, stop: threading.Event
) -> FinishReason | None:
    """Stream one answer to standard output until its end, or until `stop` is set.

    Returns:
        The finish reason, None if stopped.

    Raises:
        Exception: Whatever the chat raises; the last line on the screen is ended first.
    """
    screen = open_screen(reasoning, markdown)

    def on_prefill(tokens_read: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if tokens_read < chat.prompt_tokens - 1:  # the last one is read together with the answer's first
            screen.status(f"reading: {tokens_read} of {chat.prompt_tokens} tokens")

    reason: FinishReason | None = None
    chunks = start(on_prefill)  # before the screen changes: it may raise
    try:
        screen.status(f"reading {chat.prompt_tokens} tokens")
        with closing(chunks):
            for chunk in chunks:
                screen.push(chunk.text, chunk.reasoning)
                reason = chunk.finish_reason
                if stop.is_set():
                    break
    except KeyboardInterrupt:
        if not stop.is_set():
            raise
    finally:
        screen.finish()
    return reason

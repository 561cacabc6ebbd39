"""One answer: streamed to the screen, stopped by Ctrl-C, its errors shown."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

from mlxlm.chat.answer import ChatChunk
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.screen import ReasoningDisplay, open_screen
from mlxlm.generation import FinishReason

# What begins an answer: `chat.ask`, `chat.retry` or `chat.edit` with its message, as yet without `on_prefill`.
StartAnswer = Callable[[Callable[[int], None]], Generator[ChatChunk, None, None]]


def answer(
    chat: Chat, begin: StartAnswer, reasoning: ReasoningDisplay, markdown: bool, stop: threading.Event
) -> FinishReason | None:
    """Stream one answer to standard output, until its end or until `stop` is set; say how it ended (None: stopped).

    Raises whatever the chat raises; the line on the screen is ended in any case.
    """
    screen = open_screen(reasoning, markdown)

    def progress(tokens_read: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if tokens_read < chat.prompt_tokens - 1:  # the last one is read with the answer's first
            screen.status(f"reading: {tokens_read} of {chat.prompt_tokens} tokens")

    reason: FinishReason | None = None
    chat_chunks = begin(progress)  # before the screen is touched: it may refuse
    try:
        screen.status(f"reading {chat.prompt_tokens} tokens")
        with closing(chat_chunks):
            for piece in chat_chunks:
                screen.push(piece.text, piece.reasoning)
                reason = piece.finish_reason
                if stop.is_set():
                    break
    except KeyboardInterrupt:
        if not stop.is_set():
            raise
    finally:
        screen.finish()
    return reason


@contextmanager
def defer_interrupts() -> Iterator[threading.Event]:
    """Meanwhile, Ctrl-C only sets the event: an exception could strike in the middle of a step or of this file.

    The line editor reads Ctrl-C as a key and puts this handler back when a line is done.
    """
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Meanwhile, Ctrl-C raises KeyboardInterrupt again: for work that changes nothing before it is done."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)

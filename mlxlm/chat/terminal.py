"""The chat in a terminal, or over a pipe. Answers on standard output, everything else on standard error."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from mlxlm import platform
from mlxlm.chat.session import ChatSession
from mlxlm.errors import GenerationError, PlatformError, describe
from mlxlm.generation import FinishReason

COMMANDS = {
    "/help": "show these commands",
    "/reset": "forget the conversation, not the system prompt",
    "/stats": "tokens, speed, and how full the context is",
    "/exit": "leave the chat (Ctrl-D does, too)",
}
_HELP = "\n".join(f"{name:8} {text}" for name, text in COMMANDS.items())
_HELP += "\nA message that begins with / is typed with //."
_UNFINISHED: dict[FinishReason | None, str] = {
    None: "(stopped)",
    "length": "(cut off at --max-tokens)",
    "context": "(the context is full: /reset begins anew)",
}
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def write(text: str) -> None:
    """Text of a model to standard output, at once; in a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def printable(text: str) -> str:
    """`text` with every control character but tab and line end as U+FFFD: no answer may drive the terminal."""
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def run(session: ChatSession, greeting: Sequence[str]) -> None:
    """Chat until /exit or the end of input: with a line editor in a terminal, else one message per line.

    In a terminal Ctrl-C stops an answer and never the chat, and an error ends a turn. Over a pipe an error
    is raised, and there is no greeting.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        _serve(session, _piped_lines(), answer)
        return
    for line in greeting:
        _say(line)
    with _noted_interrupts() as interrupted:
        _serve(session, _typed_lines(), lambda *turn: _answer_interruptibly(*turn, interrupted))


def answer(session: ChatSession, message: str) -> None:
    """Stream one answer to standard output, and end its line."""
    try:
        with closing(session.ask(message)) as chunks:
            for chunk in chunks:
                write(chunk.text)
    finally:
        write("\n")


def _serve(session: ChatSession, lines: Iterator[str], answer_to: Callable[[ChatSession, str], None]) -> None:
    for line in lines:
        command = line.strip()
        if command == "/exit":
            return
        if command.startswith("/") and not command.startswith("//"):
            _obey(session, command)
        elif command:
            answer_to(session, line.replace("//", "/", 1) if command.startswith("//") else line)


def _obey(session: ChatSession, command: str) -> None:
    if command == "/help":
        _say(_HELP)
    elif command == "/reset":
        session.reset()
        _say("the conversation is forgotten")
    elif command == "/stats":
        _say(_statistics(session))
    else:
        _say(f"there is no command {command} (try: {' '.join(COMMANDS)}, or // for a message that begins with /)")


def _statistics(session: ChatSession) -> str:
    stats = session.stats
    total = (
        f"answers: {stats.turns}, {stats.generated_tokens} tokens; "
        f"context: {stats.context_used} of {stats.context_size} tokens; seed {stats.seed}"
    )
    if stats.last is None:
        return total
    last, timings = stats.last, stats.last.timings
    speed = f", {timings.tokens_per_second:.1f} tokens/s" if timings.tokens_per_second else ""
    read = last.prompt_tokens - last.cached_tokens
    return (
        f"{total}\nlast answer: {len(last.tokens)} tokens{speed}; first token after "
        f"{timings.first_token_seconds:.2f} s, {read} tokens read and {last.cached_tokens} kept from before"
    )


def _answer_interruptibly(session: ChatSession, message: str, interrupted: threading.Event) -> None:
    def check(_tokens_read: int) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    interrupted.clear()
    reason: FinishReason | None = None
    try:
        with closing(session.ask(message, on_prefill=check)) as chunks:
            for chunk in chunks:
                write(chunk.text)
                reason = chunk.finish_reason
                if interrupted.is_set():
                    break
    except KeyboardInterrupt:
        pass  # between two chunks of the message: there is no answer yet
    except Exception as error:  # whatever it is (the device's memory, say), the conversation goes on
        write("\n")
        _say(f"error: {describe(error)}")
        return
    write("\n")
    if reason in _UNFINISHED:
        _say(_UNFINISHED[reason])


@contextmanager
def _noted_interrupts() -> Iterator[threading.Event]:
    """Meanwhile, Ctrl-C only sets the event: an exception could strike in the middle of a step or of this file.

    The line editor reads Ctrl-C as a key and puts this handler back when a line is done.
    """
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)


def _typed_lines() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    # Standard output may be a file while a person types: then the editor draws on standard error.
    editor = PromptSession([("bold", "> ")], history=_history(), output=create_output(always_prefer_tty=True))
    while True:
        try:
            yield editor.prompt()
        except KeyboardInterrupt:
            if not editor.default_buffer.text:
                _say("(/exit or Ctrl-D leaves the chat)")
        except EOFError:
            return


def _history():
    """The lines of earlier chats, in a file that only its owner can read."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class SafeHistory(FileHistory):
        """A disk that is full must not disturb the chat."""

        kept = True

        def store_string(self, string: str) -> None:
            try:
                if self.kept:
                    super().store_string(string)
            except OSError as error:
                self.kept = False
                _say(f"the history of this chat is no longer kept: {path}: {error.strerror}")

    try:
        path = platform.state_folder() / "chat_history"
    except PlatformError as error:
        _say(f"the history of this chat won't be kept: {error.message}")
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode=0o600))
    except OSError as error:
        _say(f"the history of this chat won't be kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return SafeHistory(path)


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise GenerationError(f"line {number} of standard input is not UTF-8: {error.reason}") from None


def _say(text: str) -> None:
    dim = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(f"\x1b[2m{text}\x1b[0m" if dim else text, file=sys.stderr, flush=True)

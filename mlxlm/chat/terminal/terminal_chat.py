"""A chat in a terminal: its state, which commands change, its answers, and the signals and keys during them."""

from __future__ import annotations

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlxlm.backend.bandwidth import BytesPerToken
from mlxlm.chat.answer import Answer
from mlxlm.chat.files import FileError, TextFile, read_file, split_files, with_files
from mlxlm.chat.history import ContextFullError, MessageTooLongError
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import about
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.mentions import mentioned_paths
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.screen import PlainScreen, Screen, open_screen, push_text
from mlxlm.chat.terminal.settings import Settings
from mlxlm.chat.terminal.tools import Permissions, call_text, interruptible, show_result
from mlxlm.generation import FinishReason, LoadedModel
from mlxlm.utils.errors import GenerationError, TextTooLongError

if TYPE_CHECKING:  # pydantic takes time to import
    from mlxlm.chat.tools import CallableTool

# Starts an answer: `chat.ask`, `edit`, `retry` or `continue_answer` with its text, called with `on_prefill`.
StartAnswer = Callable[[Callable[[int], None]], Answer]
Purpose = Literal["ask", "edit", "continue"]
_MAX_COUNTED_TOKENS = 1 << 18  # of a file: counting that many takes about a second
_UNFINISHED: dict[FinishReason | None, str] = {
    None: "(stopped)",
    "length": "(cut off at max_tokens: change it with /set max_tokens)",
}
_CONTEXT_FULL = {
    "ask": "(the context is full: your next message can drop the oldest turns)",
    "stop": "(the context is full: /undo, /reset, or /set context_overflow drop)",
    "drop": "(the context is full: your next message drops the oldest turns)",
}


@dataclass(eq=False)
class TerminalChat:
    """A chat with its display settings and its file: what commands change.

    Attributes:
        chat: The conversation.
        settings: How it is displayed.
        autosave: Where it is saved.
        load: Loads another model by its name.
        chat_arguments: Arguments of `Chat.open` that override a session file.
        interactive: Whether standard input is a terminal.
        bytes_per_token: Bytes that each token of the last answer read, or why that is unknown.
        draft: Text to start the next line with.
        purpose: What the next message does: it is asked, replaces the last one, or replaces the last answer, which the
            model then continues.
        leaving: Whether the chat ends.
        stop: Set to end the current answer.
        ask: Reads a line from the terminal after a question; None without a line editor.
        run_application: Runs an application of prompt_toolkit in the terminal; None without a line editor.
        has_sent: Whether there was a message.
        files: Files that the next message begins with.
        permissions: Asks before the calls of tools.
    """

    chat: Chat
    settings: Settings
    autosave: Autosave
    load: Callable[[str], LoadedModel]
    chat_arguments: Mapping[str, Any]
    interactive: bool = field(default_factory=lambda: sys.stdin is not None and sys.stdin.isatty())
    bytes_per_token: BytesPerToken | str = ""
    draft: str = ""
    purpose: Purpose = "ask"
    leaving: bool = False
    stop: threading.Event = field(default_factory=threading.Event)
    ask: Callable[[str], str] | None = None
    run_application: Callable[[Any], Any] | None = None
    has_sent: bool = False
    files: list[TextFile] = field(default_factory=list)
    permissions: Permissions = field(default_factory=Permissions)

    def use_tools(self, tools: Sequence[CallableTool]) -> None:
        """Let the answers call tools, with the user's permission. Raise as `Chat.tools` does."""
        # Elsewhere Ctrl-C ends the program.
        self.chat.tools = [interruptible(tool, raise_interrupts) for tool in tools] if self.interactive else tools
        self.chat.allow_call = self.permissions.allow

    def add_file(self, file: TextFile) -> None:
        """Add a file to the next message, and print how many tokens it has.

        Raises:
            FileError: The file doesn't fit into the context.
        """
        if file in self.files:
            return
        size, limit = self.chat.context_size, max(_MAX_COUNTED_TOKENS, self.chat.context_size)
        encode = partial(self.chat.lm.tokenizer.encode, add_special_tokens=False, max_length=limit)
        left = size - self.chat.context_used - len(encode(with_files("", self.files)))
        try:
            tokens = len(encode(file.block))
            count = f"{tokens:,}"
        except TextTooLongError:
            tokens, count = size, f"more than {limit:,}"
        can_drop = self.settings.overflow_policy(self.chat) != "stop"
        if tokens >= (size if can_drop else left):
            hint = "/undo, /reset or fewer files" if tokens < size else "a shorter file or a model with more context"
            raise FileError(f"{file.name} has {count} tokens, but only {max(0, left):,} of {size:,} are left", hint)
        self.files.append(file)
        print_status(f"{file.name}: {count} tokens; {max(0, left - tokens):,} of {size:,} are left")

    def send(self, text: str, purpose: Purpose = "ask") -> None:
        """Answer a message with its files, or let the model continue its last answer; see the attribute `purpose`.

        An edited message keeps its files.
        """
        if purpose == "continue":
            self.answer(partial(self.chat.continue_answer, text), begins_with=text)
            return
        start, kept, before = self.chat.ask, list[TextFile](), [*self.files]
        if purpose == "edit":
            start, (kept, _) = self.chat.edit, split_files(self.last_question)
        try:
            text, mentioned = mentioned_paths(text)
            for path in mentioned:
                self.add_file(read_file(path))
            message = with_files(text, [*kept, *self.files])
            self.answer(partial(start, message), message)
        except BaseException:  # the message is typed again, with what it mentions
            self.files = before
            raise
        self.files = []

    @property
    def last_question(self) -> str:
        """The last message of the user with its files; "" if there is none."""
        return next((m.content for m in reversed(self.chat.messages) if m.role == "user"), "")

    def answer(self, start: StartAnswer, message: str = "", begins_with: str = "") -> None:
        """Stream the answer that `start` starts.

        Args:
            start: Starts it.
            message: If the context is full, ask whether to drop turns for this message.
            begins_with: What the answer begins with, if the model continues it.
        """
        self.has_sent = True
        try:
            self.stream(start, begins_with)
        except MessageTooLongError:
            raise
        except ContextFullError as full:
            asks = self.settings.overflow_policy(self.chat) == "ask"
            if self.ask is None or not asks or not _confirms_drop(self.ask, full):
                raise ContextFullError(full.message, "/undo, /reset, or /set context_overflow drop") from None
            print_status(f"{self.chat.drop_oldest(message)} messages dropped: the model no longer sees them")
            self.stream(start, begins_with)
        if self.interactive:
            print_info("")  # an empty line before the next prompt

    def stream(self, start: StartAnswer, begins_with: str = "") -> None:
        """Stream the answer that `start` starts, and save it. Raise what the chat raises."""
        before = self.chat.stats.last
        try:
            markdown = self.settings.has_markdown(self.chat)
            new_screen = partial(open_screen, self.settings.reasoning, markdown)
            reason = stream_answer(self.chat, start, new_screen, self.stop, begins_with)
        finally:
            result = self.chat.stats.last
            if result is not None and result is not before:
                self.autosave.save_changes(self.chat)
                self.bytes_per_token = about.bytes_read_per_token(self.chat, result)
        if result is None or result is before:
            print_status("(stopped before the answer started: nothing has changed)")
            return
        if self.interactive and reason == "context":
            print_status(_CONTEXT_FULL[self.settings.overflow_policy(self.chat)])
        elif self.interactive and reason in _UNFINISHED:
            print_status(_UNFINISHED[reason])
        if self.settings.stats:
            print_status(f"({about.summary_line(result, self.bytes_per_token)})")
        # The grammar of tool calls, which isn't the user's, may end anywhere.
        if self.chat.options.constraint is not None and (constraint_error := result.constraint_error):
            raise GenerationError(constraint_error, "a larger max_tokens" if reason == "length" else None)

    def replace_chat(self, chat: Chat, path: Path, named: bool = True) -> None:
        """Continue with the chat of another session file; `named` if the user chose its name."""
        print_notes(chat)
        chat.tools, chat.allow_call = self.chat.tools, self.chat.allow_call
        self.chat, self.bytes_per_token = chat, ""
        self.autosave.open(path, named)
        messages = sum(message.role != "system" for message in chat.messages)
        where = str(path) if named else "them"
        print_status(f"{messages} messages; new messages are added to {where}. /show messages shows them")


def _confirms_drop(ask: Callable[[str], str], full: ContextFullError) -> bool:
    print_status(full.message)
    with suppress(EOFError, KeyboardInterrupt):
        return ask("Drop the oldest turns? [y/N] ").strip().lower() in ("y", "yes")
    return False


def print_notes(chat: Chat) -> None:
    """Print what the chat has to say about its file."""
    for note in chat.notes:
        print_status(note)


def stream_answer(
    chat: Chat, start: StartAnswer, new_screen: Callable[[], Screen], stop: threading.Event, begins_with: str = ""
) -> FinishReason | None:
    """Stream one answer to the screen until its end, or until `stop` is set.

    An answer that the model continues `begins_with` a text, which is shown in front of the first chunk. Calls of tools
    and their results are shown between two screens.

    Returns:
        The finish reason, None if stopped.

    Raises:
        Exception: Whatever the chat raises; the last line on the screen is ended first.
    """

    def on_prefill(tokens_read: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        if tokens_read < chat.prompt_tokens - 1:  # the last one is read together with the answer's first
            screen.status(f"reading: {tokens_read} of {chat.prompt_tokens} tokens")

    screen, has_text = new_screen(), False
    reason: FinishReason | None = None
    chunks = start(on_prefill)  # before the screen changes: it may raise
    try:
        screen.status(f"reading {chat.prompt_tokens} tokens")
        with closing(chunks):
            for chunk in chunks:
                if begins_with:
                    push_text(screen, begins_with)
                    begins_with = ""
                screen.push(chunk.text, chunk.reasoning)
                has_text = has_text or bool(chunk.text)
                reason = chunk.finish_reason
                if chunk.tool_result is not None:
                    show_result(chunk.tool_result)
                elif chunk.tool_call is not None:
                    if has_text or not isinstance(screen, PlainScreen):
                        screen.finish()
                    print_info(call_text(chunk.tool_call))
                    screen, has_text = new_screen(), False
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
    """Let Ctrl-C only set the event: an exception could strike in the middle of a step.

    The line editor reads Ctrl-C as a key and restores this handler when a line is done.
    """
    interrupted = threading.Event()
    with handle_signal(signal.SIGINT, lambda *_: interrupted.set()):
        yield interrupted


def raise_interrupts() -> AbstractContextManager[None]:
    """Let Ctrl-C raise KeyboardInterrupt, for work that changes nothing before it is done."""
    return handle_signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hide_typing() -> Iterator[None]:
    """Don't echo what is typed during an answer; the line editor reads it afterwards.

    This includes what was typed before a Ctrl-C, which the terminal would discard without NOFLSH.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH

    def set_modes(modes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, modes)

    set_modes(quiet)
    try:
        with handle_signal(signal.SIGCONT, lambda *_: set_modes(quiet)):  # the shell changes the modes during a Ctrl-Z
            yield
    finally:
        set_modes(before)


@contextmanager
def handle_signal(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    """Call `handler` on a signal."""
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)

"""The conversation of a person, or of a pipe, with a model: one turn after another."""

from __future__ import annotations

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlm.backend.bandwidth import BytesPerToken
from mlxlm.backend.error_text import describe_error
from mlxlm.chat.context_overflow import ContextFullError, MessageTooLongError
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import commands, statistics
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.multiline import read_piped_messages, strip_block
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.settings import Settings
from mlxlm.chat.terminal.stream_answer import StartAnswer, answer, defer_interrupts
from mlxlm.generation import FinishReason, LoadedModel
from mlxlm.utils.errors import GenerationError, MlxlmError

if TYPE_CHECKING:
    from mlxlm.chat.terminal.editor import Editor

_UNFINISHED: dict[FinishReason | None, str] = {
    None: "(stopped)",
    "length": "(cut off at max_tokens: /set max_tokens changes that)",
}
_FULL = {
    "ask": "(the context is full: with the next message you can drop the oldest turns)",
    "stop": "(the context is full: /undo, /reset, or /set context_overflow drop)",
    "drop": "(the context is full: with the next message the oldest turns are dropped)",
}
_HUNG_UP = 128 + signal.SIGHUP


class Repl:
    """A chat with its settings, its file, and what the commands change."""

    def __init__(
        self,
        chat: Chat,
        settings: Settings,
        autosave: Autosave,
        load: Callable[[str], LoadedModel],
        given: Mapping[str, Any] | None = None,
    ):
        """`load` gets another model by its name; `given`: arguments of `Chat.open` that count before what a session
        file says."""
        self.chat, self.settings, self.autosave, self.load, self.given = chat, settings, autosave, load, given or {}
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self.bytes_per_token: BytesPerToken | str | None = None  # by each token of the last answer
        self.draft = ""  # what the next line begins with,
        self.editing = False  # which will replace the last message
        self.leaving = False
        self.stop = threading.Event()  # set: the answer under way ends here
        self._editor: Editor | None = None
        self._hung_up = False

    def once(self, message: str) -> None:
        """Answer one message. Errors are raised, and so is Ctrl-C."""
        try:
            self._answer(lambda on_prefill: self.chat.ask(message, on_prefill=on_prefill))
        finally:
            self.autosave.finish(self.chat)

    def run(self, greeting: Sequence[str], private: bool = False) -> int:
        """Chat until /exit or the end of input: with a line editor in a terminal, else one message per line. Return
        the exit code.

        In a terminal Ctrl-C stops an answer and never the chat, and an error ends a turn. Over a pipe an error is
        raised, and there is no greeting. `private`: what is typed is not kept.
        """
        try:
            if self.interactive:
                for line in greeting:
                    print_status(line)
                with defer_interrupts() as self.stop, self._noted_hang_up(), _quiet_keyboard():
                    self._repl(private)
            else:
                for text in read_piped_messages(sys.stdin):
                    self._take_line(text)
                    if self.leaving:
                        break
        except OSError:
            if not self._hung_up:
                raise
        finally:
            self.autosave.finish(self.chat)
        return _HUNG_UP if self._hung_up else 0

    def _repl(self, private: bool) -> None:
        from mlxlm.chat.terminal.editor import Editor

        with closing(Editor(self, private)) as self._editor:
            self._take_lines(self._editor)
        if how := self.autosave.resume_option:
            print_status(f"this conversation is kept: mlxlm chat {how}")

    def _take_lines(self, editor: Editor) -> None:
        while not self.leaving:
            draft, editing = self.draft, self.editing
            self.draft, self.editing = "", False
            self.stop.clear()
            try:
                text = editor.read(self._prompt(), draft)
            except KeyboardInterrupt:
                if not editor.typed:
                    print_status("(/exit or Ctrl-D leaves the chat)")
                continue
            except EOFError:
                break
            try:
                self._take_line(text, editing)
            except ContextFullError as full:
                print_status(f"error: {full}")
                self.draft, self.editing = text, editing
            except KeyboardInterrupt:
                print_status("(stopped: nothing has changed)")
            except Exception as error:  # whatever it is (the device's memory, say), the conversation goes on
                if self._hung_up:
                    break
                print_status(f"error: {describe_error(error)}")

    def _take_line(self, text: str, editing: bool = False) -> None:
        line = text.strip()
        if line.startswith("/") and not line.startswith("//"):
            commands.run_command(self, line)
        elif line:
            message = text.replace("//", "/", 1) if line.startswith("//") else strip_block(text)
            if editing:
                self.edit(message)
            else:
                self.answer(lambda on_prefill: self.chat.ask(message, on_prefill=on_prefill), message)

    def edit(self, message: str) -> None:
        """Say `message` instead of the last one."""
        self.answer(lambda on_prefill: self.chat.edit(message, on_prefill=on_prefill), message)

    def answer(self, begin: StartAnswer, message: str = "") -> None:
        """Answer what `begin` begins, `message` as far as it is new. A context that is full is cleared as the person
        decides."""
        try:
            self._answer(begin)
        except MessageTooLongError:
            raise
        except ContextFullError as full:
            if not self.interactive or self.settings.overflow_policy(self.chat) != "ask" or not self._may_drop(full):
                raise ContextFullError(full.message, "/undo, /reset, or /set context_overflow drop") from None
            print_status(f"{self.chat.drop_oldest(message)} messages dropped: the model no longer sees them")
            self._answer(begin)
        if self.interactive:
            print_info("")  # the next prompt stands apart

    def _answer(self, begin: StartAnswer) -> None:
        before = self.chat.stats.answers
        try:
            markdown = self.settings.has_markdown(self.chat)
            reason = answer(self.chat, begin, self.settings.reasoning, markdown, self.stop)
        finally:
            answered = self.chat.stats.answers > before
            if answered:
                self.autosave.save_changes(self.chat)
                self.bytes_per_token = statistics.bytes_read_per_token(self.chat)
        if not answered:
            print_status("(stopped before the answer began: nothing has changed)")
            return
        if self.interactive and reason == "context":
            print_status(_FULL[self.settings.overflow_policy(self.chat)])
        elif self.interactive and reason in _UNFINISHED:
            print_status(_UNFINISHED[reason])
        if self.settings.stats:
            print_status(f"({statistics.summary_line(self.chat, self.bytes_per_token)})")
        if constraint_error := self.chat.stats.last.constraint_error:
            raise GenerationError(constraint_error, "a larger max_tokens" if reason == "length" else None)

    def _may_drop(self, full: ContextFullError) -> bool:
        print_status(full.message)
        with suppress(EOFError, KeyboardInterrupt):
            return self._editor.ask("Drop the oldest turns? [y/N] ").strip().lower() in ("y", "yes")
        return False

    def take(self, chat: Chat, path: Path) -> None:
        """Go on with the conversation of a session file."""
        print_notes(chat)
        self.chat, self.bytes_per_token = chat, None
        self.autosave.begin()
        self.autosave.name(path)
        messages = sum(message.role != "system" for message in chat.messages)
        print_status(f"{messages} messages; what is said from now on is added to {path}. /show messages shows them")

    def _prompt(self) -> list[tuple[str, str]]:
        """How full the context is, and where to type."""
        try:
            share = self.chat.context_used / self.chat.context_size
        except MlxlmError:  # a template that refuses the conversation says so when it is asked to answer
            return [("bold", "> ")]
        style = "ansired" if share >= 0.9 else "ansiyellow" if share >= 0.75 else "fg:ansibrightblack"
        branch = "" if self.chat.branch_name == "main" else f"{self.chat.branch_name} "
        return [(style, f"{branch}{share:.0%} "), ("bold", "> ")]

    @contextmanager
    def _noted_hang_up(self) -> Iterator[None]:
        """A terminal that is closed ends the answer and then the chat, which keeps both."""

        def hang_up(*_) -> None:
            self._hung_up = self.leaving = True
            self.stop.set()
            if self._editor is not None:
                self._editor.leave()

        previous = signal.signal(signal.SIGHUP, hang_up)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, previous)


def print_notes(chat: Chat) -> None:
    """Say what a person should know of how a chat was opened."""
    for note in chat.notes:
        print_status(note)


@contextmanager
def _quiet_keyboard() -> Iterator[None]:
    """Meanwhile, what is typed isn't shown in the middle of an answer; the line editor takes it afterwards, also what
    was typed before a Ctrl-C (the terminal would discard it without NOFLSH)."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH

    def change(modes: list) -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, modes)

    change(quiet)
    previous = signal.signal(signal.SIGCONT, lambda *_: change(quiet))  # the shell has changed them while we stopped
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, previous)
        change(before)

"""The conversation of a person, or of a pipe, with a model: one turn after another."""

from __future__ import annotations

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxlm.bandwidth import Moved
from mlxlm.chat.overflow import ContextFull
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import commands, statistics
from mlxlm.chat.terminal.blocks import piped_messages, without_block
from mlxlm.chat.terminal.keeping import Keeper
from mlxlm.chat.terminal.output import printable, say, tell
from mlxlm.chat.terminal.settings import Settings
from mlxlm.chat.terminal.turns import Begin, answer, noted_interrupts
from mlxlm.errors import GenerationError, MlxlmError, describe
from mlxlm.generation import FinishReason, LoadedModel

_UNFINISHED: dict[FinishReason | None, str] = {
    None: "(stopped)",
    "length": "(cut off at max_tokens: /set max_tokens changes that)",
}
_FULL = {
    "ask": "(the context is full: with the next message you can drop the oldest turns)",
    "stop": "(the context is full: /undo, /reset, or /set overflow drop)",
    "drop": "(the context is full: with the next message the oldest turns are dropped)",
}
_HUNG_UP = 128 + signal.SIGHUP


class Talk:
    """A chat with its settings, its file, and what the commands change."""

    def __init__(self, chat: Chat, settings: Settings, keeper: Keeper, load: Callable[[str], LoadedModel]):
        """`load` gets another model by its name."""
        self.chat, self.settings, self.keeper, self.load = chat, settings, keeper, load
        self.interactive = sys.stdin is not None and sys.stdin.isatty()
        self.moved: Moved | str | None = None  # by each token of the last answer
        self.draft = ""  # the last message, which is being edited
        self.leaving = False
        self.stop = threading.Event()  # set: the answer under way ends here
        self._hung_up = False

    def once(self, message: str) -> None:
        """Answer one message. Errors are raised, and so is Ctrl-C."""
        self._answer(lambda on_prefill: self.chat.ask(message, on_prefill=on_prefill))

    def run(self, greeting: Sequence[str], private: bool = False) -> None:
        """Chat until /exit or the end of input: with a line editor in a terminal, else one message per line.

        In a terminal Ctrl-C stops an answer and never the chat, and an error ends a turn. Over a pipe an error is
        raised, and there is no greeting. `private`: what is typed is not kept.
        """
        if not self.interactive:
            for text in piped_messages(sys.stdin):
                self._take_line(text)
                if self.leaving:
                    return
            return
        for line in greeting:
            say(printable(line))
        with noted_interrupts() as self.stop, self._noted_hang_up(), _quiet_keyboard():
            try:
                self._talk(private)
            except OSError:
                if not self._hung_up:
                    raise
            finally:
                self.keeper.finish(self.chat)
        if self._hung_up:
            raise SystemExit(_HUNG_UP)

    def _talk(self, private: bool) -> None:
        from mlxlm.chat.terminal.editor import Editor

        editor = Editor(self, private)
        while not self.leaving:
            draft, self.draft = self.draft, ""
            self.stop.clear()
            try:
                text = editor.read(self._prompt(), draft)
            except KeyboardInterrupt:
                if not editor.typed:
                    say("(/exit or Ctrl-D leaves the chat)")
                continue
            except EOFError:
                break
            try:
                self._take_line(text, editing=bool(draft))
            except KeyboardInterrupt:
                say("(stopped: nothing has changed)")
            except Exception as error:  # whatever it is (the device's memory, say), the conversation goes on
                if self._hung_up:
                    break
                say(f"error: {describe(error)}")
        if how := self.keeper.goodbye:
            say(f"this conversation is kept: mlxlm chat {how}")

    def _take_line(self, text: str, editing: bool = False) -> None:
        line = text.strip()
        if line.startswith("/") and not line.startswith("//"):
            commands.obey(self, line)
        elif line:
            message = text.replace("//", "/", 1) if line.startswith("//") else without_block(text)
            if editing:
                self.edit(message)
            else:
                self.answer(lambda on_prefill: self.chat.ask(message, on_prefill=on_prefill), message)

    def edit(self, message: str) -> None:
        """Say `message` instead of the last one."""
        self.answer(lambda on_prefill: self.chat.edit(message, on_prefill=on_prefill), message)

    def answer(self, begin: Begin, message: str = "") -> None:
        """Answer what `begin` begins, `message` as far as it is new. A context that is full is cleared as the person
        decides."""
        try:
            self._answer(begin)
        except ContextFull as full:
            if not self.interactive or self.settings.overflow != "ask" or not self._may_drop(full):
                raise
            say(f"{self.chat.drop_oldest(message)} messages dropped: the model no longer sees them")
            self._answer(begin)
        if self.interactive:
            tell("")  # the next prompt stands apart

    def _answer(self, begin: Begin) -> None:
        before = self.chat.stats.turns
        try:
            reason = answer(self.chat, begin, self.settings.think, self.settings.markdown, self.stop)
        finally:
            answered = self.chat.stats.turns > before
            if answered:
                self.keeper.keep(self.chat)
                self.moved = statistics.moved_by(self.chat)
        if not answered:
            say("(stopped before the answer began: nothing has changed)")
            return
        if self.interactive and reason == "context":
            say(_FULL[self.settings.overflow])
        elif self.interactive and reason in _UNFINISHED:
            say(_UNFINISHED[reason])
        if self.settings.stats:
            say(f"({statistics.short(self.chat, self.moved)})")
        if complaint := self.chat.stats.last.complaint:
            raise GenerationError(complaint)

    def _may_drop(self, full: ContextFull) -> bool:
        from prompt_toolkit import prompt

        if not self.chat.context_used:
            return False
        say(full.message)
        with suppress(EOFError, KeyboardInterrupt):
            return prompt("Drop the oldest turns? [y/N] ").strip().lower() in ("y", "yes")
        return False

    def take(self, chat: Chat, path: Path) -> None:
        """Go on with the conversation of a session file."""
        for note in chat.notes:
            say(printable(note))
        self.chat, self.moved = chat, None
        chat.overflow = "drop" if self.settings.overflow == "drop" else "stop"
        self.keeper.begin()
        self.keeper.name(path)
        messages = sum(message.role != "system" for message in chat.messages)
        say(f"{messages} messages; what is said from now on is added to {path}. /show messages shows them")

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

        previous = signal.signal(signal.SIGHUP, hang_up)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, previous)


@contextmanager
def _quiet_keyboard() -> Iterator[None]:
    """Meanwhile, what is typed isn't shown in the middle of an answer; the line editor takes it afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, before)

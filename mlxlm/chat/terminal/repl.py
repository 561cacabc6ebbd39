"""The interactive chat: reads messages and commands from a terminal or a pipe, and streams the answers."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlxlm.backend.bandwidth import BytesPerToken
from mlxlm.backend.error_text import describe_error
from mlxlm.chat.history import ContextFullError, MessageTooLongError
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import commands, statistics
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.first_screen import example_prompt
from mlxlm.chat.terminal.interrupts import defer_interrupts, handle_signal, hide_typing
from mlxlm.chat.terminal.multiline import read_piped_messages, strip_block
from mlxlm.chat.terminal.output import print_info, print_status
from mlxlm.chat.terminal.screen import StartAnswer, open_screen, stream_answer
from mlxlm.chat.terminal.settings import Settings
from mlxlm.generation import FinishReason, LoadedModel
from mlxlm.utils.errors import GenerationError, MlxlmError

if TYPE_CHECKING:
    from prompt_toolkit.formatted_text import StyleAndTextTuples

    from mlxlm.chat.terminal.editor import Editor
    from mlxlm.chat.terminal.session_list import SavedSession

Purpose = Literal["ask", "edit", "continue"]
_UNFINISHED: dict[FinishReason | None, str] = {
    None: "(stopped)",
    "length": "(cut off at max_tokens: /set max_tokens changes that)",
}
_CONTEXT_FULL = {
    "ask": "(the context is full: with the next message you can drop the oldest turns)",
    "stop": "(the context is full: /undo, /reset, or /set context_overflow drop)",
    "drop": "(the context is full: with the next message the oldest turns are dropped)",
}
_HANG_UP_EXIT_CODE = 128 + signal.SIGHUP


def open_repl(
    lm: LoadedModel,
    load: Callable[[str], LoadedModel],
    *,
    autosave: Autosave | None = None,
    settings: Settings | None = None,
    chat_arguments: Mapping[str, Any] | None = None,
    system_prompt: str | None = None,
) -> Repl:
    """Return a Repl for a new chat, or for the one in the session file of `autosave`.

    Args:
        lm: The model.
        load: Loads another model by its name, for /model.
        autosave: Where the chat is saved; by default nowhere.
        settings: How the chat is displayed.
        chat_arguments: Arguments of `Chat` and `Chat.open`, which override a session file.
        system_prompt: Replaces the session's system prompt.
    """
    autosave, arguments = autosave or Autosave(), dict(chat_arguments or {})
    if (path := autosave.path) is not None and (path.exists() or path.is_symlink()):
        chat = Chat.open(path, lm, **arguments)
    else:
        chat = Chat(lm, **arguments)
    if system_prompt is not None:
        chat.system_prompt = system_prompt
    _print_notes(chat)
    return Repl(chat, settings or Settings(), autosave, load, arguments)


@dataclass(eq=False)
class Repl:
    """A chat with its display settings and its file: the state that commands change.

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
    _editor: Editor | None = None
    _has_sent: bool = False
    _hung_up: bool = False

    def once(self, message: str) -> int:
        """Answer one message, and return the exit code. Errors and Ctrl-C are raised."""
        try:
            self._answer(partial(self.chat.ask, message), "")
        finally:
            self.autosave.finish(self.chat)
        return int(self.autosave.failed)

    def run(self, greeting: Sequence[str], private: bool = False) -> int:
        """Chat until /exit or the end of input, and return the exit code: 1 if a file that the user named isn't saved.

        In a terminal there is a line editor, Ctrl-C stops an answer but never the chat, and an error ends a turn.
        From a pipe each line is a message, and an error is raised.

        Args:
            greeting: Lines to print in a terminal.
            private: Don't save what is typed in the history.
        """
        try:
            if self.interactive:
                with defer_interrupts() as self.stop, handle_signal(signal.SIGHUP, self._hang_up), hide_typing():
                    for line in greeting:
                        print_status(line)
                    self._run_editor(private)
            else:
                for text in read_piped_messages(sys.stdin):
                    self._handle_line(text)
                    if self.leaving:
                        break
        except OSError:
            if not self._hung_up:
                raise
        finally:
            self.autosave.finish(self.chat)
        return _HANG_UP_EXIT_CODE if self._hung_up else int(self.autosave.failed)

    def send(self, text: str, purpose: Purpose = "ask") -> None:
        """Answer a message, or let the model continue its last answer from `text`; see the attribute `purpose`."""
        if purpose == "continue":
            self.answer(partial(self.chat.continue_answer, text), begins_with=text)
        else:
            self.answer(partial(self.chat.edit if purpose == "edit" else self.chat.ask, text), text)

    def answer(self, start: StartAnswer, message: str = "", begins_with: str = "") -> None:
        """Stream the answer that `start` starts.

        Args:
            start: Starts it.
            message: If the context is full, ask whether to drop turns for this message.
            begins_with: What the answer begins with, if the model continues it.
        """
        self._has_sent = True
        try:
            self._answer(start, begins_with)
        except MessageTooLongError:
            raise
        except ContextFullError as full:
            asks = self.settings.overflow_policy(self.chat) == "ask"
            if self._editor is None or not asks or not self._confirm_drop(self._editor, full):
                raise ContextFullError(full.message, "/undo, /reset, or /set context_overflow drop") from None
            print_status(f"{self.chat.drop_oldest(message)} messages dropped: the model no longer sees them")
            self._answer(start, begins_with)
        if self.interactive:
            print_info("")  # an empty line before the next prompt

    def replace_chat(self, chat: Chat, path: Path, named: bool = True) -> None:
        """Continue with the chat of another session file; `named` if the user chose its name."""
        _print_notes(chat)
        self.chat, self.bytes_per_token = chat, ""
        self.autosave.open(path, named)
        messages = sum(message.role != "system" for message in chat.messages)
        where = str(path) if named else "them"
        print_status(f"{messages} messages; new messages are added to {where}. /show messages shows them")

    def choose_session(self) -> SavedSession | None:
        """Let the user choose one of the saved conversations; see `choose_session`."""
        from mlxlm.chat.terminal.session_picker import choose_session

        return choose_session(self.autosave.path, self._editor.run if self._editor else None)

    def _run_editor(self, private: bool) -> None:
        from mlxlm.chat.terminal.editor import Editor

        with closing(Editor(self, private)) as self._editor:
            while not self.leaving and self._read_and_handle(self._editor):
                pass
        if option := self.autosave.resume_option:
            print_status(f"this conversation is saved: mlxlm chat {option}")

    def _read_and_handle(self, editor: Editor) -> bool:
        """Handle one message or command; return False to end the chat."""
        draft, purpose = self.draft, self.purpose
        self.draft, self.purpose = "", "ask"
        self.stop.clear()
        try:
            text = editor.read(self._prompt(), draft, self._example())
        except KeyboardInterrupt:
            if not editor.typed:
                print_status("(/exit or Ctrl-D leaves the chat)")
            return True
        except EOFError:
            return False
        try:
            self._handle_line(text, purpose)
        except ContextFullError as full:
            print_status(f"error: {full}")
            self.draft, self.purpose = text, purpose
        except KeyboardInterrupt:
            print_status("(stopped: nothing has changed)")
        except Exception as error:  # whatever it is (out of memory, say), the conversation continues
            if self._hung_up:
                return False
            print_status(f"error: {describe_error(error)}")
        return True

    def _handle_line(self, text: str, purpose: Purpose = "ask") -> None:
        line = text.strip()
        if line.startswith("/") and not line.startswith("//"):
            commands.run_command(self, line)
        elif line:
            self.send(text.replace("//", "/", 1) if line.startswith("//") else strip_block(text), purpose)

    def _answer(self, start: StartAnswer, begins_with: str) -> None:
        before = self.chat.stats.last
        try:
            markdown = self.settings.has_markdown(self.chat)
            screen = open_screen(self.settings.reasoning, markdown)
            reason = stream_answer(self.chat, start, screen, self.stop, begins_with)
        finally:
            result = self.chat.stats.last
            if result is not None and result is not before:
                self.autosave.save_changes(self.chat)
                self.bytes_per_token = statistics.bytes_read_per_token(self.chat, result)
        if result is None or result is before:
            print_status("(stopped before the answer started: nothing has changed)")
            return
        if self.interactive and reason == "context":
            print_status(_CONTEXT_FULL[self.settings.overflow_policy(self.chat)])
        elif self.interactive and reason in _UNFINISHED:
            print_status(_UNFINISHED[reason])
        if self.settings.stats:
            print_status(f"({statistics.summary_line(result, self.bytes_per_token)})")
        if constraint_error := result.constraint_error:
            raise GenerationError(constraint_error, "a larger max_tokens" if reason == "length" else None)

    def _confirm_drop(self, editor: Editor, full: ContextFullError) -> bool:
        print_status(full.message)
        with suppress(EOFError, KeyboardInterrupt):
            return editor.ask("Drop the oldest turns? [y/N] ").strip().lower() in ("y", "yes")
        return False

    def _example(self) -> str:
        """The message that Enter sends on an empty line: an example before the first message of a new chat."""
        return "" if self._has_sent or any(self.chat.branches.values()) else example_prompt(self.chat)

    def _prompt(self) -> StyleAndTextTuples:
        """The prompt: branch and fill level of the context."""
        try:
            share = self.chat.context_used / self.chat.context_size
        except MlxlmError:  # a template that refuses the conversation says so at the next answer
            return [("bold", "> ")]
        style = "ansired" if share >= 0.9 else "ansiyellow" if share >= 0.75 else "fg:ansibrightblack"
        branch = "" if self.chat.branch_name == "main" else f"{self.chat.branch_name} "
        return [(style, f"{branch}{share:.0%} "), ("bold", "> ")]

    def _hang_up(self, *_: Any) -> None:
        """Let a closed terminal end the answer and the chat, which are both saved."""
        self._hung_up = self.leaving = True
        self.stop.set()
        if self._editor is not None:
            self._editor.leave()


def _print_notes(chat: Chat) -> None:
    for note in chat.notes:
        print_status(note)

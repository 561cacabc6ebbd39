"""The interactive chat: reads messages and commands from a terminal or a pipe, and streams the answers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxlm.backend.error_text import describe_error
from mlxlm.chat.files import FileError, with_files
from mlxlm.chat.history import ContextFullError
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.about import example_prompt
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.commands import run_command, show_last_exchange
from mlxlm.chat.terminal.multiline import read_piped_messages, strip_block
from mlxlm.chat.terminal.output import print_status
from mlxlm.chat.terminal.settings import Settings
from mlxlm.chat.terminal.terminal_chat import (
    Purpose,
    TerminalChat,
    defer_interrupts,
    handle_signal,
    hide_typing,
    print_notes,
)
from mlxlm.generation import LoadedModel
from mlxlm.utils.errors import MlxlmError

if TYPE_CHECKING:  # prompt_toolkit takes time to import
    from mlxlm.chat.terminal.editor import Editor

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
    print_notes(chat)
    return Repl(chat, settings or Settings(), autosave, load, arguments)


@dataclass(eq=False)
class Repl(TerminalChat):
    """A chat that reads messages and commands until it ends."""

    _editor: Editor | None = None
    _hung_up: bool = False

    def once(self, message: str) -> int:
        """Answer one message, and return the exit code. Errors and Ctrl-C are raised."""
        try:
            self.stream(partial(self.chat.ask, with_files(message, self.files)))
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
                    show_last_exchange(self)
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

    def _run_editor(self, private: bool) -> None:
        from mlxlm.chat.terminal.editor import Editor  # prompt_toolkit takes time to import

        with closing(Editor(self, private)) as editor:
            self._editor, self.ask, self.run_application = editor, editor.ask, editor.run
            self.permissions.ask, self.permissions.stop = editor.ask, self.stop
            while not self.leaving and self._read_and_handle(editor):
                pass
        if option := self.autosave.resume_option:
            print_status(f"this conversation is saved: mlxlm chat {option}")

    def _read_and_handle(self, editor: Editor) -> bool:
        """Handle one message or command; return False to end the chat."""
        draft, purpose = self.draft, self.purpose
        self.draft, self.purpose = "", "ask"
        self.stop.clear()
        try:
            text = editor.read(self._prompt(), draft, self.example())
        except KeyboardInterrupt:
            if not editor.typed:
                print_status("(/exit or Ctrl-D leaves the chat)")
            return True
        except EOFError:
            return False
        try:
            self._handle_line(text, purpose)
        except (ContextFullError, FileError) as error:
            print_status(f"error: {error}")
            if not text.startswith("/file"):
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
            run_command(self, line)
        elif line:
            self.send(text.replace("//", "/", 1) if line.startswith("//") else strip_block(text), purpose)

    def example(self) -> str:
        """The message that Enter sends on an empty line: an example before the first message of a new chat."""
        return "" if self.has_sent or self.files or any(self.chat.branches.values()) else example_prompt(self.chat)

    def _prompt(self) -> list[tuple[str, str]]:
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

"""The line editor: history, several lines, completion, an external editor."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, get_app
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import has_selection, is_searching
from prompt_toolkit.formatted_text import AnyFormattedText, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Dimension
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle

from mlxlm.backend import platform
from mlxlm.chat.terminal.commands import ALIASES, COMMANDS, PATHS, find_command
from mlxlm.chat.terminal.mentions import UNFINISHED_MENTION, unescape
from mlxlm.chat.terminal.multiline import has_open_block
from mlxlm.chat.terminal.output import is_dumb_terminal, print_status
from mlxlm.chat.terminal.terminal_chat import TerminalChat
from mlxlm.utils.errors import GenerationError, PlatformError

Result = TypeVar("Result")


class Editor:
    """Reads messages from the terminal."""

    def __init__(self, terminal: TerminalChat, private: bool):
        """Complete the commands of `terminal`; with `private`, keep the history in memory only."""
        # Standard output may be a file while a person types: then the editor draws on standard error.
        self._output = None if sys.stdout.isatty() else create_output(always_prefer_tty=True)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if private else _history(),
            output=self._output,
            multiline=True,
            key_bindings=_keys(self),
            placeholder=self._placeholder,
            prompt_continuation=lambda width, _, wrapped: " " * width if wrapped else "… ".rjust(width),
            completer=_Completer(terminal),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            tempfile_suffix=".md",
            enable_suspend=True,
        )
        self._waiting: Application[Any] = self._session.app
        self._example = ""
        self._session.layout.current_window.height = self._height

    def read(self, prompt: Iterable[tuple[str, str]], draft: str = "", example: str = "") -> str:
        """Read a message, starting with `draft`. Enter on an empty line sends `example`, which is shown there.

        Raises:
            EOFError: Ctrl-D, or the terminal is closed.
            KeyboardInterrupt: Ctrl-C.
        """
        self._example = "" if is_dumb_terminal() else example
        return self._read(self._session, [*prompt], draft)

    def ask(self, question: str) -> str:
        """Read one line without history. Raise as `read` does."""
        return self._read(PromptSession(output=self._output, enable_suspend=True), question)

    def run(self, application: Application[Result]) -> Result:
        """Run another application in the terminal, and return its result. Raises EOFError if the terminal is closed."""
        self._waiting = application
        try:
            return application.run()
        finally:
            self._set_bracketed_paste(True)

    def _read(self, session: PromptSession[str], prompt: AnyFormattedText, draft: str = "") -> str:
        self._waiting = session.app
        try:
            return session.prompt(prompt, default=draft)
        finally:
            # prompt_toolkit has just ended this mode; what is pasted during an answer should stay one message, too.
            self._set_bracketed_paste(True)

    def close(self) -> None:
        """Restore the terminal."""
        self._set_bracketed_paste(False)

    def _set_bracketed_paste(self, on: bool) -> None:
        if not is_dumb_terminal():
            output = self._session.output
            (output.enable_bracketed_paste if on else output.disable_bracketed_paste)()
            output.flush()

    def _height(self) -> Dimension:
        """Limit a text to half of the screen while it is edited, so that an error above it stays visible."""
        half = max(self._session.output.get_size().rows // 2, 1)
        return Dimension() if get_app().is_done else Dimension(max=half)

    def _placeholder(self) -> StyleAndTextTuples:
        is_shown = self._example and not get_app().is_done
        return [("fg:ansibrightblack", f"{self._example}  (press Enter)")] if is_shown else []

    def send_example(self, buffer: Buffer) -> None:
        """Write the example on an empty line, if there is one."""
        if not buffer.text:
            buffer.insert_text(self._example)

    def leave(self) -> None:
        """Make a waiting `read`, `ask` or `run` raise EOFError. Can be called in a signal handler."""
        app = self._waiting

        def end() -> None:
            if app.future is not None and not app.future.done():
                app.exit(exception=EOFError)

        if app.loop is not None:
            with suppress(RuntimeError):  # the loop of the last line is closed
                app.loop.call_soon_threadsafe(end)

    @property
    def typed(self) -> str:
        """The text when Ctrl-C was pressed."""
        return self._session.default_buffer.text


def _keys(editor: Editor) -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if has_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            editor.send_example(buffer)
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e")
    @keys.add("c-g", filter=~is_searching & ~has_selection)
    def _editor(event: KeyPressEvent) -> None:
        event.current_buffer.open_in_editor()

    return keys


class _Completer(Completer):
    """Completes commands, their arguments, and files that a message mentions."""

    def __init__(self, terminal: TerminalChat):
        self._terminal = terminal

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Yield completions of one word at a time."""
        text = document.text_before_cursor
        if (match := UNFINISHED_MENTION.search(text)) and not text.startswith("/sy"):  # whose @ is a name
            for c in _complete_path(unescape(match["bare"]), event):
                yield Completion(re.sub(r"""([\s\\"'])""", r"\\\1", c.text), c.start_position, c.display)
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, space, argument = text.partition(" ")
        if not space:
            candidates = [key + " " * (" " in find_command(key).usage) for key in (*COMMANDS, *ALIASES)]
            argument = name
        else:
            try:
                candidates = list(find_command(name).complete(self._terminal))
            except GenerationError:
                return
        if PATHS in candidates:
            candidates.remove(PATHS)
            yield from _complete_path(argument, event)
        # A space follows where another word may.
        start = argument.rfind(" ") + 1
        words: dict[str, str] = {}
        for candidate in candidates:
            if candidate.startswith(argument) and candidate != argument:
                word, space, _ = candidate[start:].partition(" ")
                words[word] = words.get(word) or space
        for word, space in words.items():
            yield Completion(word + space, start_position=start - len(argument))


def _complete_path(path: str, event: CompleteEvent) -> Iterable[Completion]:
    """Yield completions of a path. A slash follows a folder; hidden files need their dot."""
    hidden = os.path.basename(path).startswith(".")
    completer = PathCompleter(expanduser=True, file_filter=lambda p: hidden or not os.path.basename(p).startswith("."))
    for c in completer.get_completions(Document(path), event):
        yield Completion(c.text + "/" * c.display_text.endswith("/"), c.start_position, c.display)


def _history() -> History:
    """Return the history of earlier chats, in a file that only its owner can read."""
    try:
        path = platform.state_folder() / "chat_history"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode=0o600))
    except (OSError, PlatformError) as error:
        print_status(f"the history of this chat won't be saved: {error}")
        return InMemoryHistory()
    return _SafeHistory(path)


class _SafeHistory(FileHistory):
    """A history that survives a full disk."""

    def store_string(self, string: str) -> None:
        """Append a line to the file."""
        with suppress(OSError):
            super().store_string(string)

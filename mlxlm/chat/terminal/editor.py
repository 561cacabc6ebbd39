"""The line that a person types into: history, several lines, completion, an external editor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache, partial

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import has_selection, is_searching
from prompt_toolkit.formatted_text import AnyFormattedText, StyleAndTextTuples
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.layout import Dimension
from prompt_toolkit.output import create_output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import get_cwidth

from mlxlm.backend import platform
from mlxlm.chat.terminal.commands import ALIASES, COMMANDS, COMPLETE_PATHS, named
from mlxlm.chat.terminal.multiline import has_open_block
from mlxlm.chat.terminal.output import is_dumb_terminal, print_status
from mlxlm.utils.errors import GenerationError, PlatformError


class Editor:
    """Reads messages from the terminal."""

    def __init__(self, repl, private: bool):
        """`repl`: the Talk whose words are completed; `private`: what is typed is not kept."""
        # Standard output may be a file while a person types: then the editor draws on standard error.
        self._output = None if sys.stdout.isatty() else create_output(always_prefer_tty=True)
        self._session = self._waiting = PromptSession(
            history=InMemoryHistory() if private else _history(),
            output=self._output,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=lambda width, _, wrapped: " " * width if wrapped else "… ".rjust(width),
            completer=_Commands(repl),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            tempfile_suffix=".md",
            enable_suspend=True,
        )
        self._session.layout.current_window.height = self._height

    def read(self, prompt: StyleAndTextTuples, draft: str = "") -> str:
        """A message; `draft` is there to be edited. Raises EOFError for Ctrl-D and a terminal that is gone,
        KeyboardInterrupt for Ctrl-C."""
        return self._read(self._session, partial(self._prompt, prompt), draft)

    def ask(self, question: str) -> str:
        """One line of answer, which no history keeps. Raises as `read` does."""
        return self._read(PromptSession(output=self._output, enable_suspend=True), question)

    def _read(self, session: PromptSession, prompt: AnyFormattedText, draft: str = "") -> str:
        self._waiting = session
        try:
            return session.prompt(prompt, default=draft)
        finally:
            # What is pasted during the answer stays one message, too. prompt_toolkit has just ended this mode.
            self._set_bracketed_paste(True)

    def close(self) -> None:
        """The last line is read."""
        self._set_bracketed_paste(False)

    def _set_bracketed_paste(self, on: bool) -> None:
        if not is_dumb_terminal():
            output = self._session.output
            (output.enable_bracketed_paste if on else output.disable_bracketed_paste)()
            output.flush()

    def _height(self) -> Dimension:
        """A long text scrolls in half of the screen, so that what was said before, an error for instance, stays."""
        return Dimension(max=self._half) if self._is_folded() or not get_app().is_done else Dimension()

    def _prompt(self, prompt: StyleAndTextTuples) -> StyleAndTextTuples:
        """`prompt`, below the size of a text of which only a part is shown."""
        if not self._is_folded():
            return prompt
        text = self._session.default_buffer.text
        lines = text.count("\n") + 1
        size = f"{lines} lines, {len(text)} characters" if lines > 1 else f"{len(text)} characters"
        return [("fg:ansibrightblack", f"[{size}; Ctrl-G opens an editor]\n"), *prompt]

    def _is_folded(self) -> bool:
        """Whether the text is higher than half of the screen; once it is sent, than the screen."""
        rows = _rows(self._session.default_buffer.text, self._session.output.get_size().columns)
        return rows > self._half * (2 if get_app().is_done else 1)

    @property
    def _half(self) -> int:
        """Rows of half of the screen."""
        return max(self._session.output.get_size().rows // 2, 1)

    def leave(self) -> None:
        """Let `read` or `ask`, if one is waiting, raise EOFError; to be called in a signal's handler."""
        app = self._waiting.app

        def end() -> None:
            if app.future is not None and not app.future.done():
                app.exit(exception=EOFError)

        if app.loop is not None:
            with suppress(RuntimeError):  # the loop of the last line is closed
                app.loop.call_soon_threadsafe(end)

    @property
    def typed(self) -> str:
        """What was there when Ctrl-C was hit."""
        return self._session.default_buffer.text


@lru_cache(maxsize=1)  # asked for many times while one screen is drawn
def _rows(text: str, columns: int) -> int:
    """Rows of a text, about: the width of the prompt beside it isn't counted."""
    return sum(max(1, -(-get_cwidth(line) // max(columns, 1))) for line in text.split("\n"))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter", filter=~is_searching)
    def _enter(event) -> None:
        buffer = event.current_buffer
        if has_open_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _alt_enter(event) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e")
    @keys.add("c-g", filter=~is_searching & ~has_selection)
    def _editor(event) -> None:
        event.current_buffer.open_in_editor()

    return keys


class _Commands(Completer):
    """Completes commands, their arguments, and paths."""

    def __init__(self, repl):
        self._repl = repl

    def get_completions(self, document: Document, event) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or text.startswith("//") or "\n" in text:
            return
        name, space, argument = text.partition(" ")
        if not space:
            candidates = [key + " " * (" " in named(key).usage) for key in (*COMMANDS, *ALIASES)]
            argument = name
        else:
            try:
                candidates = list(named(name).complete(self._repl))
            except GenerationError:
                return
        if COMPLETE_PATHS in candidates:
            candidates.remove(COMPLETE_PATHS)
            yield from PathCompleter(expanduser=True).get_completions(Document(argument), event)
        # One word at a time, with a space behind it where another may follow.
        begin = argument.rfind(" ") + 1
        words: dict[str, str] = {}
        for candidate in candidates:
            if candidate.startswith(argument) and candidate != argument:
                word, space, _ = candidate[begin:].partition(" ")
                words[word] = words.get(word) or space
        for word, space in words.items():
            yield Completion(word + space, start_position=begin - len(argument))


def _history() -> History:
    """The lines of earlier chats, in a file that only its owner can read."""

    class SafeHistory(FileHistory):
        """A disk that is full must not disturb the chat."""

        kept = True

        def store_string(self, string: str) -> None:
            try:
                if self.kept:
                    super().store_string(string)
            except OSError as error:
                self.kept = False
                print_status(f"the history of this chat is no longer kept: {path}: {error.strerror}")

    try:
        path = platform.state_folder() / "chat_history"
    except PlatformError as error:
        print_status(f"the history of this chat won't be kept: {error.message}")
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode=0o600))
    except OSError as error:
        print_status(f"the history of this chat won't be kept: {path}: {error.strerror}")
        return InMemoryHistory()
    return SafeHistory(path)

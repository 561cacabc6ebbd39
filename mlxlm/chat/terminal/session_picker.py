"""Choose one of the saved conversations: a list in the terminal, with a search, a preview, and deletion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.application import Application
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.data_structures import Point
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout import Dimension, HSplit, Layout, VSplit, Window
from prompt_toolkit.layout.controls import BufferControl, FormattedTextControl
from prompt_toolkit.utils import get_cwidth

from mlxlm.chat.session_file import cache_path
from mlxlm.chat.terminal.autosave import SavedSession, highlighted, saved_sessions, session_table, single_line
from mlxlm.chat.terminal.output import is_dumb_terminal, write
from mlxlm.utils.errors import GenerationError

_PREVIEW_ROWS = 6
_KEYS = "type to search, Enter opens, Ctrl-X deletes, Esc leaves"
_DIM = "fg:ansibrightblack"


def choose_session(
    current: Path | None = None, run: Callable[[Application[SavedSession | None]], SavedSession | None] | None = None
) -> SavedSession | None:
    """Let the user choose one of the saved conversations. Without a terminal, print them and return None.

    Args:
        current: The conversation that is open.
        run: Runs the application, by default with its own `run`.

    Raises:
        GenerationError: There is none.
        EOFError: The terminal is closed.
        KeyboardInterrupt: Ctrl-C.
    """
    if not (sessions := saved_sessions()):
        raise GenerationError("there is no saved conversation", "a chat in a terminal, without --private")
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stdout.isatty() or is_dumb_terminal():
        write(session_table(sessions))
        return None
    application = SessionPicker(sessions, current).application
    return application.run() if run is None else run(application)


class SessionPicker:
    """A list of conversations in the lower part of a terminal. What is typed filters it."""

    def __init__(self, sessions: Sequence[SavedSession], current: Path | None = None):
        """Show `sessions`; `current` is open and can't be deleted."""
        self._all, self._current = list(sessions), current
        self._selected = 0
        self._message = ""
        self._is_deleting = False
        self._search = Buffer(multiline=False, on_text_changed=lambda _: self._select(0))
        keys_line = Window(FormattedTextControl(self._status), height=1)
        search_line = VSplit(
            [
                Window(FormattedTextControl([("bold", "search: ")]), width=8, height=1),
                Window(BufferControl(self._search), height=1),
            ]
        )
        session_list = Window(
            FormattedTextControl(self._rows, show_cursor=False, get_cursor_position=lambda: Point(0, self._selected)),
            height=lambda: Dimension(min=1, preferred=max(1, min(len(self._found), self._list_rows))),
            dont_extend_height=True,
        )
        preview = Window(FormattedTextControl(self._preview), height=Dimension(max=_PREVIEW_ROWS + 1), wrap_lines=True)
        self.application: Application[SavedSession | None] = Application(
            Layout(HSplit([search_line, session_list, preview, keys_line])),
            key_bindings=self._key_bindings(),
            erase_when_done=True,
        )
        self.application.ttimeoutlen = self.application.timeoutlen = 0.05  # Esc alone needn't wait for a sequence

    @property
    def _words(self) -> list[str]:
        return self._search.text.split()

    @property
    def _found(self) -> list[SavedSession]:
        return [session for session in self._all if session.contains(self._words)]

    @property
    def _list_rows(self) -> int:
        return self.application.output.get_size().rows // 2

    def _select(self, index: int) -> None:
        self._selected = max(0, min(index, len(self._found) - 1))
        self._message, self._is_deleting = "", False

    def _chosen(self) -> SavedSession | None:
        found = self._found
        return found[self._selected] if found else None

    def _rows(self) -> StyleAndTextTuples:
        width = self.application.output.get_size().columns
        if not self._found:
            return [(_DIM, "no conversation contains this")]
        rows: StyleAndTextTuples = []
        for index, session in enumerate(self._found):
            style = "reverse" if index == self._selected else ""
            mark = "*" if session.path == self._current else " "
            rows.append((style, _fitted(mark + row_text(session), width - 1)))
            rows.append(("", "\n"))
        return rows[:-1]

    def _preview(self) -> StyleAndTextTuples:
        if (session := self._chosen()) is None:
            return []
        width = self.application.output.get_size().columns - 1
        parts: StyleAndTextTuples = [(_DIM, "─" * width)]
        for _, (role, line) in zip(range(_PREVIEW_ROWS), session.lines_with(self._words), strict=False):
            shown = _around(line, self._words, width - len(role) - 2)
            parts += [("", "\n"), (_DIM, f"{role}: "), *highlighted(shown, self._words, "bold fg:ansiyellow")]
        if session.problem:
            parts += [("", "\n" + single_line(session.problem))]
        return parts

    def _status(self) -> StyleAndTextTuples:
        if self._is_deleting:
            return [("bold", "Delete this conversation? [y/N]")]
        return [(_DIM, self._message or f"{self._selected + bool(self._found)} of {len(self._found)}: {_KEYS}")]

    def _delete(self) -> None:
        if (session := self._chosen()) is None:
            return
        try:
            session.path.unlink(missing_ok=True)
        except OSError as error:
            self._select(self._selected)
            self._message = f"{session.path} can't be deleted: {error.strerror}"
            return
        with suppress(OSError):
            cache_path(session.path).unlink()
        self._all.remove(session)
        self._select(self._selected)

    def _key_bindings(self) -> KeyBindings:
        keys, is_deleting = KeyBindings(), Condition(lambda: self._is_deleting)

        def add_move(key: str, sign: int, by_page: bool = False) -> None:
            keys.add(key)(lambda event: self._select(self._selected + sign * (self._list_rows if by_page else 1)))

        for key, sign in (("up", -1), ("c-p", -1), ("down", 1), ("c-n", 1)):
            add_move(key, sign)
        add_move("pageup", -1, by_page=True)
        add_move("pagedown", 1, by_page=True)

        @keys.add("enter")
        def _open(event: KeyPressEvent) -> None:
            session = self._chosen()
            if session is not None and not session.problem:
                event.app.exit(result=session)
            elif session is not None:
                self._message = "this file can't be read"

        @keys.add("escape")
        @keys.add("c-d")
        def _leave(event: KeyPressEvent) -> None:
            event.app.exit(result=None)

        @keys.add("c-c")
        def _interrupt(event: KeyPressEvent) -> None:
            event.app.exit(exception=KeyboardInterrupt)

        @keys.add("c-x", eager=True)  # not a prefix of other keys
        def _ask(event: KeyPressEvent) -> None:
            session = self._chosen()
            if session is not None and session.path == self._current:
                self._message = "this is the open conversation: /reset starts a new one"
            else:
                self._is_deleting = session is not None

        @keys.add("<any>", filter=is_deleting, eager=True)
        def _answer(event: KeyPressEvent) -> None:
            if event.data in ("y", "Y"):
                self._delete()
            else:
                self._select(self._selected)

        return keys


def row_text(session: SavedSession) -> str:
    """Return date, model, number of messages and first question of a conversation."""
    model = _fitted(session.short_model, 19)
    return f"{session.time:%Y-%m-%d %H:%M}  {model} {session.count:>5}  {session.first_question}"


def _fitted(text: str, width: int) -> str:
    """Cut or fill `text` to a width in columns."""
    if get_cwidth(text) > width:
        while text and get_cwidth(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (width - get_cwidth(text))


def _around(line: str, words: Sequence[str], width: int) -> str:
    """Cut a line to a width, around the first of the words."""
    first = min((position for word in words if (position := line.lower().find(word.lower())) >= 0), default=0)
    start = max(0, first - width // 3) if len(line) > width else 0
    return _fitted(("…" if start else "") + line[start:], max(width, 1)).rstrip()

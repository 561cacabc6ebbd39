"""The saved conversations: what a list of them shows, and a search in their messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.chat.messages import Message
from mlxlm.chat.session_file import peek_session
from mlxlm.chat.terminal import autosave
from mlxlm.checkpoint.download import find
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line, os_errors_as
from mlxlm.utils.formatting import printable

_MAX_BYTES = 4 << 20  # of each file are read: a chat of 400,000 tokens


@dataclass(frozen=True)
class SavedSession:
    """A session file, as a list shows it.

    Attributes:
        path: The file.
        time: When it was changed.
        model: The model's name.
        messages: The messages of all branches; of a large file, the first ones.
        problem: Why the file can't be read, or "".
        is_partial: Whether there are more messages.
    """

    path: Path
    time: datetime
    model: str = ""
    messages: Sequence[Message] = ()
    problem: str = ""
    is_partial: bool = False

    @classmethod
    def read(cls, path: Path) -> SavedSession:
        """Read a file. If that fails, the entry says why."""
        time = datetime.fromtimestamp(0)
        try:
            with os_errors_as(GenerationError, "read", path):
                time = datetime.fromtimestamp(path.stat().st_mtime)
            with open_regular(path, GenerationError) as file:
                content, is_partial = file.read(_MAX_BYTES), bool(file.read(1))
            complete = content[: content.rfind(b"\n") + 1] if is_partial else content
            model, messages = peek_session(complete, path)
        except MlxlmError as error:
            return cls(path, time, problem=f"can't be read: {one_line(error.message.replace(str(path), path.name))}")
        return cls(path, time, model, messages, is_partial=is_partial)

    @property
    def short_model(self) -> str:
        """The last part of the model's name."""
        return single_line(Path(self.model).name.removesuffix(".gguf"))

    @property
    def count(self) -> str:
        """The number of messages."""
        return "?" if self.problem else f"{len(self.messages)}{'+' if self.is_partial else ''}"

    @property
    def first_question(self) -> str:
        """The first question; for a file that can't be read, why."""
        if self.problem:
            return f"({single_line(self.problem)})"
        return single_line(self.messages[0].content) if self.messages else "(empty)"

    @cached_property
    def _text(self) -> str:
        return "\n".join([self.model, str(self.path), *(message.content for message in self.messages)]).lower()

    def contains(self, words: Iterable[str]) -> bool:
        """Whether the messages, the model's name and the path contain all these words, in any case."""
        return all(word.lower() in self._text for word in words)

    def lines_with(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the role and the text of the lines that contain any of these words; without words, of all lines."""
        for message in self.messages:
            lines = (
                message.content.splitlines()
                if any(w.lower() in message.content.lower() for w in words or ("",))
                else ()
            )
            for line in lines:
                if line.strip() and any(word.lower() in line.lower() for word in words or ("",)):
                    yield message.role, single_line(line)


def saved_sessions() -> list[SavedSession]:
    """Return the conversations in the private folder, the newest first."""
    return [SavedSession.read(path) for path in autosave.session_paths()]


def is_model_here(name: str) -> bool:
    """Whether the model that a session file names is on this machine.

    A file from elsewhere is no reason to download something.
    """
    repository, _, revision = name.partition("@")
    folder = platform.model_cache() / "--".join(["models", *repository.split("/")])
    is_cached = any((folder / kind / (revision or "main")).exists() for kind in ("refs", "snapshots"))
    return is_cached or find(name) is not None


def session_table(sessions: Sequence[SavedSession]) -> str:
    """Return a line for each session: date, model, messages, first question and file, with tabs between."""
    return "".join(
        f"{s.time:%Y-%m-%d %H:%M}\t{s.short_model}\t{s.count}\t{s.first_question}\t{s.path}\n" for s in sessions
    )


def single_line(text: str) -> str:
    """Return `text` as one line without control characters."""
    return printable(" ".join(text.split()))


def highlighted(line: str, words: Sequence[str], style: str) -> list[tuple[str, str]]:
    """Split a line into (style, text) parts, with `style` for the words."""
    pattern = re.compile("|".join(map(re.escape, words)) or "(?!)", re.IGNORECASE)
    parts, end = [], 0
    for match in pattern.finditer(line):
        parts += [("", line[end : match.start()]), (style, match[0])]
        end = match.end()
    return [*parts, ("", line[end:])]

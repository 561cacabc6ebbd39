"""Saved conversations: written to a session file after every answer, listed, and searched."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.chat.files import name_files
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from mlxlm.chat.session_file import peek_session
from mlxlm.chat.terminal.output import print_status
from mlxlm.checkpoint.download import find
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line, os_errors_as
from mlxlm.utils.formatting import printable

MAX_UNNAMED_SESSIONS = 50  # older ones are removed


@dataclass
class Autosave:
    """Writes a chat to its file after every change: a file that the user named, or a new one in a private folder.

    Only the owner can read these files. If one can't be written, each cause is reported once.

    Attributes:
        path: The session file; None for none yet.
        named: Whether the user chose the file.
        cached: Also save the key-value cache when the chat ends.
        unnamed: Save chats without a file to the private folder.
    """

    path: Path | None = None
    named: bool = False
    cached: bool = False
    unnamed: bool = False
    _problem: str = ""

    def save_changes(self, chat: Chat) -> None:
        """Save the chat if it has a file, or any message."""
        if self.path is None and not (self.unnamed and any(chat.branches.values())):
            return
        try:
            if self.path is None:
                self.path = _new_unnamed()
            self.save(chat, self.path)
            self._problem = ""
        except MlxlmError as error:
            if error.message != self._problem:
                print_status(f"error: this conversation is not saved: {error}")
            self._problem = error.message

    def finish(self, chat: Chat) -> None:
        """Save the key-value cache, if requested, when the chat ends."""
        if self.cached and self.path is not None:
            try:
                self.save(chat, self.path, cache=True)
            except MlxlmError as error:
                print_status(f"error: the key-value cache is not saved: {error}")
                self._problem = error.message

    def save(self, chat: Chat, path: Path, cache: bool = False) -> None:
        """Save the chat to `path`, with `cache` also the key-value cache. Raise as `Chat.save` does."""
        before = os.umask(0o077)  # new files are readable by their owner only
        try:
            chat.save(path, cache=cache)
        finally:
            os.umask(before)

    def set_path(self, path: Path, cached: bool = False) -> None:
        """Save to `path` from now on. An unnamed file used before is removed."""
        if self.path is not None and not self.named and self.path != path:
            with suppress(OSError):
                self.path.unlink()
        self.path, self.named, self.cached = path, True, cached

    def open(self, path: Path | None, named: bool = False) -> None:
        """Save another chat from now on, to its own file or a new one. The file used before stays."""
        self.path, self.named, self.cached = path, named, False

    @property
    def failed(self) -> bool:
        """Whether the file that the user named isn't up to date."""
        return self.named and bool(self._problem)

    @property
    def resume_option(self) -> str | None:
        """The option of `mlxlm chat` that continues this chat; None if it isn't saved."""
        if self.path is None or self._problem:
            return None
        return f"--session {shlex.quote(str(self.path.absolute()))}" if self.named else "--continue"


def latest_session() -> Path:
    """Return the file of the last unnamed chat. Raise GenerationError if there is none."""
    if paths := session_paths():
        return paths[0]
    raise GenerationError("there is no conversation to continue", "a chat without --continue")


def session_paths() -> list[Path]:
    """Return the files in the private folder, the newest first."""
    files = []
    for path in _folder().glob("*.jsonl"):
        with suppress(OSError):  # another chat has just removed it
            files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files, reverse=True)]


def _new_unnamed() -> Path:
    """Return a new file in the private folder, and remove the oldest files there."""
    folder = _folder()
    with os_errors_as(GenerationError, "write", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in session_paths()[MAX_UNNAMED_SESSIONS - 1 :]:
        with suppress(OSError):
            path.unlink()
    return folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}.jsonl"


def _folder() -> Path:
    return platform.state_folder() / "chats"


@dataclass(frozen=True)
class SavedSession:
    """A session file, as a list shows it.

    Attributes:
        path: The file.
        time: When it was changed.
        model: The model's name.
        messages: The messages of all branches.
        problem: Why the file can't be read, or "".
    """

    path: Path
    time: datetime
    model: str = ""
    messages: Sequence[Message] = ()
    problem: str = ""

    @classmethod
    def read(cls, path: Path) -> SavedSession:
        """Read a file. If that fails, the entry says why."""
        time = datetime.fromtimestamp(0)
        try:
            with os_errors_as(GenerationError, "read", path):
                time = datetime.fromtimestamp(path.stat().st_mtime)
            model, messages = peek_session(path)
        except MlxlmError as error:
            return cls(path, time, problem=f"can't be read: {one_line(error.message.replace(str(path), path.name))}")
        return cls(path, time, model, messages)

    @property
    def short_model(self) -> str:
        """The last part of the model's name."""
        return single_line(Path(self.model).name.removesuffix(".gguf"))

    @property
    def count(self) -> str:
        """The number of messages."""
        return "?" if self.problem else str(len(self.messages))

    @property
    def first_question(self) -> str:
        """The first question; for a file that can't be read, why."""
        if self.problem:
            return f"({single_line(self.problem)})"
        return single_line(name_files(self.messages[0].content)) if self.messages else "(empty)"

    @cached_property
    def _text(self) -> str:
        return "\n".join([self.model, str(self.path), *(message.content for message in self.messages)]).lower()

    def contains(self, words: Iterable[str]) -> bool:
        """Whether the messages, the model's name and the path contain all these words, in any case."""
        return all(word.lower() in self._text for word in words)

    def lines_with(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the role and the text of the lines that contain any of these words; without words, of all lines."""
        wanted = [word.lower() for word in words or ("",)]
        for message in self.messages:
            for line in message.content.splitlines():
                if line.strip() and any(word in line.lower() for word in wanted):
                    yield message.role, single_line(line)


def saved_sessions() -> list[SavedSession]:
    """Return the conversations in the private folder, the newest first."""
    return [SavedSession.read(path) for path in session_paths()]


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

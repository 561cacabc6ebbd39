"""Saves a chat to a session file after every answer."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.output import print_status
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as

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

    def open(self, path: Path, named: bool) -> None:
        """Save another chat from now on, to its own file. The file used before stays."""
        self.path, self.named, self.cached = path, named, False

    def forget(self) -> None:
        """Start a new, unnamed chat. The old file stays."""
        self.path, self.named, self.cached = None, False, False

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
    return _by_age(_folder())[::-1]


def _new_unnamed() -> Path:
    """Return a new file in the private folder, and remove the oldest files there."""
    folder = _folder()
    with os_errors_as(GenerationError, "write", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in _by_age(folder)[: -(MAX_UNNAMED_SESSIONS - 1)]:
        with suppress(OSError):
            path.unlink()
    return folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}.jsonl"


def _by_age(folder: Path) -> list[Path]:
    """Return the session files in a folder, the newest last."""
    files = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):  # another chat has just removed it
            files.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(files)]


def _folder() -> Path:
    return platform.state_folder() / "chats"

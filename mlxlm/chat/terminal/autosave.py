"""Where a conversation is kept: a session file that is written after every answer, so that nothing is lost."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from mlxlm.backend import platform
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.output import print_status
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as

MAX_UNNAMED_SESSIONS = 50  # conversations that nobody gave a name; older ones are removed


class Autosave:
    """Writes a chat to its file after every change: one that a person named, or a new one among the unnamed.

    All files are for their owner's eyes only. A file that can't be written is said once for every cause.
    """

    def __init__(self, path: Path | None = None, *, named: bool = False, cached: bool = False, unnamed: bool = False):
        """`path`: the file, None for none yet; `named`: a person chose it; `cached`: with the cache beside it, when
        the chat ends; `unnamed`: a conversation without a name is kept, too."""
        self.path = path
        self.named = named
        self._cached = cached
        self._unnamed = unnamed
        self._problem = ""

    def save_changes(self, chat: Chat) -> None:
        """Write the conversation, once it has a message."""
        if self.path is None and not (self._unnamed and any(chat.branches.values())):
            return
        try:
            if self.path is None:
                self.path = _new_unnamed()
            self.save(chat, self.path)
            self._problem = ""
        except MlxlmError as error:
            if error.message != self._problem:
                print_status(f"this conversation is not kept: {error}")
            self._problem = error.message

    def finish(self, chat: Chat) -> None:
        """The chat ends: write the cache, where one is wanted."""
        if self._cached and self.path is not None:
            try:
                self.save(chat, self.path, cache=True)
            except MlxlmError as error:
                print_status(f"the cache is not kept: {error}")

    def save(self, chat: Chat, path: Path, cache: bool = False) -> None:
        """Write the conversation to `path`, and the cache beside it. Raises GenerationError (see `Chat.save`)."""
        with _private():
            chat.save(path, cache=cache)

    def name(self, path: Path, cached: bool = False) -> None:
        """From now on, this is the conversation's file. The unnamed one that it had before is removed."""
        if self.path is not None and not self.named and self.path != path:
            with suppress(OSError):
                self.path.unlink()
        self.path, self.named, self._cached = path, True, cached

    def begin(self) -> None:
        """A new conversation begins, without a name: what was kept stays where it is."""
        self.path, self.named, self._cached = None, False, False

    @property
    def resume_option(self) -> str | None:
        """How to go on with this conversation another day, from any folder; None if it isn't kept."""
        if self.path is None or self._problem:
            return None
        return f"--session {shlex.quote(str(self.path.absolute()))}" if self.named else "--continue"


def latest_session() -> Path:
    """The file of the last conversation without a name. Raises GenerationError if there is none."""
    found = _by_age(_folder())
    if not found:
        raise GenerationError("there is no conversation to continue", "a chat without --continue")
    return found[-1]


def _new_unnamed() -> Path:
    """A new file in a private folder, which loses its oldest ones. Raises MlxlmError if there is no place for it."""
    folder = _folder()
    with os_errors_as(GenerationError, "write", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in _by_age(folder)[: -(MAX_UNNAMED_SESSIONS - 1)]:
        with suppress(OSError):
            path.unlink()
    return folder / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}.jsonl"


def _by_age(folder: Path) -> list[Path]:
    """The session files in a folder, the one that was written last at the end."""
    found = []
    for path in folder.glob("*.jsonl"):
        with suppress(OSError):  # another chat has just removed it
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _folder() -> Path:
    return platform.state_folder() / "chats"


@contextmanager
def _private() -> Iterator[None]:
    """Files made meanwhile can be read by nobody else."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)

"""Keeps texts of the prefix cache in a folder, one prompt cache file each, for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from mlxlm.cache.prompt_cache_file import FileCache, open_prompt_cache, save_prompt_cache
from mlxlm.utils.errors import CheckpointError

_NAME = re.compile(r"prefix-[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.(\d+)\.partial")  # of utils.files
_HEADER_PER_ARRAY = 256  # bytes, about

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _SavedText:
    """A text in the folder.

    Attributes:
        nbytes: Size of its file.
        ids: Its tokens, int32; none if it was made with another model or other options.
        group: Its group.
        restorable_from: The caches can be trimmed to this many tokens.
    """

    nbytes: int
    ids: np.ndarray
    group: str
    restorable_from: int

    def match(self, ids: np.ndarray, group: str) -> int:
        """How many of the first tokens of `ids` can be restored."""
        n = min(len(ids), len(self.ids))
        if group != self.group or not n or ids[0] != self.ids[0]:
            return 0
        different = self.ids[:n] != ids[:n]
        shared = int(different.argmax()) if different.any() else n
        return shared if shared >= self.restorable_from else 0


class PrefixCacheFolder:
    """A folder of texts with their keys and values, at most `max_bytes` of them; the least recently used are removed.

    Several processes may use it, also for different models. What can't be read or written is logged as a warning. Only
    files that were written here are removed. They are private to the user: they hold what people wrote.

    Args:
        path: The folder. It is created when the first text is saved.
        max_bytes: Maximum size of all files.
        identity: Identifies the model, the tokenizer and the options of the caches.
    """

    def __init__(self, path: Path | str, max_bytes: int, identity: Mapping[str, str]) -> None:
        self.path, self.max_bytes, self._identity = Path(path), max_bytes, dict(identity)
        self._files: dict[str, _SavedText | None] = {}  # by name; None for what can't be read
        self._scanned = -1  # time of the folder at the last scan
        self._last_warning = ""

    def match(self, ids: Sequence[int], group: Hashable = None, max_bytes: int | None = None) -> int:
        """How many of the first tokens of `ids` `load` loads, from a file of at most `max_bytes`."""
        self._scan()
        return self._best(ids, group, max_bytes)[0]

    def load(
        self,
        ids: Sequence[int],
        make_caches: Callable[[], list[FileCache]],
        group: Hashable = None,
        max_bytes: int | None = None,
    ) -> tuple[int, list[FileCache]]:
        """Load the first tokens of `ids`.

        Args:
            ids: A text.
            make_caches: Makes the empty caches of the model.
            group: Texts of different groups share nothing.
            max_bytes: Skip larger files.

        Returns:
            How many tokens were loaded, and caches that hold them.
        """
        self._scan()
        while (best := self._best(ids, group, max_bytes))[0]:
            n, name = best
            path, caches = self.path / name, make_caches()
            try:
                file = open_prompt_cache(path)
                file.load(caches)
                surplus = len(file.ids) - n
                if file.ids[:n].tolist() != list(ids[:n]) or not all(cache.can_trim(surplus) for cache in caches):
                    raise CheckpointError(f"{path} has another text than it had before")
            except CheckpointError as error:
                if path.exists():  # else another process has removed it
                    self._warn(f"ignoring a file of the prefix cache: {error}")
                self._files[name] = None
                continue
            for cache in caches:
                cache.trim(surplus)
            with suppress(OSError):  # a read-only folder
                os.utime(path)
            return n, caches
        return 0, make_caches()

    def save(self, ids: Sequence[int], caches: Sequence[FileCache], group: Hashable = None) -> None:
        """Write a text, unless the folder has it or it takes more than `max_bytes`.

        Args:
            ids: All tokens of the text.
            caches: Caches of one row that hold exactly these tokens.
            group: As in `load`.
        """
        ids = array("i", ids)
        nbytes = sum(x.nbytes + _HEADER_PER_ARRAY for cache in caches for x in cache.state) + ids.itemsize * len(ids)
        if nbytes > self.max_bytes or self.match(ids, group) == len(ids):
            return
        restorable_from = max(len(ids) - cache.num_trimmable for cache in caches)
        identity = self._identity | {"group": repr(group), "restorable_from": str(restorable_from)}
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode() + ids.tobytes()).hexdigest()
        path = self.path / f"prefix-{digest}.safetensors"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_partials()
            self._shrink(self.max_bytes - nbytes)
            save_prompt_cache(path, caches, ids, identity)
        except (CheckpointError, OSError) as error:
            if not path.exists():  # else another process was faster
                self._warn(f"can't keep a text of the prefix cache: {error}")
            return
        self._scan()
        text = np.array(ids)
        for name, file in list(self._files.items()):
            # What this text begins with can be loaded from it.
            if file and max(1, restorable_from) <= file.match(text, repr(group)) == len(file.ids) < len(ids):
                self._remove(name)
        self._shrink(self.max_bytes)

    def _best(self, ids: Sequence[int], group: Hashable, max_bytes: int | None) -> tuple[int, str]:
        """The longest match, and its file."""
        text, key = np.array(ids, np.int32), repr(group)
        files = ((name, file) for name, file in self._files.items() if file)
        matches = (
            (file.match(text, key), name) for name, file in files if max_bytes is None or file.nbytes <= max_bytes
        )
        return max(matches, default=(0, ""))

    def _scan(self) -> None:
        """Read the headers of files that are new since the last scan."""
        try:
            changed = self.path.stat().st_mtime_ns
            if changed == self._scanned:
                return
            names = {name for name in os.listdir(self.path) if _NAME.fullmatch(name)}
        except FileNotFoundError:
            self._files, self._scanned = {}, -1
            return
        except OSError as error:
            self._warn(f"can't read the folder of the prefix cache: {error}")
            return
        known = {name: file for name, file in self._files.items() if name in names}
        self._files = known | {name: self._describe(self.path / name) for name in names - set(known)}
        # Another change within the resolution of the clock couldn't be seen.
        self._scanned = changed if time.time_ns() - changed > 1_000_000_000 else -1

    def _describe(self, path: Path) -> _SavedText | None:
        """Describe a file from its header and its tokens; None if it is damaged or not a text."""
        try:
            file, nbytes = open_prompt_cache(path), path.stat().st_size
            identity = dict(file.identity)
            group, restorable_from = identity.pop("group"), int(identity.pop("restorable_from"))
        except (CheckpointError, OSError, LookupError, ValueError):
            return None
        return _SavedText(nbytes, file.ids if identity == self._identity else file.ids[:0], group, restorable_from)

    def _shrink(self, max_bytes: int) -> None:
        """Remove the least recently used files until the others take at most `max_bytes`."""
        self._scan()
        sizes = {name: file.nbytes for name, file in self._files.items() if file}
        total = sum(sizes.values())
        if total <= max_bytes:
            return
        times = {}
        for name in sizes:
            with suppress(OSError):  # removed by another process
                times[name] = (self.path / name).stat().st_mtime_ns
        total = sum(sizes[name] for name in times)
        for name in sorted(times, key=lambda name: times[name]):
            if total <= max_bytes:
                return
            self._remove(name)
            total -= sizes[name]

    def _remove(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            self._warn(f"can't remove a file of the prefix cache: {error}")
        else:
            self._files.pop(name, None)

    def _remove_partials(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        started = psutil.Process().create_time()
        for path in self.path.iterdir():
            if partial := _PARTIAL.fullmatch(path.name):
                pid = int(partial[1])
                # In containers, pids repeat.
                is_own = pid == os.getpid()
                if path.stat().st_mtime < started if is_own else not psutil.pid_exists(pid):
                    path.unlink(missing_ok=True)

    def _warn(self, message: str) -> None:
        if message != self._last_warning:
            _log.warning(message)
        self._last_warning = message

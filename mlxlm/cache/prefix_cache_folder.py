"""Keeps texts of the prefix cache in a folder, for the next start.

Each file is a prompt cache of some layers. Those that hold all tokens of a text share a file, from which any of its
beginnings is restored; those that don't, such as recurrent states, have one for each place where they were kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mlxlm.cache.prompt_cache_file import FileCache, open_prompt_cache, save_prompt_cache
from mlxlm.utils.errors import CheckpointError, GenerationError

_NAME = re.compile(r"prefix-[0-9a-f]{64}\.safetensors")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.(\d+)\.partial")  # of utils.files
_HEADER_PER_ARRAY = 256  # bytes, about

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _File:
    """A file of the folder.

    Attributes:
        nbytes: Its size.
        ids: The tokens of its text, int32; none if it was made with another model or other options.
        group: The group of the text.
        layers: The layers whose caches it has.
        restorable_from: The caches can be trimmed to this many tokens.
    """

    nbytes: int
    ids: np.ndarray
    group: str
    layers: list[int]
    restorable_from: int

    def num_shared(self, ids: np.ndarray, group: str) -> int:
        """How many tokens its text and `ids` begin with."""
        n = min(len(ids), len(self.ids))
        if group != self.group or not n or ids[0] != self.ids[0]:
            return 0
        different = self.ids[:n] != ids[:n]
        return int(different.argmax()) if different.any() else n


class PrefixCacheFolder:
    """A folder of texts with their caches, at most `max_bytes` of them; the least recently used files are removed.

    Several processes may use it, also for different models. What can't be read or written is logged as a warning. Only
    files that were written here are removed. They are private to the user: they hold what people wrote.

    Args:
        path: The folder. It is created when the first text is saved.
        max_bytes: Maximum size of all files.
        identity: Identifies the model, the tokenizer and the options of the caches.
        make_caches: Makes the empty caches of the model, one per layer.

    Raises:
        GenerationError: They are of mlx_lm's own types, which can't be written to a file.
    """

    def __init__(
        self, path: Path | str, max_bytes: int, identity: Mapping[str, str], make_caches: Callable[[], list[Any]]
    ) -> None:
        caches = make_caches()
        if not all(isinstance(cache, FileCache) for cache in caches):
            problem = "this architecture has its own cache type, which can't be kept in a folder"
            raise GenerationError(problem, "a prefix cache in memory only")
        self.path, self.max_bytes, self._identity = Path(path), max_bytes, dict(identity)
        self._make_caches, self._layers = make_caches, range(len(caches))
        self._files: dict[str, _File | None] = {}  # by name; None for what can't be read
        self._scanned = -1  # time of the folder at the last scan
        self._last_warning = ""

    def match(self, ids: Sequence[int], group: Hashable = None, max_bytes: float = math.inf) -> int:
        """How many of the first tokens of `ids` `load` loads, from files of at most `max_bytes` each."""
        self._scan()
        return self._find(ids, self._layers, group, max_bytes)[0]

    def load(
        self, ids: Sequence[int], group: Hashable = None, max_bytes: float = math.inf
    ) -> tuple[int, list[FileCache]]:
        """Load the first tokens of `ids`.

        Args:
            ids: A text.
            group: Texts of different groups share nothing.
            max_bytes: Skip larger files.

        Returns:
            How many tokens were loaded, and caches that hold them.
        """
        self._scan()
        while (found := self._find(ids, self._layers, group, max_bytes))[0]:
            (n, names), caches = found, self._make_caches()
            if all(self._load(name, ids[:n], caches) for name in names):
                return n, caches
        return 0, self._make_caches()

    def _load(self, name: str, ids: Sequence[int], caches: list[FileCache]) -> bool:
        """Load the first tokens of a file's text, which must be `ids`, into the caches of its layers."""
        path, described = self.path / name, self._files[name]
        assert described is not None
        own = [caches[layer] for layer in described.layers]
        try:
            file = open_prompt_cache(path)
            file.load(own)
            surplus = len(file.ids) - len(ids)
            if file.ids[: len(ids)].tolist() != list(ids) or not all(cache.can_trim(surplus) for cache in own):
                raise CheckpointError(f"{path} has another text than it had before")
        except CheckpointError as error:
            if path.exists():  # else another process has removed it
                self._warn(f"ignoring a file of the prefix cache: {error}")
            self._files[name] = None
            return False
        for cache in own:
            cache.trim(surplus)
        with suppress(OSError):  # a read-only folder
            os.utime(path)
        return True

    def save(self, ids: Sequence[int], caches: Mapping[int, FileCache], group: Hashable = None) -> None:
        """Write the caches of some layers, unless the folder has them or they take more than `max_bytes`.

        Args:
            ids: All tokens of a text.
            caches: By layer, caches of one row that hold exactly these tokens.
            group: As in `load`.
        """
        ids = array("i", ids)
        arrays = [x for cache in caches.values() for x in cache.state]
        nbytes = sum(x.nbytes + _HEADER_PER_ARRAY for x in arrays) + ids.itemsize * len(ids)
        self._scan()
        if nbytes > self.max_bytes or self._find(ids, caches, group)[0] == len(ids):
            return
        restorable_from = max(len(ids) - cache.num_trimmable for cache in caches.values())
        layers = sorted(caches)
        identity = self._identity | {
            "group": repr(group),
            "layers": ",".join(map(str, layers)),
            "restorable_from": str(restorable_from),
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode() + ids.tobytes()).hexdigest()
        path = self.path / f"prefix-{digest}.safetensors"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_partials()
            self._shrink(self.max_bytes - nbytes)
            save_prompt_cache(path, [caches[layer] for layer in layers], ids, identity)
        except (CheckpointError, OSError) as error:
            if not path.exists():  # else another process was faster
                self._warn(f"can't keep a text of the prefix cache: {error}")
            return
        self._scan()
        text = np.array(ids)
        for name, file in list(self._files.items()):
            # All that can be loaded from the file of a beginning can be loaded from this one.
            if file is None or file.layers != layers or file.restorable_from < restorable_from:
                continue
            if 0 < file.num_shared(text, repr(group)) == len(file.ids) < len(ids):
                self._remove(name)
        self._shrink(self.max_bytes)

    def _find(
        self, ids: Sequence[int], layers: Collection[int], group: Hashable, max_bytes: float = math.inf
    ) -> tuple[int, set[str]]:
        """How many of the first tokens of `ids` can be restored for all `layers`, and from which files."""
        text, key, n = np.array(ids, np.int32), repr(group), len(ids)
        files = [(name, file) for name, file in self._files.items() if file and file.nbytes <= max_bytes]
        shared = [(name, file, num) for name, file in files if (num := file.num_shared(text, key))]
        while n:
            best = dict.fromkeys(layers, (0, ""))
            for name, file, num in shared:
                if (m := min(n, num)) >= file.restorable_from:
                    best |= {layer: max(best[layer], (m, name)) for layer in file.layers if layer in best}
            least = min((m for m, _ in best.values()), default=n)
            if least == n:
                return n, {name for _, name in best.values()}
            n = least
        return 0, set()

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

    def _describe(self, path: Path) -> _File | None:
        """Describe a file from its header and its tokens; None if it is damaged or wasn't written here."""
        try:
            file, nbytes = open_prompt_cache(path), path.stat().st_size
            identity = dict(file.identity)
            group, restorable_from = identity.pop("group"), int(identity.pop("restorable_from"))
            layers = [int(layer) for layer in identity.pop("layers").split(",")]
        except (CheckpointError, OSError, LookupError, ValueError):
            return None
        usable = identity == self._identity and set(layers) <= set(self._layers)
        return _File(nbytes, file.ids if usable else file.ids[:0], group, layers, restorable_from)

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

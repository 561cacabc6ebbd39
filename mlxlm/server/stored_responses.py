"""Answers of the Responses API that clients can refer to, in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxlm.server.errors import ApiError

MAX_BYTES = 64 << 20  # of JSON; the oldest are dropped


class StoredResponses:
    """Responses with their whole input, which includes that of earlier responses."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._num_bytes = 0

    def put(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Keep a response and its input, `items`."""
        content = json.dumps({"response": response, "input": items}, ensure_ascii=False).encode()
        self._contents[response["id"]] = content
        self._num_bytes += len(content)
        while self._num_bytes > MAX_BYTES:
            self._forget(next(iter(self._contents)))

    def get(self, id: str, param: str | None = None) -> dict[str, Any]:
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
        problem = f"there is no response {id[:100]!r}: it had store: false, was deleted, or is too old"
        code = "previous_response_not_found" if param else "not_found"
        raise ApiError(400 if param else 404, problem, param=param, code=code)

    def delete(self, id: str) -> None:
        """Delete a response. Raises ApiError 404 for an unknown id."""
        self.get(id)
        self._forget(id)

    def find_item(self, id: str) -> dict[str, Any] | None:
        """The item with this id in the output of a response."""
        for content in reversed(self._contents.values()):
            if id.encode() in content:
                for item in json.loads(content)["response"]["output"]:
                    if item["id"] == id:
                        return dict(item)
        return None

    def _forget(self, id: str) -> None:
        self._num_bytes -= len(self._contents.pop(id))

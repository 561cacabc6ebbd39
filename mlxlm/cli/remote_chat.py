"""`mlxlm chat --prompt` with `--server`: a running server answers, instead of a model that is loaded for it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError

from mlxlm.chat.terminal.output import print_status
from mlxlm.chat.terminal.screen import Screen
from mlxlm.utils.errors import GenerationError

_PREFIX = b"data: "


def stream_from_server(url: str, fields: Mapping[str, Any], screen: Screen) -> None:
    """Show the answer of a server with OpenAI's API.

    MLXLM_API_KEY is sent as the key, if it is set.

    Args:
        url: The server's address, with or without /v1 at the end.
        fields: The fields of a chat completion.
        screen: Shows the answer.

    Raises:
        GenerationError: The server can't be reached, or refuses the request; its message says why.
    """
    headers = {"content-type": "application/json"}
    if key := os.environ.get("MLXLM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    address = f"{url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy can't reach this machine
    try:
        request = urllib.request.Request(address, json.dumps({**fields, "stream": True}).encode(), headers)
        with opener.open(request) as response:
            _show(url, _chunks(response), screen)
    except HTTPError as error:
        raise GenerationError(f"{url}: {_message(error)}") from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise GenerationError(f"{url} doesn't answer: {reason}", "mlxlm serve MODEL, or no `server`") from None


def _show(url: str, chunks: Iterator[dict[str, Any]], screen: Screen) -> None:
    try:
        for number, chunk in enumerate(chunks):
            if number == 0:
                print_status(f"{url} answers with {chunk.get('model')}")
            for choice in chunk.get("choices", ()):
                screen.push(choice["delta"].get("reasoning_content") or "", True)
                screen.push(choice["delta"].get("content") or "", False)
    finally:
        screen.finish()


def _chunks(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events. Raise GenerationError for an error in the stream."""
    for line in lines:
        data = line.removeprefix(_PREFIX).strip()
        if not line.startswith(_PREFIX) or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise GenerationError(str(error.get("message")))
        yield chunk


def _message(error: HTTPError) -> str:
    """Return what a response says about an error."""
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"

"""`mlxlm chat --prompt` with `--server`: a running server answers, instead of a model that is loaded for it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError

from mlxlm.chat.files import TextFile
from mlxlm.chat.terminal.output import print_status
from mlxlm.chat.terminal.screen import Screen
from mlxlm.utils.errors import GenerationError

_PREFIX = b"data: "


def stream_from_server(url: str, fields: Mapping[str, Any], screen: Screen) -> None:
    """Show the answer of a server with OpenAI's API.

    MLXLM_API_KEY is sent as the key, if it is set.

    Args:
        url: The server's address, with or without http:// and /v1.
        fields: The fields of a chat completion.
        screen: Shows the answer.

    Raises:
        GenerationError: The server can't be reached, or refuses the request; its message says why.
    """
    with _post(url, "/v1/chat/completions", {**fields, "stream": True}) as response:
        try:
            for number, chunk in enumerate(_chunks(response)):
                if number == 0:
                    print_status(f"{url} answers with {chunk.get('model')}")
                for choice in chunk.get("choices", ()):
                    screen.push(choice["delta"].get("reasoning_content") or "", True)
                    screen.push(choice["delta"].get("content") or "", False)
        finally:
            screen.finish()


def print_token_counts(url: str, model: str | None, files: Sequence[TextFile]) -> None:
    """Print how many tokens each file has, if the server has llama.cpp's /tokenize.

    Raises:
        GenerationError: The server can't be reached.
    """
    for file in files:
        fields = {"content": file.block, "parse_special": False} | ({"model": model} if model else {})
        try:
            with _post(url, "/tokenize", fields) as response:
                counted = json.load(response)
            size = counted.get("max_model_len")
            print_status(
                f"{file.name}: {len(counted['tokens']):,} tokens" + (f"; the context has {size:,}" if size else "")
            )
        except _RefusedError:
            print_status(f"{file.name}: {len(file.block):,} characters; {url} doesn't count tokens")


class _RefusedError(GenerationError):
    """The server answered with an error."""


@contextmanager
def _post(url: str, path: str, fields: Mapping[str, Any]) -> Iterator[HTTPResponse]:
    """Send a request, and yield the response."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("MLXLM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    base = url if "://" in url else f"http://{url}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy can't reach this machine
    try:
        address = base.rstrip("/").removesuffix("/v1") + path
        with opener.open(urllib.request.Request(address, json.dumps(fields).encode(), headers)) as response:
            yield response
    except BrokenPipeError:  # of standard output
        raise
    except HTTPError as error:
        raise _RefusedError(f"{url}: {_message(error)}") from None
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "reason", error)
        raise GenerationError(f"{url} doesn't answer: {reason}", "mlxlm serve MODEL, or no `server`") from None


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

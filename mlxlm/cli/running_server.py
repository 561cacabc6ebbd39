"""Requests to a running server: its models for `mlxlm connect`, an answer for `mlxlm chat --prompt` with `--server`."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from itertools import chain
from typing import Any
from urllib.error import HTTPError

from mlxlm.chat.files import TextFile
from mlxlm.chat.terminal.output import print_status
from mlxlm.chat.terminal.screen import Screen
from mlxlm.utils.errors import MlxlmError

_MODELS_SECONDS = 30  # a server that loads a model may be busy
_PREFIX = b"data: "


@dataclass(frozen=True)
class Endpoint:
    """A model of a running server.

    Attributes:
        url: Address of the server, without /v1.
        model: Name of the model.
        context_length: Its maximum number of tokens; None if the server doesn't know it before it loads the model.
        key: The API key. Clients want one, also for a server without.
    """

    url: str
    model: str
    context_length: int | None = None
    key: str = "none"

    @classmethod
    def find(cls, server: str, model: str | None) -> Endpoint:
        """Ask a server for its models.

        Args:
            server: Its address, see `_open`.
            model: A name; None for a model that is loaded, or else the first.

        Raises:
            MlxlmError: No server answers, it refuses the key, or it has no such model.
        """
        with _open(server, "models", timeout=_MODELS_SECONDS) as response:
            content = response.read()
        try:
            listed = {entry["id"]: dict(entry) for entry in json.loads(content)["data"]}
        except (ValueError, KeyError, TypeError):
            raise MlxlmError(f"{server} is no server of models", "the address of mlxlm serve") from None
        if model is None:
            model = next((name for name, entry in listed.items() if entry.get("loaded")), next(iter(listed), None))
        if model is None or model not in listed:
            raise MlxlmError(f"{server} has no model {model or 'yet'}", ", ".join(listed) or "mlxlm serve MODEL")
        return cls(_base(server), model, listed[model].get("context_length"), os.environ.get("MLXLM_API_KEY") or "none")


def stream_from_server(server: str, fields: Mapping[str, Any], screen: Screen) -> None:
    """Show the answer of a server with OpenAI's API.

    Args:
        server: Its address, see `_open`.
        fields: The fields of a chat completion.
        screen: Shows the answer.

    Raises:
        MlxlmError: The server can't be reached, or refuses the request; its message says why.
    """
    chunks = _chunks(server, fields)
    first = next(chunks, {})
    print_status(f"{server} answers with {first.get('model')}")
    try:
        for chunk in chain([first], chunks):
            for choice in chunk.get("choices", ()):
                screen.push(choice["delta"].get("reasoning_content") or "", True)
                screen.push(choice["delta"].get("content") or "", False)
    finally:
        screen.finish()


def print_token_counts(server: str, model: str | None, files: Sequence[TextFile]) -> None:
    """Print how many tokens each file has, or characters, if the server doesn't count tokens.

    Raises:
        MlxlmError: No server answers.
    """
    for file in files:
        try:
            with _open(server, "tokenize", {"content": file.block, "parse_special": False, "model": model}) as response:
                counted = json.load(response)
            print_status(f"{file.name}: {counted['count']:,} tokens; the context has {counted['max_model_len']:,}")
        except _RefusedError:
            print_status(f"{file.name}: {len(file.block):,} characters; {server} doesn't count tokens")


def _chunks(server: str, fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the data of server-sent events."""
    with _open(server, "chat/completions", {**fields, "stream": True}) as response:
        for line in response:
            data = line.removeprefix(_PREFIX).strip()
            if not line.startswith(_PREFIX) or data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise MlxlmError(str(error.get("message")))
            yield chunk


class _RefusedError(MlxlmError):
    """A server answered with an error."""


def _base(server: str) -> str:
    """The address without /v1, and with http:// if it has no scheme."""
    url = server.rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


@contextmanager
def _open(
    server: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
) -> Iterator[HTTPResponse]:
    """Send a request to a server.

    Args:
        server: Its address, with or without /v1. The key is that of the environment variable MLXLM_API_KEY.
        path: What follows /v1/ in the URL.
        body: Is sent as JSON, with POST.
        timeout: Seconds that the server may be silent.

    Raises:
        MlxlmError: No server answers, or it refuses the request; its message says why.
    """
    headers = {"content-type": "application/json"}
    if key := os.environ.get("MLXLM_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy can't reach this machine
    try:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{_base(server)}/v1/{path}", content, headers)
        with opener.open(request, timeout=timeout) as response:
            yield response
    except HTTPError as error:
        raise _RefusedError(
            f"{server}: {_message(error)}", "MLXLM_API_KEY=KEY" if error.code == 401 else None
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise MlxlmError(f"{server} doesn't answer: {reason}", "mlxlm serve MODEL, or another `server`") from None


def _message(error: HTTPError) -> str:
    """Return what a response says about an error."""
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"

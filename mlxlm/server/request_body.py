"""Reads and validates the JSON body of a request, within limits of size, time and nesting."""

from __future__ import annotations

import asyncio
import difflib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from mlxlm.server.errors import ApiError, invalid
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError
from mlxlm.utils.json_files import parse_json_object

MAX_BODY_BYTES = 16 << 20  # far more text than fits into any context
BODY_TIMEOUT = 30.0  # seconds
MAX_DEPTH = 64  # of nested objects and arrays

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body]) -> Body:
    """Read and validate the body of a request.

    Raises:
        ApiError: 400 for invalid JSON or fields, 408 for a slow body, 413 for a large one.
    """
    content = await _read_bytes(request)
    value = await asyncio.to_thread(_parse, content) if len(content) > 1 << 16 else _parse(content)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error.errors(include_url=False, include_context=False), model) from None
    except (OverflowError, RecursionError) as error:
        raise invalid(f"the request has a value that is too large: {error}") from None


async def _read_bytes(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body of the request didn't arrive within {BODY_TIMEOUT:.0f} seconds"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(408, "the client closed the connection before it had sent its request") from None
    return b"".join(chunks)


def _too_large() -> ApiError:
    message = f"the body of the request has more than {MAX_BODY_BYTES >> 20} MiB"
    return ApiError(413, message, headers={"connection": "close"})


def _parse(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json_object(content, "the body of the request", GenerationError, "a JSON object")
        _check_depth(value)
        if b"\\u" in content:  # only an escape can write a lone surrogate, which UTF-8 doesn't have
            check_unicode(json.dumps(value, ensure_ascii=False))
    except MlxlmError as error:
        raise invalid(str(error)) from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level for item in _items(part)]
        if not level:
            return
    raise GenerationError(f"the body of the request has more than {MAX_DEPTH} levels of nesting", "fewer")


def _items(value: Any) -> list[Any]:
    """The objects and arrays directly inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [item for item in inside if isinstance(item, dict | list)]


def _validation_error(problems: list[ErrorDetails], model: type[BaseModel]) -> ApiError:
    """A 400 for the first problem that pydantic reports, without the invalid value, which may be huge."""
    problem = problems[0]
    path = ".".join(str(part)[:100] for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        similar = difflib.get_close_matches(name[:100].lower(), model.model_fields, n=1) if path == name else []
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        return invalid(f"there is no parameter {path}{hint}", path, "unknown_parameter")
    if problem["type"] == "missing":
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if message.startswith("Input should") else message
    return invalid(f"{path}: {message.replace('input should', 'it should')}", path or None)

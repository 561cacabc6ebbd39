"""Read the body of a request within limits of size, time and nesting, and check it.

Unknown fields are ignored and logged once. Those that would change the text are refused, and by a strict server all.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from mlxlm.server.errors import GIVEN_NAMES, ApiError, invalid
from mlxlm.server.other_servers import NAMES, UNSUPPORTED, WITHOUT_EFFECT, given_names, given_path
from mlxlm.server.schemas import Fields
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line
from mlxlm.utils.json_files import parse_json_object

logger = logging.getLogger("mlxlm.server")

MAX_BODY_BYTES = 16 << 20  # far more text than fits into any context
BODY_TIMEOUT = 30.0  # seconds
_MAX_DEPTH = 64  # of nested objects and arrays
_MAX_LOGGED = 1000  # names of unknown fields

Body = TypeVar("Body", bound=Fields)


async def read_body(request: Request, model: type[Body]) -> Body:
    """Read and validate the body of a request.

    Raises:
        ApiError: 400 for invalid JSON or fields. Also as `read_bytes`.
    """
    content = await read_bytes(request)
    value = await asyncio.to_thread(_parse, content) if len(content) > 1 << 16 else _parse(content)
    request.scope[GIVEN_NAMES] = given_names(value)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise _validation_error(value, error.errors(include_url=False, include_context=False)[0]) from None
    except (OverflowError, RecursionError) as error:
        raise invalid(f"the request has a value that is too large: {error}") from None
    request.app.state.unknown_fields.check(body, request.url.path)
    return body


class UnknownFields:
    """What happens to unknown fields of requests. See the top of this file.

    Args:
        strict: Refuse a field that would be ignored.
    """

    def __init__(self, strict: bool = False):
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, body: Fields, endpoint: str) -> None:
        """Check the unknown fields of a request. Raises ApiError for one that isn't ignored."""
        for owner, path, item in _unknown(body):
            name = path.rpartition(".")[2]
            if name in WITHOUT_EFFECT or name in UNSUPPORTED and (not item or item == UNSUPPORTED[name]):
                continue
            if name in UNSUPPORTED or owner.is_left_out and self._strict:
                raise invalid(f"{path} isn't supported (try: without it)", path, "unsupported_parameter")
            if not self._strict and (path in self._logged or len(self._logged) >= _MAX_LOGGED):
                continue
            self._logged.add(path)
            names = [*type(owner).model_fields, *NAMES]
            similar = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            if self._strict:
                raise invalid(f"there is no parameter {path}{hint}", path, "unknown_parameter")
            logger.info("ignoring the parameter %s of %s%s", one_line(path), endpoint, hint)


def _unknown(value: Fields, path: str = "") -> Iterator[tuple[Fields, str, Any]]:
    """The unknown fields of an object and those inside it: their object, path without indices, and value.

    An object that is left out counts as a field, type=TYPE.
    """
    if value.is_left_out:
        kind = vars(value)["type"]
        yield value, f"{path}type={kind[:100]}", kind
        return
    for name, item in (value.model_extra or {}).items():
        yield value, f"{path}{name[:100]}", item
    for name, item in vars(value).items():
        for part in item if isinstance(item, list) else [item]:
            if isinstance(part, Fields):
                yield from _unknown(part, f"{path}{name}.")


async def read_bytes(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: 408 for a slow body, 413 for a large one.
    """
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
    for _ in range(_MAX_DEPTH):
        parts = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
        level = [item for item in parts if isinstance(item, dict | list)]
        if not level:
            return
    raise GenerationError(f"the body of the request has more than {_MAX_DEPTH} levels of nesting", "fewer")


_JSON_TYPES = {
    "model_type": "an object",
    "dict_type": "an object",
    "list_type": "an array",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
}


def _validation_error(body: dict[str, Any], problem: ErrorDetails) -> ApiError:
    """A 400 for a problem that pydantic reports, without the invalid value, which may be huge."""
    *parents, last = problem["loc"] or ("",)
    if problem["type"] == "missing":
        path = ".".join(filter(None, (given_path(body, parents), str(last))))
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    path = given_path(body, problem["loc"])
    message = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    message = re.sub(r"^(Input|Value|List|String|Dictionary) should", "it should", message)
    if problem["type"] in _JSON_TYPES:
        message = f"it should be {_JSON_TYPES[problem['type']]}"
    return invalid(f"{path}: {message}" if path else message, path or None)

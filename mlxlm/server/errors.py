"""Error responses: OpenAI's error object, or Anthropic's or ollama's in the endpoints of its API."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxlm.backend.error_text import describe_error, device_error
from mlxlm.config.option import options_of
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import (
    GenerationError,
    MemoryLimitError,
    MlxlmError,
    PromptTooLongError,
    TokenizerError,
    one_line,
)

logger = logging.getLogger("mlxlm.server")

request_id: ContextVar[str] = ContextVar("request_id", default="")  # of the request that is being handled

GIVEN_NAMES = "mlxlm.given_names"  # key of a request's scope: {our name of an option: the client's}
_OPTION = re.compile(rf"\b({'|'.join(options_of(GenerationOptions))})\b")

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error response.

    Attributes:
        status: The HTTP status code.
        message: What is wrong, and what would work.
        param: The path of the field in the request, such as "messages.2.content", or None.
        code: An error code such as OpenAI's "model_not_found", or None.
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, one_line(message), param, code
        self.headers = headers or {}

    def body(self, path: str = "") -> dict[str, Any]:
        """The error object of an endpoint."""
        if is_anthropic(path):
            fallback = "invalid_request_error" if self.status < 500 else "api_error"
            error = {"type": _ANTHROPIC_TYPES.get(self.status, fallback), "message": self.message}
            return {"type": "error", "error": error, "request_id": request_id.get()}
        if is_ollama(path):
            return {"error": self.message}
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = kind if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        """The response of an endpoint."""
        return JSONResponse(self.body(path), self.status, self.headers)


def new_id(prefix: str) -> str:
    """A random id, such as chatcmpl-0123456789abcdef01234567."""
    return f"{prefix}{secrets.token_hex(12)}"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400, for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """A 503, for something that may work later, when other requests have freed their memory."""
    return ApiError(503, message, headers={"retry-after": "5"})


def client_message(error: MlxlmError) -> str:
    """The message of an error, with its hint unless it is for the person who runs the server."""
    return error.message if error.is_operator_hint else str(error)


STOPPING = "the server is stopping"  # the 503 of requests that are cut off at shutdown


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's API."""
    return path.removeprefix("/v1").split("/")[1:2] == ["messages"]


def is_ollama(path: str) -> bool:
    """Whether a path is one of ollama's API. /api/v0 and /api/v1 are LM Studio's."""
    return path.startswith("/api/") and not path.startswith(("/api/v0/", "/api/v1/"))


def to_api_error(error: Exception, given_names: Mapping[str, str] | None = None) -> ApiError:
    """Convert any exception. Those that aren't the request's fault are logged with their traceback.

    Args:
        error: The exception.
        given_names: {our name of an option: the request's}, for the message.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, MemoryLimitError):
        return unavailable(client_message(error))
    if isinstance(error, PromptTooLongError):
        return invalid(client_message(error), code="context_length_exceeded")
    if isinstance(error, GenerationError):
        names = given_names or {}
        message = _OPTION.sub(lambda option: names.get(option[0], option[0]), client_message(error))
        first = _OPTION.search(error.message)
        return invalid(message, names.get(first[0], first[0]) if first else None)
    if isinstance(error, TokenizerError):
        return invalid(client_message(error))
    if failure := device_error(error):
        logger.error("%s in %s", failure, request_id.get())
        return unavailable(failure.message)
    if isinstance(error, MemoryError):
        logger.error("out of memory in %s", request_id.get())
        return unavailable("out of memory")
    logger.error("internal error in %s", request_id.get(), exc_info=error)
    if isinstance(error, MlxlmError | RuntimeError):
        return ApiError(500, describe_error(error))
    problem = f"internal error: {type(error).__name__}; the server's log has the details"
    return ApiError(500, f"{problem}, with the request ID {request_id.get()}")


class ErrorMiddleware:
    """Turns exceptions of the endpoints into error responses."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # closes the connection
            await to_api_error(error, scope.get(GIVEN_NAMES)).response(scope["path"])(scope, receive, send)
        except asyncio.CancelledError:  # at shutdown, after --shutdown-timeout
            if started:
                raise
            await ApiError(503, STOPPING).response(scope["path"])(scope, receive, send)


async def error_response(request: Request, error: Exception) -> JSONResponse:
    """Handle Starlette's own exceptions: 404 and 405."""
    assert isinstance(error, HTTPException)
    headers, path = dict(error.headers or {}), request.url.path
    found = ApiError(error.status_code, error.detail, headers=headers)
    if error.status_code == 404:
        found = ApiError(404, f"there is no endpoint {request.method} {path[:200]}", code="not_found")
    elif error.status_code == 405:
        found = ApiError(405, f"this endpoint only accepts {headers.get('Allow', 'another method')}", headers=headers)
    return found.response(path)

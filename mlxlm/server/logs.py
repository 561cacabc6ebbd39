"""The log of the server: a line per request, as text or as a JSON object, on standard error."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection
from datetime import UTC, datetime

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxlm.server.errors import new_id, request_id
from mlxlm.server.metrics import MODEL, Metrics
from mlxlm.utils.errors import one_line

logger = logging.getLogger("mlxlm.server")

_CLIENT_ID = re.compile(r"[!-~]{1,128}")  # printable, without spaces


class JSONFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line, with the id of the request that it belongs to.

    Its keys are time (UTC), level, message, request_id, exception, and those of `fields` of the record's `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        created = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {"time": created, "level": record.levelname.lower(), "message": record.getMessage()}
        if id := request_id.get():
            values["request_id"] = id
        values |= getattr(record, "fields", {})
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values)


def log_to_stderr(level: str, log_format: str) -> None:
    """Log the server's messages, and those of uvicorn that matter.

    Args:
        level: The lowest level, one of `options.LOG_LEVELS`.
        log_format: One of `options.LOG_FORMATS`.
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handler.setFormatter(JSONFormatter() if log_format == "json" else text)
    for name, least in (("mlxlm", logging.DEBUG), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(getattr(logging, level.upper()), least))


class RequestLog:
    """Logs one line per request, without its content, gives it an ID, and counts it in the metrics.

    Args:
        app: The application.
        metrics: Its metrics.
        endpoints: The paths that have metrics of their own.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, endpoints: Collection[str]):
        self._app, self._metrics = app, metrics
        self._endpoints = {path.replace(":path", "") for path in endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 499, time.monotonic()  # 499: the client disconnected before the response
        given = Headers(scope=scope).get("x-request-id", "")
        request_id.set(id := given if _CLIENT_ID.fullmatch(given) else new_id("req_"))

        async def counting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = id  # the name of OpenAI, and that of Anthropic
            await send(message)

        try:
            await self._app(scope, receive, counting_send)
        finally:
            path = endpoint = scope["path"]
            for name, value in scope.get("path_params", {}).items():
                endpoint = endpoint.replace(value, f"{{{name}}}")
            endpoint = endpoint if endpoint in self._endpoints else "other"
            model, seconds = scope.get(MODEL, ""), time.monotonic() - start
            self._metrics.requests.labels(endpoint, str(status)).inc()
            self._metrics.duration.labels(endpoint, model).observe(seconds)
            level = logging.INFO if scope["method"] == "POST" or status >= 400 else logging.DEBUG
            left = ", the client disconnected" if scope.get("mlxlm.client_left") else ""
            method, shown = scope["method"], one_line(path[:200])
            fields = {"method": method, "path": shown, "status": status, "seconds": round(seconds, 4)}
            fields |= {"model": model} if model else {}
            text = "%s %s %d, %.2f s%s, %s"
            logger.log(level, text, method, shown, status, seconds, left, id, extra={"fields": fields})

"""The log of the server: lines of text or JSON objects on standard error."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from mlxlm.server.errors import request_id


class JSONFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line, with the id of the request that it belongs to.

    Its keys are time (UTC), level, message, request_id, exception, and those of `fields` of the record's `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        values = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
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

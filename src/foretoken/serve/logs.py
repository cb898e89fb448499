"""The server's log: a line a request on standard error, as text or JSON; bodies only where that is asked for."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

from foretoken.serve.errors import dump

Format = Literal["text", "json"]

MOST_LOGGED = 4_000
"""Characters of a body in the log."""

_log = logging.getLogger("foretoken.serve")
_logged: deque[str] = deque(maxlen=100)
"""`name_error`'s names of the errors that `log_error` has logged, the latest."""


def log_response(method: str, path: str, status: int, seconds: float, request_id: str) -> None:
    """One line for a request that was answered."""
    path = _one_line(path[:200])
    fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6), "request_id": request_id}
    _log.info("%s %s %d %.3fs %s", method, path, status, seconds, request_id, extra={"fields": fields})


def log_failure(request_id: str) -> None:
    """The exception that is being handled, with its stack."""
    _log.exception("request %s failed", request_id, extra={"fields": {"request_id": request_id}})


def log_error(error: Exception) -> None:
    """An error that clients are told nothing of, with its stack: once, however many requests it ended."""
    name = name_error(error)
    if name not in _logged:
        _logged.append(name)
        _log.error("the engine failed: %s", type(error).__name__, exc_info=error)


def name_error(error: Exception, same: Exception | None = None) -> str:
    """The name of an error for `log_error`. It stands in the error, so that copies made by pickling have it, too.

    Args:
        error: gets a name of its own where it has none.
        same: the error that it takes the place of, whose name it gets; None if there is none.
    """
    name: str = vars(error).setdefault("foretoken_name", uuid4().hex if same is None else name_error(same))
    return name


def log_body(data: bytes, request_id: str) -> None:
    """What a client sent, as one line, cut to `MOST_LOGGED` characters."""
    text = data[:MOST_LOGGED].decode("utf-8", "backslashreplace")
    fields = {"request_id": request_id, "bytes": len(data), "body": text}
    _log.info("body of %s: %s", request_id, _one_line(text), extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Each record as an object on a line: time, level, message, and the fields that it has."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        fields: dict[str, Any] = record.__dict__.get("fields", {})
        told = {"time": self.formatTime(record), "level": record.levelname, "message": record.getMessage(), **fields}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return dump(told)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  # of logging
        """Time as ISO 8601 has it, in UTC."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def log_to_stderr(form: Format = "text", least: int = logging.INFO) -> None:
    """Have the log of the server, and warnings of uvicorn and asyncio, on standard error.

    Args:
        form: of its lines.
        least: level of the server's records that are shown.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    handler.addFilter(_is_of_interest)
    for name, level in (("foretoken.serve", least), ("uvicorn.error", logging.WARNING), ("asyncio", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


def _is_of_interest(record: logging.LogRecord) -> bool:
    """Not what uvicorn has cancelled itself, which it tells as an error, a stack for each request."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _one_line(text: str) -> str:
    return text.encode("unicode_escape").decode("ascii")

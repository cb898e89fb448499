"""The outermost layer of the application: request ids, API keys, and errors that nothing else has handled."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foretoken.serve.auth import ApiKeys
from foretoken.serve.errors import ApiError, error_response
from foretoken.serve.logs import log_failure, log_response
from foretoken.serve.page_files import PAGE_PATHS

OPEN_PATHS = ("/health", "/ready", *PAGE_PATHS)
"""What load balancers ask, who have no key; and the page's files, which hold no secret and ask for the key."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """ASGI middleware around the application.

    Every response has an ``x-request-id``: the request's own where it is well-formed, else a fresh one. One line is
    logged a request: method, path, status, seconds and id.

    Args:
        app: what answers.
        keys: who may ask.
        count: is told the status of every response.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, count: Callable[[int], None]) -> None:
        self._app = app
        self._keys = keys
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status, began = 0, perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        error: ApiError | None = None
        try:
            if path not in OPEN_PATHS and not self._keys.admit(headers):
                error = ApiError(
                    401,
                    "no valid API key: send one as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            else:
                await self._app(scope, receive, send_with_id)
        except Exception:
            log_failure(request_id)
            error = ApiError(500, f"internal error in request {request_id}", code="internal_error")
        try:
            if error is not None and not status:
                await error_response(error, path)(scope, receive, send_with_id)
        finally:
            self._count(status)
            log_response(scope["method"], path, status, perf_counter() - began, request_id)

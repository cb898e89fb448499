"""What the server and the gateway of replicas answer alike. Imports no torch: gateways run no model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from foretoken.errors import ForetokenError
from foretoken.serve.errors import CLIENT_GONE, ApiError, ClientGone, error_response
from foretoken.serve.settings import ServeSettings

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def cors_options(settings: ServeSettings) -> dict[str, Any]:
    """What web pages of the origins may do, as arguments of `CORSMiddleware`."""
    return {
        "allow_origins": settings.cors_origins,
        "allow_methods": ("GET", "POST"),
        "allow_headers": ("*",),  # clients have many of their own, and no key comes by itself, as a cookie does
        "expose_headers": ("x-request-id", "retry-after"),
    }


def answer_errors(app: Starlette, explain: Callable[[Exception], ApiError]) -> None:
    """Have errors answered in the API's form.

    Args:
        app: whose errors.
        explain: what a client is told of an error of the library.
    """

    async def library_error(request: Request, error: Exception) -> Response:
        return error_response(explain(error), request.url.path)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is no path {request.url.path[:200]!r}: use /v1/chat/completions, /v1/completions, "
            "/v1/responses, /v1/messages or another one that the documentation has",
            405: f"{request.url.path[:200]} does not take {request.method}: use the method that the documentation has",
        }.get(error.status_code, "the request can't be used")
        return error_response(ApiError(error.status_code, message, headers=error.headers), request.url.path)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    for kind, handler in (
        (ApiError, library_error),
        (ForetokenError, library_error),
        (HTTPException, http_error),
        (ClientGone, gone),
    ):
        app.add_exception_handler(kind, handler)

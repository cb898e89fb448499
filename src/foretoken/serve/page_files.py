"""The page at ``/``: files that were built from ``web/``, with headers that let it ask nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/app.css": ("app.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}

PAGE_PATHS = tuple(_FILES)

_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # may be kept, but is asked for by its tag
}


def page_file_routes() -> APIRouter:
    """The page and its files."""
    router = APIRouter()
    for path, (name, kind) in _FILES.items():
        router.add_api_route(path, _answer((_FOLDER / name).read_bytes(), kind), methods=["GET", "HEAD"])
    return router


def _answer(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=kind)

    return answer

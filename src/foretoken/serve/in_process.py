"""Requests to the application without HTTP: for whoever has it in the same process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from foretoken.serve.errors import dump


@dataclass(frozen=True)
class Answer:
    """What the application answered.

    Attributes:
        status: as in HTTP.
        request_id: its ``x-request-id``.
        body: a JSON object.
    """

    status: int
    request_id: str
    body: dict[str, Any]


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> Answer:
    """Have the application answer a request in one piece. Cancelling it is what hanging up is over HTTP.

    Args:
        app: of `create_app`.
        path: such as ``/v1/completions``.
        body: JSON that asks for no stream.
    """
    data = dump(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())],
        "client": None,
        "server": None,
    }
    told: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]
    never = asyncio.Event()
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if told:
            return told.pop()
        await never.wait()  # nobody hangs up
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message["body"])

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], headers["x-request-id"], json.loads(b"".join(parts)))

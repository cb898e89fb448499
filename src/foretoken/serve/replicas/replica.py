"""One replica: the server's application with an engine of its own, asked by the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.types import Message

from foretoken.serve.replicas.messages import Part, Question, ReplicaDied

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.service import Service

_WAITING_PARTS = 64


async def answer(app: FastAPI, question: Question) -> AsyncGenerator[Part, None]:
    """The application's answer, part by part. Closing the generator is what hanging up is over HTTP.

    The first part comes with the first bytes of the body; parts that wait are sent as one.

    Args:
        app: of `foretoken.serve.create_app`.
        question: what is asked.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": question.method,
        "scheme": "http",
        "path": question.path,
        "raw_path": question.path.encode(),
        "query_string": question.query,
        "root_path": "",
        "headers": [*question.headers, (b"content-length", str(len(question.body)).encode())],
        "client": None,
        "server": None,
    }
    told: list[Message] = [{"type": "http.request", "body": question.body, "more_body": False}]
    never = asyncio.Event()
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_WAITING_PARTS)

    async def receive() -> Message:
        if told:
            return told.pop()
        await never.wait()  # who hangs up cancels the task
        raise AssertionError

    async def run() -> None:
        try:
            await app(scope, receive, messages.put)
        finally:
            if not never.is_set():
                await messages.put(None)

    task = asyncio.create_task(run())
    try:
        start: Message = {"status": 0, "headers": ()}
        over = False
        while not over:
            body: list[bytes] = []
            while not over and (not body or not messages.empty()):
                message = await messages.get()
                if message is None:
                    over = True
                elif message["type"] == "http.response.start":
                    start = message
                elif message["body"]:
                    body.append(message["body"])
            if body or start["status"]:
                yield Part(b"".join(body), start["status"], tuple(start["headers"]))
            start = {"status": 0, "headers": ()}
        await task
    finally:
        never.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def check_engine(service: Service) -> None:
    """Check that the engine runs.

    Raises:
        ReplicaDied: it has ended with an error.
    """
    if service.engine.failure is not None:
        raise ReplicaDied(f"the engine has ended with an error ({type(service.engine.failure).__name__})")

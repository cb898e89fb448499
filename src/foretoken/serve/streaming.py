"""Responses that end as their client hangs up: server-sent events, and answers in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import ExitStack, aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.errors import ClientGone, dump

T = TypeVar("T")

DONE = "data: [DONE]\n\n"
"""What OpenAI's streams end with."""


def data(body: Any, event: str | None = None) -> str:
    """A server-sent event."""
    named = "" if event is None else f"event: {event}\n"
    return f"{named}data: {dump(body)}\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, as a generator makes them.

    The next event is made when the last one is sent, so that a slow reader holds up its own stream alone. The generator
    is closed as soon as the client is gone, or takes nothing for too long.

    Args:
        events: server-sent events.
        held: what is given back at the end.
        send_seconds: for which a client may take nothing.
    """

    def __init__(self, events: AsyncGenerator[str, None], held: ExitStack, send_seconds: float) -> None:
        # The second header has proxies pass events on at once.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._held = held
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Without its end, if the client takes nothing for too long: the connection is closed then."""
        with self._held, suppress(ClientGone):
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send it, and close the generator however that ends.

        Raises:
            ClientGone: the client took nothing for too long.
        """

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._send_seconds):
                    await send(message)
            except TimeoutError:
                raise ClientGone from None

        async with aclosing(self._events):
            await super().stream_response(send_in_time)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as the client hangs up.

    Raises:
        ClientGone: it did.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

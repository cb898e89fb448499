"""Responses that end as their client hangs up: server-sent events, and answers in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from foretoken.serve.errors import ClientGone, dump

T = TypeVar("T")

WRITE_PART = "foretoken.write_part"
"""An extension of ASGI's scope, where the server has it: writes a part of a body that has begun, given its bytes.

It says whether it did: not where the client has to take earlier parts first. Given no bytes, it says whether it would.
It takes no task, as `send` does.
"""

WritePart = Callable[[bytes], bool]

DONE = "data: [DONE]\n\n"
"""What OpenAI's streams end with."""


def data(body: Any, event: str | None = None) -> str:
    """A server-sent event."""
    named = "" if event is None else f"event: {event}\n"
    return f"{named}data: {dump(body)}\n\n"


class EventStream(Response):
    """Server-sent events, as a generator makes them.

    The next event is made when the last one is sent, so that a slow reader holds up its own stream alone. The generator
    is closed as soon as the client is gone, or takes nothing for too long.

    Args:
        events: server-sent events.
        held: what is given back at the end.
        send_seconds: for which a client may take nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], held: ExitStack, send_seconds: float) -> None:
        # The second header has proxies pass events on at once. The length is not known: so no body, which would set it.
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._held = held
        self._send_seconds = send_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. Without its end, if the client takes nothing for too long: the connection is closed then."""
        with self._held, suppress(ClientGone):
            await _unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        """Send it, and close the generator however that ends.

        Raises:
            ClientGone: the client took nothing for too long.
        """
        async with aclosing(self._events) as events:
            with _Patience(self._send_seconds) as patience:

                async def tell(message: Message) -> None:
                    patience.since = patience.clock()
                    await send(message)
                    patience.since = None

                await tell({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in events:
                    await tell({"type": "http.response.body", "body": event.encode(), "more_body": True})
                await tell({"type": "http.response.body", "body": b"", "more_body": False})


class _Patience:
    """Ends the present task if what it waits for takes too long: `asyncio.timeout` for many short waits.

    One timer for all of them: to set one and take it back takes a good part of the time that an event takes.

    Args:
        seconds: for each wait; a longer one leaves the block with ClientGone.

    Attributes:
        clock: of the event loop.
        since: when the wait began that is going on; None between waits. To be set by the block.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.clock = self._loop.time
        self.since: float | None = None
        self._over = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise ClientGone where a wait took too long."""
        self._timer.cancel()
        if kind is asyncio.CancelledError and self._over and self._task.uncancel() == 0:
            raise ClientGone

    def _look(self) -> None:
        left = self._seconds if self.since is None else self.since + self._seconds - self.clock()
        if left <= 0.0:
            self._over = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(left, self._look)


def part_writer(request: Request) -> WritePart | None:
    """What `WRITE_PART` names; None where the server has no such extension."""
    found: WritePart | None = request.scope.get("extensions", {}).get(WRITE_PART)
    return found


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as the client hangs up.

    Raises:
        ClientGone: it did.
    """
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task, gone = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal gone
        await _disconnect(receive)
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

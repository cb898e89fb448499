"""The server's end of the connection to the engine's process, on its event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from itertools import count
from typing import Any

from foretoken.errors import EngineClosed, ForetokenError
from foretoken.serve.apart.wire import Frames, Kind, frame

_CLOSED = "the server is closed: ask another one"
_LOOK_SECONDS = 1.0
"""After which a thread that waits looks whether somebody is there to answer."""


class Link(asyncio.Protocol):
    """Sends frames, asks questions, and passes on what comes.

    Args:
        connection: to a `Host`.
        arrive: is given each of the events that come, as `read_event` takes them.
        lost: is called with an error when nothing more will come.

    Attributes:
        failure: what ended the engine or its process; None while all is well, and where `close` ended them.
    """

    def __init__(
        self,
        connection: socket.socket,
        arrive: Callable[[tuple[Any, ...]], None],
        lost: Callable[[Exception], None],
    ) -> None:
        self.failure: Exception | None = None
        self._connection = connection
        self._arrive, self._lost = arrive, lost
        self._frames = Frames()
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._closing = False

    async def open(self) -> None:
        """Begin to take what comes."""
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._transport, _ = await self._loop.create_connection(lambda: self, sock=self._connection)

    @property
    def is_open(self) -> bool:
        """Requests are taken."""
        return self.failure is None and not self._closing

    def send(self, kind: Kind, value: Any, *, while_closing: bool = False) -> None:
        """Send a frame.

        Args:
            kind: of it.
            value: what it holds.
            while_closing: it is not worth an error that the other side is gone, or told to end.

        Raises:
            ForetokenError: the engine has ended, or is about to.
        """
        if not while_closing:
            self._check_open()
        if not self._ended.is_set():
            self._transport.write(frame(kind, value))

    async def ask(self, name: str, *arguments: Any) -> Any:
        """What the engine's side answers to a question.

        Raises:
            ForetokenError: it has ended, or is about to; or what it answers with.
        """
        number, future = next(self._numbers), self._loop.create_future()
        self.send(Kind.ASK, (number, name, arguments))
        self._asked[number] = future
        try:
            return await future
        finally:
            if self._asked.pop(number, None) is not None:
                self.send(Kind.DROP, number, while_closing=True)

    def ask_from_thread(self, name: str, *arguments: Any) -> Any:
        """As `ask`, on another thread than the event loop's, which waits."""
        answer = asyncio.run_coroutine_threadsafe(self.ask(name, *arguments), self._loop)
        while True:
            try:
                return answer.result(_LOOK_SECONDS)
            except TimeoutError:
                if answer.done():  # it came meanwhile, or is that very error
                    return answer.result()
                if self._loop.is_closed():  # it will not come any more
                    raise EngineClosed(_CLOSED) from None

    async def close(self, seconds: float) -> None:
        """Have the engine's side end all requests, and itself; those get their last events before.

        Args:
            seconds: after which the connection is broken off.
        """
        if not self._closing:
            self._closing = True
            self.send(Kind.STOP, None, while_closing=True)
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            self._transport.abort()
            await self._ended.wait()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        for kind, value in self._frames.feed(data):
            if kind is Kind.EVENTS:
                for written in value:
                    self._arrive(written)
            elif kind is Kind.REPLY:
                self._reply(*value)
            else:
                assert kind is Kind.FAILED
                self.failure = value

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self.is_open:
            self.failure = ForetokenError("the engine's process has ended: start the server again")
        told = self.failure or EngineClosed(_CLOSED)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(told)
        self._asked.clear()
        self._ended.set()
        self._lost(told)

    def _reply(self, number: int, value: Any) -> None:
        if (future := self._asked.pop(number, None)) is None or future.done():
            return
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise ForetokenError(
                f"the engine was ended by an error ({self.failure!r}): start the server again"
            ) from self.failure
        if self._closing:
            raise EngineClosed(_CLOSED)

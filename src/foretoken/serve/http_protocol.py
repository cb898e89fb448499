"""HTTP/1.1 as the server speaks it."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from foretoken.serve.errors import ApiError, dump
from foretoken.serve.streaming import WRITE_PART

HEAD_SECONDS = 60.0
"""Within which a client has to send a request's head once it has begun; and to begin, on a new connection, where those
without a request stay open for less."""

_LARGEST_HEAD = 64 * 1024  # bytes
_MESSAGE = (
    "the request is no valid HTTP/1.1, or its head is larger than 64 KiB: send a valid one, with one Host header and "
    "one whole, positive Content-Length"
)


class _Connection(h11.Connection):
    """Frames the parts of a stream by itself: h11 takes longer for an event's frame than all else does.

    Only where h11 has begun a body that it sends in chunks, which a further part leaves as it is.
    """

    _chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # its overloads say which give none
        """The bytes of an event."""
        if type(event) is h11.Data and (framed := self.framed(event.data)) is not None:
            return framed
        told = super().send(event)
        if type(event) is h11.Response:
            head = told or b""
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
        return told

    def framed(self, data: bytes) -> bytes | None:
        """A part of a body that is sent in chunks; None where no such body has begun."""
        if not self._chunked or self.our_state is not h11.SEND_BODY:
            return None
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class HttpProtocol(H11Protocol):
    """h11, whatever else is installed; what it can't read is answered in the API's form, where uvicorn sends text.

    Requests have the extension `WRITE_PART`. No connection waits without an end for a request: uvicorn lets it, where
    none has been answered yet, and from a request's first byte on.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: _Connection = _Connection(h11.SERVER, _LARGEST_HEAD)
        self._served, self.app = self.app, self._with_extension
        self._late: asyncio.TimerHandle | None = None  # while a request's head, or what nobody reads, is coming

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._keep_alive(max(self.timeout_keep_alive, HEAD_SECONDS))

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)  # a connection with some data does not count as one without a request any more
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if is_asked or (self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]):
            self._in_time()
            if not is_asked and self.timeout_keep_alive_task is None:  # the rest of a body has come that nobody read
                self._keep_alive(self.timeout_keep_alive)
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(error)
        self._unset_keepalive_if_required()
        self._in_time()

    def _keep_alive(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        message = f"the request's head did not arrive within {HEAD_SECONDS:g} seconds: send it again"
        self._refuse(ApiError(408, message))

    async def _with_extension(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {WRITE_PART: partial(self._write_part, self.cycle)}

        async def tell(message: Message) -> None:
            if self.transport.is_closing():  # uvicorn learns of a lost connection as the event loop goes on
                await asyncio.sleep(0)
            await send(message)

        await self._served(scope, receive, tell)

    def _write_part(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        """Write a part of the body of an answer that has begun and goes on; nothing, to learn whether that can be done.

        Returns:
            Whether it was written: not where the client has to take earlier parts first, or is gone, nor where the body
            is not sent in chunks. Then it is to be sent as ASGI has it.
        """
        if cycle is not self.cycle or cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        if self.transport.is_closing():  # asyncio would log every further part that it can't write
            return False
        framed = self.conn.framed(part)
        if framed is None:
            return False
        self.transport.write(framed)
        return True

    def _should_upgrade(self) -> bool:
        """Never: who offers HTTP/2 (h2c) goes on with HTTP/1.1. uvicorn would log a lack of WebSockets each time."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        self._refuse(ApiError(400, _MESSAGE, code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer to what is no request where none has begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = dump(error.body()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            reason = HTTPStatus(error.status).phrase.encode()
            response = h11.Response(status_code=error.status, headers=list(headers.items()), reason=reason)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

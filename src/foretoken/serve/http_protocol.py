"""HTTP/1.1 as the server speaks it."""

from __future__ import annotations

from functools import partial
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from foretoken.serve.errors import ApiError, dump
from foretoken.serve.streaming import WRITE_PART

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

    Requests have the extension `WRITE_PART`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn: _Connection = _Connection(h11.SERVER, _LARGEST_HEAD)
        self._served, self.app = self.app, self._with_extension

    async def _with_extension(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {WRITE_PART: partial(self._write_part, self.cycle)}
        await self._served(scope, receive, send)

    def _write_part(self, cycle: RequestResponseCycle, part: bytes) -> bool:
        """Write a part of the body of an answer that has begun and goes on; nothing, to learn whether that can be done.

        Returns:
            Whether it was written: not where the client has to take earlier parts first, or is gone, nor where the body
            is not sent in chunks. Then it is to be sent as ASGI has it.
        """
        if cycle is not self.cycle or cycle.response_complete or cycle.disconnected or self.flow.write_paused:
            return False
        framed = self.conn.framed(part)
        if framed is None:
            return False
        self.transport.write(framed)
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close the connection."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            self.transport.close()
            return
        body = dump(ApiError(400, _MESSAGE, code="invalid_http").body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

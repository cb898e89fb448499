"""HTTP/1.1 as the server speaks it."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.serve.errors import ApiError, dump

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
        if self._chunked and type(event) is h11.Data and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        told = super().send(event)
        if type(event) is h11.Response:
            head = told or b""
            self._chunked = b"\r\ntransfer-encoding: chunked\r\n" in head.lower()
        return told


class HttpProtocol(H11Protocol):
    """h11, whatever else is installed; what it can't read is answered in the API's form, where uvicorn sends text."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Connection(h11.SERVER, _LARGEST_HEAD)

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

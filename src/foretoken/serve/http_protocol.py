"""HTTP/1.1 as the server speaks it."""

from __future__ import annotations

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from foretoken.serve.errors import ApiError, dump

_MESSAGE = (
    "the request is no valid HTTP/1.1, or its head is larger than 64 KiB: send a valid one, with one Host header and "
    "one whole, positive Content-Length"
)


class HttpProtocol(H11Protocol):
    """h11, whatever else is installed; what it can't read is answered in the API's form, where uvicorn sends text."""

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

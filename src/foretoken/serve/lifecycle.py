"""A server's life: it listens, serves, drains when it is told to end, and ends with its engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from foretoken.errors import ForetokenError
from foretoken.serve.collecting import start_not_collected
from foretoken.serve.http_protocol import HttpProtocol
from foretoken.serve.settings import KEEP_ALIVE

if TYPE_CHECKING:
    from fastapi import FastAPI

    from foretoken.serve.service import Service

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_BACKLOG = 2048

_TO_TELL = 2.0
"""Seconds for telling the clients of requests that still run after the grace time, or at a second signal, that they are
ended."""

_LOOK_SECONDS = 0.1
"""After which the server that waits for its requests looks whether a second signal has come."""


def listen(host: str, port: int, send_seconds: float | None = None) -> socket.socket:
    """A socket that listens: connections wait in its queue until somebody serves.

    Args:
        host, port, send_seconds: as for `bound`.

    Raises:
        ForetokenError: it can't.
    """
    listener = bound(host, port, send_seconds)
    try:
        begin_to_listen(listener)
    except BaseException:
        listener.close()
        raise
    return listener


def bound(host: str, port: int, send_seconds: float | None = None) -> socket.socket:
    """A socket that has its address and does not listen yet: connections are refused until `begin_to_listen`.

    Args:
        host: address or name of an interface.
        port: 0 takes a free one.
        send_seconds: after which a connection ends whose other side takes nothing, where the system can do that.

    Raises:
        ForetokenError: it can't.
    """
    with ExitStack() as failed, _address_errors(host, port):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, address = found[0][0], found[0][4]
        listener = failed.enter_context(socket.socket(family, socket.SOCK_STREAM))
        if os.name == "posix":  # a port whose connections have just ended is free; elsewhere it would mean more
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address[:2])
        failed.pop_all()
    # Its connections inherit it. asyncio sets it itself, but not for sockets that name no protocol, as those made here:
    # an answer's first events would wait for the client to acknowledge its head, 40 ms on a connection that is kept.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if send_seconds is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; its connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * send_seconds))
    return listener


def begin_to_listen(listener: socket.socket) -> None:
    """Have connections wait for a server.

    Args:
        listener: of `bound`.

    Raises:
        ForetokenError: another program has begun to listen there meanwhile.
    """
    with _address_errors(*listener.getsockname()[:2]):
        listener.listen(_BACKLOG)


@contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ForetokenError(
            f"can't listen on port {port} of {host!r} ({reason}): give a free port, and an address of this machine"
        ) from error


def serve(
    app: FastAPI,
    listener: socket.socket,
    *,
    grace: float,
    keep_alive: float = KEEP_ALIVE,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> bool:
    """Serve until SIGTERM or SIGINT.

    After that no request is let in, and those that run have `grace` seconds to end; others are then told so, or as soon
    as a second signal comes.

    Args:
        app: of `create_app`.
        listener: of `listen`; closed at the end.
        grace: seconds.
        keep_alive: seconds for which a connection without a request stays open.
        tls_cert: PEM file with the certificate and its chain; None for plain HTTP.
        tls_key: PEM file with its key; None if it is in the same file.

    Returns:
        Whether the end was asked for; False after an error of the engine, which no request outlives.

    Raises:
        ForetokenError: the certificate can't be used.
    """
    service: Service = app.state.service
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        http=HttpProtocol,
        ws="none",  # an upgrade would be answered in text
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # the event loop's, which takes fractions
        timeout_graceful_shutdown=grace + _TO_TELL,  # type: ignore[arg-type]  # asyncio's, which takes fractions
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    with closing(listener):
        with _tls_errors(tls_cert, tls_key):
            config.load()
        server = app.state.server = _Server(config, service, grace)
        with start_not_collected():
            asyncio.run(server.serve(sockets=[listener]))
    return service.engine.failure is None


def check_tls(cert: Path, key: Path | None) -> None:
    """See to it that a certificate can be used.

    Args:
        cert, key: as for `serve`.

    Raises:
        ForetokenError: it can't.
    """
    with _tls_errors(cert, key):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)


@contextmanager
def _tls_errors(cert: Path | None, key: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # an ssl.SSLError is one
        files = " and ".join(repr(str(file)) for file in (cert, key) if file is not None)
        raise ForetokenError(
            f"the TLS certificate can't be used ({error.strerror or error}): give PEM files of a certificate and its "
            f"key in place of {files}"
        ) from error


class _Server(uvicorn.Server):
    """Ends with status 0 after a signal, where uvicorn would raise it again; and as the engine has failed.

    Args:
        config: of uvicorn.
        service: what is served.
        grace: seconds that requests have to end.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service, self._grace = service, grace

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to end."""
        return await super().on_tick(counter) or self._service.engine.failure is not None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what runs. uvicorn cancels what is left, whose clients would see a closed connection, or a 500."""
        ending = asyncio.create_task(self._end_requests())
        # Even after a second signal it may wait for all connections to close: from Python 3.12 on, a listener does.
        closing = asyncio.create_task(super().shutdown(sockets))
        try:
            while not (self.force_exit or closing.done()):
                await asyncio.wait([closing], timeout=_LOOK_SECONDS)
            if self.force_exit:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._tell(), _TO_TELL)
            else:
                await closing
        finally:
            ending.cancel()
            closing.cancel()

    async def _tell(self) -> None:
        """End all requests, and wait until clients are told so: uvicorn logs each task that is cancelled as failed."""
        await self.lifespan.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)

    async def _end_requests(self) -> None:
        await asyncio.sleep(self._grace)
        await self._service.engine.aclose()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the block runs."""
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain; a second signal ends what still runs."""
        self._service.admission.draining = True
        self.force_exit = self.should_exit
        self.should_exit = True

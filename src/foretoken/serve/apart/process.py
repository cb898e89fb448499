"""Starts the engine's process. Imports no torch, so that the process can load it while this one does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from foretoken.errors import ForetokenError

if TYPE_CHECKING:
    from foretoken.engine.engine import Engine
    from foretoken.serve.apart.remote import DecodingApart

_SECONDS = 10.0
"""For which a process may take to end by itself."""


class EngineProcess:
    """A process that makes an engine and decodes with it for this one. It ends with this one, however that ends.

    Begins at once, so that this process can do something else while models are loaded.

    Args:
        make_engine: makes the engine, in the process; can be pickled.
        queue_seconds: as for `AsyncEngine`.
    """

    def __init__(self, make_engine: Callable[[], Engine], queue_seconds: float | None) -> None:
        self._connection, other = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_run, args=(other, make_engine, queue_seconds), daemon=True)
        with _interrupts_ignored():  # as the process inherits it: Ctrl-C is for this one, from the first moment on
            self._process.start()
        self._has_engine = False
        other.close()

    def decoding(self, max_events: int | None) -> DecodingApart | None:
        """Wait until the engine is there; None where its tokenizer can't be handed over: then close this.

        Args:
            max_events: as for `AsyncEngine`.

        Raises:
            ForetokenError: as `make_engine`, or the process has ended.
        """
        from foretoken.serve.apart.remote import DecodingApart
        from foretoken.serve.apart.wire import Frames, Kind

        frames = Frames()
        while data := self._read():
            try:
                told = list(frames.feed(data))
            except Exception:  # what a tokenizer is made of is not to be found here
                return None
            for kind, value in told:
                assert kind is Kind.FACTS
                if isinstance(value, ForetokenError):
                    raise value
                if value is None:
                    return None
                self._has_engine = True
                return DecodingApart(self._connection, value, max_events=max_events, join=self.close)
        self._process.join(_SECONDS)
        raise ForetokenError(
            f"the engine's process ended while models were loaded (exit code {self._process.exitcode}): see above"
        )

    def _read(self) -> bytes:
        try:
            return self._connection.recv(1 << 20)
        except OSError:  # the process was killed
            return b""

    def close(self) -> None:
        """See to it that the process ends: at once, unless it has requests to end."""
        self._connection.close()
        if self._has_engine:
            self._process.join(_SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # no other may do that
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, whatever this one does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _run(connection: socket.socket, make_engine: Callable[[], Engine], queue_seconds: float | None) -> None:
    """What the process does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server's process is told, too, and says when to end
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from foretoken.serve.apart.host import Host
    from foretoken.serve.apart.wire import Channel, Kind, frame, sendable
    from foretoken.serve.collecting import start_not_collected
    from foretoken.serve.decoding import facts_of

    channel = Channel(connection)
    with closing(channel), suppress(OSError):  # the server's process is gone
        try:
            engine = make_engine()
        except ForetokenError as error:
            channel.send(frame(Kind.FACTS, sendable(error)))
            return
        try:
            facts = frame(Kind.FACTS, facts_of(engine))
        except Exception:  # a tokenizer may hold anything
            channel.send(frame(Kind.FACTS, None))
            return
        channel.send(facts)
        with start_not_collected():
            Host(engine, channel, queue_seconds).run()

"""The protocol between the server's process and the engine's: frames of a kind, a length and a body.

Both are one program's, over sockets that nobody else has: so that values can go as pickles.
"""

from __future__ import annotations

import marshal
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock, Thread
from typing import Any

from foretoken.engine.outputs import DecodeStats, Origin, Piece, StreamEvent
from foretoken.errors import ForetokenError
from foretoken.serve.logs import name_error

_HEAD = struct.Struct("<BI")
_READ = 1 << 20  # bytes at once
_DONT_WAIT = 0 if sys.platform == "win32" else socket.MSG_DONTWAIT
_CLOSE_SECONDS = 5.0
"""For which the other side may take to read what is left."""

_ORIGINS: tuple[Origin, ...] = ("accepted", "residual", "bonus", "target")


class Kind(IntEnum):
    """What a frame holds.

    To the engine: `SUBMIT` (index, interval, prompt, params, settings), `CANCEL` an index, `ASK` (number, name,
    arguments), `DROP` the number of a question that nobody waits for any more, `STOP`. To the server: `FACTS`,
    `EVENTS` of a round, `REPLY` (number, value or exception), `FAILED` with the engine's error.
    """

    SUBMIT = 0
    CANCEL = 1
    ASK = 2
    DROP = 3
    STOP = 4
    FACTS = 5
    EVENTS = 6
    REPLY = 7
    FAILED = 8


def frame(kind: Kind, value: Any) -> bytes:
    """The bytes of a frame."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(kind, len(data)) + data


def sendable(error: Exception) -> Exception:
    """An error as it can be sent: with its name for the log, and its stack as a note, where it is none of the
    library's; another error, if it can't be made again from its pickle.
    """
    name_error(error)  # one may end many requests, each of which is sent a copy
    if not isinstance(error, ForetokenError) and not hasattr(error, "__notes__"):
        error.add_note("in the engine's process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        told = ForetokenError(f"{type(error).__name__}: {error}")
        for note in error.__notes__ if hasattr(error, "__notes__") else ():
            told.add_note(note)
        name_error(told, error)
        return told
    return error


class Frames:
    """Frames out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Any]]:
        """The frames that are complete now, with what they hold; of `EVENTS` a list of what `read_event` takes."""
        self._buffer += data
        while len(self._buffer) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._buffer)
            end = _HEAD.size + length
            if len(self._buffer) < end:
                return
            held = bytes(memoryview(self._buffer)[_HEAD.size : end])
            del self._buffer[:end]
            yield Kind(kind), marshal.loads(held) if kind == Kind.EVENTS else pickle.loads(held)


class Channel:
    """A side of the connection that blocks in `receive` alone; any thread may send.

    Args:
        connection: its socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._lock = Lock()
        self._backlog = bytearray()  # what the other side has not taken yet
        self._sender: Thread | None = None  # while there is something

    def send(self, data: bytes) -> None:
        """Send a frame. What the other side does not take at once waits in memory, for a thread: nobody here does.

        Raises:
            OSError: the other side is gone.
        """
        with self._lock:
            sent = 0
            if self._sender is None:
                with suppress(BlockingIOError):
                    sent = self._connection.send(data, _DONT_WAIT)
            if sent < len(data):
                self._backlog += data[sent:]
                if self._sender is None:
                    self._start_sender()

    def _start_sender(self) -> None:
        sender = Thread(target=self._send_backlog, daemon=True)
        try:
            sender.start()
        except RuntimeError as error:  # there can be no further thread: a part of a frame must not be left alone
            self._break_off()
            raise OSError(f"no thread could be started ({error})") from error
        self._sender = sender

    def _break_off(self) -> None:
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send_backlog(self) -> None:
        while True:
            with self._lock:
                data = bytes(self._backlog)
                self._backlog.clear()
                if not data:
                    self._sender = None
                    return
            try:
                self._connection.sendall(data)
            except OSError:  # the other side is gone, which the next frame finds out
                self._break_off()
                with self._lock:
                    self._backlog.clear()
                    self._sender = None
                return

    def receive(self) -> Iterator[tuple[Kind, Any]]:
        """Frames as they come, until the other side is gone."""
        try:
            while data := self._connection.recv(_READ):
                yield from self._frames.feed(data)
        except OSError:
            return

    def close(self) -> None:
        """End the connection, behind what was sent."""
        with self._lock:
            sender = self._sender
        if sender is not None:
            sender.join(_CLOSE_SECONDS)
        self._connection.close()


@dataclass
class Told:
    """What a side knows that the other side knows of a request."""

    stats: DecodeStats | None = None
    drafted: int = -1


def write_event(index: int, told: Told, event: StreamEvent | Exception, begun_at: float | None) -> tuple[Any, ...]:
    """An event, or the error that ended a request, as `EVENTS` has it.

    Most events under load are of a round without drafts: those go as numbers, which takes a tenth of the time of a
    pickle. Not the first event of a request: what does not change from round to round comes with that.

    Args:
        index: of the request.
        told: of the request; is brought up to date.
        event: what happened.
        begun_at: as `Call.begun_at`.
    """
    if isinstance(event, Exception):
        return index, pickle.dumps((sendable(event), begun_at))
    stats = event.stats
    if (
        event.completion is None
        and stats.drafted == told.drafted
        and event.trace is None
        and event.logprobs is None
        and len(event.pieces) == 1
    ):
        piece = event.pieces[0]
        origin = _ORIGINS.index(piece.origin)
        return index, piece.token_id, piece.text, origin, stats.rounds, stats.emitted, *stats.seconds.values()
    told.drafted = stats.drafted
    return index, pickle.dumps((event, begun_at), pickle.HIGHEST_PROTOCOL)


def events_frame(events: list[tuple[Any, ...]]) -> bytes:
    """The frame of what `write_event` gave for the requests of a round."""
    data = marshal.dumps(events)
    return _HEAD.pack(Kind.EVENTS, len(data)) + data


def read_event(told: Told, written: tuple[Any, ...]) -> tuple[StreamEvent | Exception, float | None]:
    """What `write_event` was given, and `begun_at` where it was told; `told` is brought up to date."""
    if len(written) == 2:
        event, begun_at = pickle.loads(written[1])
        if isinstance(event, StreamEvent):
            told.stats = event.stats
        return event, begun_at
    _, token, text, origin, rounds, emitted, *seconds = written
    stats = told.stats
    assert stats is not None
    stats.rounds, stats.emitted = rounds, emitted
    for name, value in zip(stats.seconds, seconds, strict=True):
        stats.seconds[name] = value
    return StreamEvent((Piece(token, text, _ORIGINS[origin]),), stats), None

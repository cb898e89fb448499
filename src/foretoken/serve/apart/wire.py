"""What the server's process and the engine's say to each other: frames of a kind, a length and what they hold.

Both are one program's, over sockets that nobody else has: so that values can go as pickles.
"""

from __future__ import annotations

import marshal
import pickle
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock
from typing import Any

from foretoken.engine.outputs import DecodeStats, Origin, Piece, StreamEvent
from foretoken.errors import ForetokenError

_HEAD = struct.Struct("<BI")
_READ = 1 << 20  # bytes at once

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


def reply(number: int, value: Any) -> bytes:
    """The frame that answers a question; what can't be sent becomes an error that can."""
    try:
        return frame(Kind.REPLY, (number, value))
    except Exception as error:
        return frame(Kind.REPLY, (number, ForetokenError(f"{value!r} can't be sent ({error})")))


class Frames:
    """Frames out of bytes as they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, Any]]:
        """The frames that are complete now, with what they hold; of `EVENTS` as `read_events` has it."""
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
    """A side of the connection that blocks; any thread may send.

    Args:
        connection: its socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self._lock = Lock()

    def send(self, data: bytes) -> None:
        """Send a frame; waits while the other side takes nothing.

        Raises:
            OSError: the other side is gone.
        """
        with self._lock:
            self._connection.sendall(data)

    def receive(self) -> Iterator[tuple[Kind, Any]]:
        """Frames as they come, until the other side is gone."""
        try:
            while data := self._connection.recv(_READ):
                yield from self._frames.feed(data)
        except OSError:
            return

    def close(self) -> None:
        """End the connection."""
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
        try:
            return index, pickle.dumps((event, begun_at))
        except Exception:
            return index, pickle.dumps((ForetokenError(str(event)), begun_at))
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

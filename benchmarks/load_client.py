"""A client of many connections that costs little, so that a load measures the server: it shares the machine with it.

One thread reads all sockets as they become readable. Events are counted by what stands around their text, and no JSON
is parsed.
"""

from __future__ import annotations

import re
import selectors
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter, thread_time

_HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
_TEXT = re.compile(rb'"content": ?"(?!")')
"""In an event that has text. Inside a string of JSON its quotation marks would have backslashes."""
_TOKENS = re.compile(rb'"completion_tokens": ?([1-9]\d*)')
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d+)\r\n", re.IGNORECASE)
_READ = 256 * 1024  # bytes at once


@dataclass
class Answer:
    """When the events of an answer came, in seconds from its request, and how many tokens it has."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Answers:
    """What came of a load.

    Attributes:
        answers: in the order in which they ended.
        seconds: that they took together.
        client_seconds: CPU time of the client.
    """

    answers: list[Answer]
    seconds: float
    client_seconds: float

    @property
    def events(self) -> int:
        """Events with text, of all answers."""
        return sum(len(answer.times) for answer in self.answers)

    @property
    def tokens_a_second(self) -> float:
        """Of all answers together."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


class _Connection:
    """One client: asks the next question when its last answer is complete.

    Args:
        port: of the server, on loopback.
        bodies: of the questions, for all clients.
        answers: where its answers go.
    """

    def __init__(self, port: int, bodies: Iterator[bytes], answers: list[Answer]) -> None:
        self._port = port
        self._bodies = bodies
        self._answers = answers
        self._body = b""
        self.socket = self._connect()

    def _connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self._port))
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def ask(self) -> bool:
        """Send the next question; False if there is none."""
        body = next(self._bodies, None)
        if body is None:
            return False
        self._send(body)
        return True

    def _send(self, body: bytes) -> None:
        self._body, self._rest, self._begun = body, b"", False
        self._body_length: int | None = None  # once the head has come; -1 of a stream
        self._answer, self._since = Answer(), perf_counter()
        self.socket.sendall((_HEAD % len(body)).encode() + body)

    def read(self) -> bool | None:
        """Take what has come: whether the answer is complete; None if the server closed before it began."""
        try:
            data = self.socket.recv(_READ)
        except ConnectionResetError:
            data = b""
        if not data:
            if self._begun:
                raise RuntimeError("the server hung up")
            return None
        if not self._begun:
            if b" 200 " not in data[:20]:
                raise RuntimeError(data.decode())
            self._begun = True
        now, data = perf_counter() - self._since, self._rest + data
        if self._body_length is None and b"\r\n\r\n" in data:
            head, _, rest = data.partition(b"\r\n\r\n")
            length = _LENGTH.search(head + b"\r\n")
            self._body_length = -1 if length is None else int(length[1])
            data = data if length is None else rest
        if self._body_length is not None and self._body_length >= 0:
            return self._read_whole(data, now)
        whole = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        events, self._rest = data[:whole], data[whole:]
        self._answer.times += [now] * len(_TEXT.findall(events))
        for tokens in _TOKENS.findall(events):
            self._answer.tokens = int(tokens)
        if not data.endswith(b"\r\n0\r\n\r\n"):  # the last chunk of HTTP
            return False
        self._answer.tokens = self._answer.tokens or len(self._answer.times)
        self._answers.append(self._answer)
        return True

    def _read_whole(self, data: bytes, now: float) -> bool:
        """The same of an answer that is not streamed, its head left out."""
        assert self._body_length is not None
        self._rest = data
        if len(data) < self._body_length:
            return False
        self._answer.times = [now]
        self._answer.tokens = sum(map(int, _TOKENS.findall(data)))
        self._answers.append(self._answer)
        return True

    def again(self) -> None:
        """Send the same question over a new connection: some servers close one after a number of requests."""
        self.socket.close()
        self.socket = self._connect()
        self._send(self._body)


def ask(port: int, bodies: Iterator[bytes], clients: int) -> Answers:
    """Have bodies answered by a server on loopback, with so many clients at once.

    Raises:
        RuntimeError: an answer is an error, or breaks off.
    """
    answers: list[Answer] = []
    began, spent = perf_counter(), thread_time()
    with selectors.DefaultSelector() as selector:
        for _ in range(clients):
            connection = _Connection(port, bodies, answers)
            if connection.ask():
                selector.register(connection.socket, selectors.EVENT_READ, connection)
        while selector.get_map():
            for key, _ in selector.select():
                connection, done = key.data, key.data.read()
                if done is False:
                    continue
                if done is None:
                    selector.unregister(connection.socket)
                    connection.again()
                    selector.register(connection.socket, selectors.EVENT_READ, connection)
                elif not connection.ask():
                    selector.unregister(connection.socket)
                    connection.socket.close()
    return Answers(answers, perf_counter() - began, thread_time() - spent)

"""Messages between the gateway and the replicas."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Question:
    """An HTTP request, as it goes to a replica.

    Attributes:
        method: of HTTP.
        path: such as ``/v1/completions``.
        query: what follows the question mark.
        headers: names in small letters, and values.
        body: as the client sent it.
        replica: the one that has what the request goes on from; empty if any will do.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    replica: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a replica's answer.

    Attributes:
        body: bytes of the body.
        status: of the response, in the first part; 0 in others.
        headers: of the response, in the first part.
    """

    body: bytes
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()


class ReplicaDied(Exception):
    """The replica that a request was with has ended, and the request with it."""


class Replicas(Protocol):
    """The replicas, as the gateway sees them."""

    def ask(self, blocks: list[int], question: Question) -> AsyncGenerator[Part, None]:
        """The parts of an answer as they come. Close the generator to end the request.

        Args:
            blocks: of its prompt, see `foretoken.serve.replicas.blocks`.
            question: what is asked.

        Raises:
            ReplicaDied: the replica has ended.
            ApiError: all replicas have their hands full.
        """

    async def metrics(self) -> list[tuple[str, str]]:
        """Of each replica, its name and what it counts, in Prometheus' text format."""

    async def answers(self) -> bool:
        """Whether any replica answers, which is known as soon as the first one has."""

"""What many replicas would do: a simulation by events, from service times that were measured on few.

Requests arrive at random (Poisson), pass the gateways, and go to a replica by the rule that the router has
(`affinity.ranked`). A replica decodes up to `rows` of them at once, the others wait in its queue. A request costs its
prefill, without the part of its prompt that the replica has, and its decoding. Ray, the network and failures are no
part of it.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from foretoken.errors import ParameterError

_PROBED = 16
"""Replicas of which the least busy one is taken, drawn at random: as good as the least busy of all, nearly."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """What is simulated.

    Attributes:
        replicas: how many.
        rows: requests that a replica decodes at once.
        max_queue: requests that wait at a replica; a further one is refused.
        prefill_seconds: of a whole prompt.
        shared: part of a prompt that is the conversation's before; 0 to 1.
        decode_seconds: of an output, in a replica with one request; its mean. Times are exponentially distributed.
        slowdown: of decoding by each further request of the batch: a batch of b takes 1 + slowdown·(b - 1) as long.
        kept: conversations whose prefix a replica has at once.
        gateways: processes that pass requests on.
        gateway_seconds: of a gateway's one thread, for a request and its answer.
        conversations: how many go on at once; requests are of one of them at random.
        slack: of `affinity.ranked`.
        affine: whether prefixes count.
    """

    replicas: int
    rows: int
    max_queue: int
    prefill_seconds: float
    decode_seconds: float
    slowdown: float
    shared: float = 0.0
    kept: int = 1
    gateways: int = 1
    gateway_seconds: float = 0.0
    conversations: int = 1_000
    slack: int = 4
    affine: bool = True

    def __post_init__(self) -> None:
        if min(self.replicas, self.rows, self.kept, self.gateways, self.conversations) < 1:
            raise ParameterError("replicas, rows, kept, gateways and conversations: give at least 1 of each")

    @property
    def replica_capacity(self) -> float:
        """Requests a second of all replicas at full batches, none of whose prompts is known."""
        decoding = self.decode_seconds * (1 + self.slowdown * (self.rows - 1)) / self.rows
        return self.replicas / (decoding + self.prefill_seconds)

    @property
    def gateway_capacity(self) -> float:
        """Requests a second of all gateways; infinite if they cost nothing."""
        return self.gateways / self.gateway_seconds if self.gateway_seconds else float("inf")


@dataclass
class Figures:
    """What a simulation saw.

    Attributes:
        arrived: requests.
        answered: of them.
        refused: since the queue was full.
        waits: seconds of each answered request until its prefill began, in the gateway and in the queue.
        known: requests whose prefix their replica had.
        most_at_once: of any replica, running and waiting.
        gateway_busy: part of the time.
        replica_busy: part of the rows, over time.
    """

    arrived: int = 0
    answered: int = 0
    refused: int = 0
    waits: list[float] = field(default_factory=list)
    known: int = 0
    most_at_once: int = 0
    gateway_busy: float = 0.0
    replica_busy: float = 0.0

    def wait(self, part: float) -> float:
        """The wait that this part of the requests did not exceed, in seconds."""
        ordered = sorted(self.waits)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0

    @property
    def broken(self) -> str | None:
        """What breaks first; None if all is well."""
        if self.gateway_busy > 0.95:
            return "gateways"
        return "replicas" if self.refused else None


@dataclass
class _Replica:
    running: int = 0
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return self.running + len(self.waiting)


class _Run:
    def __init__(self, plant: Plant, rate: float, seed: int) -> None:
        self.plant = plant
        self.random = random.Random(seed)
        self.rate = rate
        self.figures = Figures()
        self.replicas = [_Replica() for _ in range(plant.replicas)]
        self.holders: dict[int, int] = {}
        self.ends: list[tuple[float, int]] = []
        self.gateways = [0.0] * plant.gateways
        self.now = 0.0
        self.row_seconds = 0.0
        self.gateway_seconds = 0.0

    def run(self, requests: int) -> Figures:
        for arrival in self._arrivals(requests):
            began = self._through_gateway(arrival)
            while self.ends and self.ends[0][0] <= began:
                self._end(*heapq.heappop(self.ends))
            self._arrive(arrival, began)
        last = self.now
        while self.ends:
            self._end(*heapq.heappop(self.ends))
        self.figures.gateway_busy = self.gateway_seconds / max(last * self.plant.gateways, 1e-9)
        places = self.plant.rows * self.plant.replicas
        self.figures.replica_busy = self.row_seconds / max(self.now * places, 1e-9)
        return self.figures

    def _arrivals(self, requests: int) -> Iterator[float]:
        at = 0.0
        for _ in range(requests):
            at += self.random.expovariate(self.rate)
            yield at

    def _through_gateway(self, at: float) -> float:
        gateway = min(range(len(self.gateways)), key=self.gateways.__getitem__)
        began = max(at, self.gateways[gateway]) + self.plant.gateway_seconds
        self.gateways[gateway] = began
        self.gateway_seconds += self.plant.gateway_seconds
        return began

    def _choose(self, conversation: int) -> int:
        """`affinity.ranked` for one prefix, that one replica has."""
        count = len(self.replicas)
        probed = range(count) if count <= _PROBED else [self.random.randrange(count) for _ in range(_PROBED)]
        least = min(probed, key=lambda one: self.replicas[one].load)
        holder = self.holders.get(conversation)
        if not self.plant.affine or holder is None:
            return least
        return holder if self.replicas[holder].load <= self.replicas[least].load + self.plant.slack else least

    def _arrive(self, arrival: float, now: float) -> None:
        figures, plant = self.figures, self.plant
        figures.arrived += 1
        self.now = max(self.now, now)
        conversation = self.random.randrange(plant.conversations)
        index = self._choose(conversation)
        replica = self.replicas[index]
        if replica.load >= plant.rows + plant.max_queue:
            figures.refused += 1
            return
        self.holders[conversation] = index
        replica.waiting.append((arrival, conversation))
        figures.most_at_once = max(figures.most_at_once, replica.load)
        self._start(index, now)

    def _start(self, index: int, now: float) -> None:
        replica, plant = self.replicas[index], self.plant
        while replica.waiting and replica.running < plant.rows:
            arrival, conversation = replica.waiting.popleft()
            self.figures.waits.append(now - arrival)
            known = conversation in replica.held
            self.figures.known += known
            replica.held[conversation] = None
            replica.held.move_to_end(conversation)
            while len(replica.held) > plant.kept:
                replica.held.popitem(last=False)
            replica.running += 1
            seconds = plant.prefill_seconds * (1 - plant.shared * known)
            seconds += self.random.expovariate(1 / plant.decode_seconds) * (1 + plant.slowdown * (replica.running - 1))
            self.row_seconds += seconds
            heapq.heappush(self.ends, (now + seconds, index))

    def _end(self, at: float, index: int) -> None:
        self.now = max(self.now, at)
        self.replicas[index].running -= 1
        self.figures.answered += 1
        self._start(index, at)


def simulate(plant: Plant, rate: float, requests: int, seed: int = 0) -> Figures:
    """Let requests arrive, and answer them.

    Args:
        plant: what answers.
        rate: requests a second; more than 0.
        requests: how many arrive.
        seed: of all randomness.
    """
    return _Run(plant, rate, seed).run(requests)

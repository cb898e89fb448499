"""A race without models: speeds are given, and time passes as they say."""

from __future__ import annotations

from dataclasses import dataclass, field

from foretoken.tune import TunePlan
from foretoken.tune.candidates import PLAIN
from foretoken.workloads import Item, Prompt


@dataclass
class Track:
    """What `Meter` and the clock would say."""

    speeds: dict
    """Of each drafter: times plain decoding, or what it fails with; by settings where these matter."""
    trees_of: tuple = ()
    models_of: tuple = ()
    seconds: float = 1.0
    """Of a text, by plain decoding."""
    drift: float = 0.0
    """How much slower the machine is after each text."""
    now: float = 0.0
    calls: list = field(default_factory=list)
    stop_after: int | None = None
    grown: tuple = ()
    """Drafters of chains that can grow trees."""
    measured: list = field(default_factory=list)
    rates: dict = field(default_factory=dict)

    def trees(self, drafter):
        found = self.speeds.get(drafter)
        if isinstance(found, Exception):
            raise found
        return drafter in self.trees_of

    def heavy(self, drafter):
        return any(part in self.models_of for part in drafter.split(","))

    def grows(self, drafter):
        return drafter in self.grown

    def measure(self, drafter, turns):
        assert all(turn.temperature > 0 for turn in turns)
        self.measured.append(drafter)
        return [[0.5, 0.25], [0.25, 0.125]]

    def use(self, drafter, rates):
        self.rates[drafter] = rates

    def run(self, candidate, turn):
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((candidate, turn))
        speed = 1.0 if candidate == PLAIN else self.speeds.get(candidate, self.speeds.get(candidate.drafter, 1.0))
        if isinstance(speed, Exception):
            raise speed
        seconds = self.seconds / speed * (1 + self.drift * len(self.calls))
        self.now += seconds
        return {"tokens": 64, "rounds": 32, "drafted": 96, "accepted": 32, "seconds": seconds, "drafting": seconds / 4}


def plan(drafters, seconds=1e9, temperatures=(0.0, 1.0), kinds=4, prompts=16):
    items = [Prompt(Item(str(number), str(number % kinds), "text"), (1, 2)) for number in range(prompts)]
    about = {"target": None, "fingerprint": {}, "machine": {}}
    return TunePlan(tuple(drafters), tuple(items), temperatures, 64, seconds, about)

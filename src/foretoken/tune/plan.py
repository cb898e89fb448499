"""The plan of a search: what is measured, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken.workloads import Prompt, fingerprint

SHARES = (0.35, 0.75, 1.0)
"""By which parts of the time each rung is over."""
_PASSES = (1, 2, 4)  # how many times each rung goes through the kinds of prompts
_FEWEST = 4  # prompts of the first rung


@dataclass(frozen=True)
class Turn:
    """A prompt that all contenders continue, one after another.

    Attributes:
        rung: of the race, from 0.
        number: within the rung.
        prompt: what is continued.
        temperature: 0 is greedy.
    """

    rung: int
    number: int
    prompt: Prompt
    temperature: float

    @property
    def seed(self) -> int:
        """Of the output."""
        return 1000 * self.rung + self.number


@dataclass(frozen=True)
class TunePlan:
    """A race.

    Attributes:
        drafters: what is tried, in words that `Engine` takes.
        prompts: of all kinds in turns.
        temperatures: each prompt is continued at each.
        max_new_tokens: of every output; end tokens don't end it.
        seconds: that it may all take.
        about: target, its options and machine: what makes measurements comparable.
    """

    drafters: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    temperatures: tuple[float, ...]
    max_new_tokens: int
    seconds: float
    about: Mapping[str, Any] = field(default_factory=dict)

    def turns(self, rung: int) -> list[Turn]:
        """The turns of a rung. Each goes on with the prompts where the one before ended."""
        kinds = max(_FEWEST, len({prompt.item.category for prompt in self.prompts}))
        first = kinds * sum(_PASSES[:rung])
        indices = [(first + index) % len(self.prompts) for index in range(kinds * _PASSES[rung])]
        pairs = [(self.prompts[index], temperature) for index in indices for temperature in self.temperatures]
        return [Turn(rung, number, *pair) for number, pair in enumerate(pairs)]

    def settings(self) -> dict[str, Any]:
        """What measurements must have in common to be put together: all but the time."""
        return {
            **self.about,
            "drafters": list(self.drafters),
            "prompts": fingerprint(self.prompts),
            "temperatures": list(self.temperatures),
            "max_new_tokens": self.max_new_tokens,
        }

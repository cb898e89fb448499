"""Assumed costs of a cascade's models, by the bytes of their weights.

They are used before anything is measured, and for reproducible requests, where no clock may be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from foretoken.drafters.base import Drafter
from foretoken.limits import Limits
from foretoken.models.base import LanguageModel
from foretoken.policy.costs import ASKED_SECONDS, CALLED_SECONDS, ROUND_SECONDS, Costs, plain_passes

_STEP = 0.15
"""Target passes that a drafter with weights is assumed to take for a token where their size is not known."""


@dataclass(frozen=True)
class Assumed:
    """Assumed costs of a target and its drafters, in passes of the target.

    Attributes:
        steps: of each drafter, cost of a draft token.
        position: as for `Costs.by_bytes`.
        besides: further costs, see `besides_of`.
        passes: how many plain passes of a single row go together in one round.
    """

    steps: Sequence[float]
    position: float | None = None
    besides: dict[str, float] = field(default_factory=dict)
    passes: int = 1

    @classmethod
    def of(
        cls,
        drafters: Sequence[Drafter],
        given: Sequence[float] | None,
        target: LanguageModel | None,
        *,
        together: bool,
    ) -> Assumed:
        """What is assumed of these drafters.

        Args:
            drafters: of the cascade.
            given: what each takes for a draft token, if the user has said so; else None.
            target: None if there is none yet.
            together: plain passes may go together, since no drafter has to observe each of them.
        """
        steps = given or [_STEP if drafter.models or drafter.hidden_layers else 0.0 for drafter in drafters]
        if target is None:
            return cls(steps)
        seconds = target.assumed_seconds
        if not seconds:
            return cls(steps, target.position_share)
        if given is None:
            own = [sum(model.assumed_seconds for model in drafter.models) for drafter in drafters]
            steps = [each / seconds or step for each, step in zip(own, steps, strict=True)]
        passes = passes_together(target) if together else 1
        return cls(steps, target.position_share, besides_of(target, passes, given=given is not None), passes)

    def fixed(self) -> Costs:
        """Costs for reproducible requests."""
        return Costs.by_bytes(1.0, self.steps, self.position, **self.besides)

    def first(self) -> Costs:
        """Costs for other requests, until they are measured."""
        return Costs.by_bytes(1.0, self.steps, self.position, calling=self.besides.get("calling", 0.0))


def passes_together(target: LanguageModel, rows: int = 1, most: int = Limits.plain_passes) -> int:
    """How many plain passes over so many rows go together in one round: up to `most`, if the target and time allow it.

    The policy uses the default limit of engines, not an engine's own: outputs with a seed may depend on it.
    """
    if most == 1 or not target.commits_late:
        return 1
    return plain_passes(target.assumed_seconds, target.position_share, rows, most)


def besides_of(target: LanguageModel, passes: int, *, given: bool) -> dict[str, float]:
    """Assumed costs of drafting besides passes, as arguments of `Costs.by_bytes`, in passes of the target.

    Args:
        target: a model with `assumed_seconds`.
        passes: plain passes that go together.
        given: the drafters' costs were given by the user.
    """
    seconds = {
        "asking": ASKED_SECONDS,
        "calling": 0.0 if given else CALLED_SECONDS,
        "rounds": min(ROUND_SECONDS, 2.0 * target.assumed_seconds) * (1.0 - 1.0 / passes),
    }
    return {name: each / target.assumed_seconds for name, each in seconds.items()}

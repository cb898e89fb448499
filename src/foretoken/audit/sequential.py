"""When to stop, and what to say: one error level for the whole audit, whatever it looks at and however often."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from foretoken.audit.errors import AuditError
from foretoken.audit.evidence import Evidence, Finding

AuditVerdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]


@dataclass(frozen=True, kw_only=True)
class AuditPlan:
    """What is fixed before the first sample is drawn.

    Attributes:
        level: probability, at most, that a lossless subject fails.
        tv: total variation distance that must not go unnoticed.
        power: probability of noticing it, in the worst case.
        max_seconds: wall-clock time after which the audit gives up.
        max_samples: samples of a small world, or of a model, after which it gives up.
        seed: of everything random in the audit.

    Raises:
        AuditError: a value out of its range.
    """

    level: float = 0.01
    tv: float = 0.1
    power: float = 0.99
    max_seconds: float = 600.0
    max_samples: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("level", 0.0, 0.5), ("tv", 0.0, 1.0), ("power", 0.5, 1.0)):
            value = getattr(self, name)
            if not low < value < high:
                raise AuditError(f"{name}={value}: must be between {low:g} and {high:g}")
        if self.seed < 0:
            raise AuditError(f"seed={self.seed}: must be 0 or more")
        if not self.max_seconds > 0 or self.max_samples < 1:
            raise AuditError("max_seconds and max_samples must be positive: nothing can be said without a sample")


@dataclass(frozen=True)
class Progress:
    """How far an audit is.

    Attributes:
        scope: what is being looked at.
        fraction: share of the whole, by data that are wanted.
        samples: samples seen so far.
        log10_odds: evidence against the claim, as a decimal logarithm.
        limit: value of `log10_odds` that fails the audit.
        wanted: about how many samples are wanted in all; 0 where that is not known beforehand.
        seconds_left: about how long the rest takes; None as long as nobody knows.
        detectable: about the distance that would be found within the limits of time and samples; None where that is
            not known beforehand.
    """

    scope: str
    fraction: float
    samples: int
    log10_odds: float
    limit: float
    wanted: int = 0
    seconds_left: float | None = None
    detectable: float | None = None


Watcher = Callable[[Progress], None]


@dataclass
class Ledger:
    """All evidence of an audit.

    The audit's e-value is the weighted mean of all pieces of evidence that were *planned*, with equal weights; a piece
    that was never looked at counts as 1. By Ville's inequality a lossless subject's ever exceeds ``1 / level`` with
    probability at most `level`.
    """

    plan: AuditPlan
    planned: int
    evidence: list[Evidence] = field(default_factory=list)
    started: float = field(default_factory=lambda: time.monotonic())
    peak: float = 0.0

    @property
    def limit(self) -> float:
        """log E that fails the audit."""
        return -math.log(self.plan.level)

    @property
    def threshold(self) -> float:
        """log E of a single piece of evidence that fails the audit all by itself."""
        return self.limit + math.log(self.planned)

    @property
    def log_e(self) -> float:
        """Logarithm of the audit's e-value."""
        values = [one.log_e for one in self.evidence]
        top = max([0.0, *values])
        if math.isinf(top):
            return math.inf
        rest = (self.planned - len(values)) * math.exp(-top)
        return top + math.log((sum(math.exp(value - top) for value in values) + rest) / self.planned)

    @property
    def failed(self) -> bool:
        """The claim is refuted: the e-value is, or was when somebody looked, at the limit."""
        self.peak = max(self.peak, self.log_e)
        return self.peak >= self.limit

    @property
    def seconds(self) -> float:
        """Wall-clock time since the audit began."""
        return time.monotonic() - self.started

    @property
    def out_of_time(self) -> bool:
        """The budget is used up."""
        return self.seconds >= self.plan.max_seconds

    def add(self, evidence: Sequence[Evidence]) -> None:
        """Take up pieces of evidence."""
        self.evidence.extend(evidence)
        assert len(self.evidence) <= self.planned

    def findings(self) -> list[Finding]:
        """What every piece that got data came to."""
        found = [one.finding(self.threshold, self.plan.power) for one in self.evidence]
        return [one for one in found if one.samples]

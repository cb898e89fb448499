"""The interface of evidence: it gathers data and measures their evidence against the claim.

Every kind of it is an e-process (see `statistics`): nonnegative, with a mean of at most 1 under the claim at any time.
`cells` counts whole samples, `tokens` judges them token by token; `greedy` is about temperature 0, `pair` about two
samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from foretoken.audit.statistics import GTest


@dataclass(frozen=True)
class Finding:
    """What one piece of evidence came to.

    Attributes:
        name: which it is.
        scope: on what: a world, or a model.
        question: what it tests, for people.
        assumption: what must hold for the answer to mean something.
        log_e: natural logarithm of the e-value; the odds, so to speak, against the claim.
        samples: how much data.
        unit: of what.
        detectable_tv: distance that it would have found with the wanted power, in the worst case.
        observed_tv: distance of what was seen from what was claimed.
        expected_tv: what a lossless subject shows for so much data.
        g_test: the textbook test of fixed size on the same data.
        z: the textbook z-score on the same data.
        plot: what the report draws.
    """

    name: str
    scope: str
    question: str
    assumption: str
    log_e: float
    samples: int
    unit: str
    detectable_tv: float | None = None
    observed_tv: float | None = None
    expected_tv: float | None = None
    g_test: GTest | None = None
    z: float | None = None
    plot: dict[str, Any] = field(default_factory=dict)


class Evidence(Protocol):
    """Something that turns data into an e-value."""

    scope: str

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value so far."""

    def finding(self, threshold: float, power: float) -> Finding:
        """The result; `threshold` and `power` are for the deviation that could have been detected."""

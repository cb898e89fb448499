"""How many replicas there are: a fixed number, or as many as the load needs within limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.errors import ParameterError

AUTO = "auto"
_MOST = 10_000


@dataclass(frozen=True)
class ReplicaRange:
    """Fewest and most replicas.

    Attributes:
        low: at least 1.
        high: at least `low`; equal to it where the number is fixed.
    """

    low: int
    high: int

    @property
    def is_fixed(self) -> bool:
        """Whether the number never changes."""
        return self.low == self.high


def replica_range(text: str, fitting: int) -> ReplicaRange:
    """The range that ``--replicas`` means.

    Args:
        text: a number, ``LOW-HIGH``, or ``auto``: from 1 to as many as fit.
        fitting: replicas for which there are processors.

    Raises:
        ParameterError: it is none of these.
    """
    if text == AUTO:
        return ReplicaRange(1, max(fitting, 1))
    low, dash, high = text.partition("-")
    try:
        found = ReplicaRange(int(low), int(high) if dash else int(low))
    except ValueError:
        raise ParameterError(f"replicas is {text!r}: write a number, LOW-HIGH or auto") from None
    if not (1 <= found.low <= _MOST and 1 <= found.high <= _MOST):
        raise ParameterError(f"replicas is {text!r}: give 1 to {_MOST:,}")
    if found.low > found.high:
        raise ParameterError(f"replicas is {text!r}: give the smaller number first")
    return found


def wanted(ongoing: float, target: float, limits: ReplicaRange) -> int:
    """The replicas that a load asks for: Ray Serve's rule, with its smoothing left out.

    Args:
        ongoing: requests that run or wait, of all replicas.
        target: of them, for each replica.
        limits: fewest and most.
    """
    return min(max(math.ceil(ongoing / target), limits.low), limits.high)

"""Classes of candidates for the next token, and how often candidates of each were right.

A class is made of the candidate's source, the length of the match, its rank, and whether the other source agrees. See
`foretoken.drafters.continuations`.
"""

from __future__ import annotations

from collections.abc import Sequence

SUCCESSORS = 8
"""Successors that are kept of each token."""

BUCKETS = (0, 1, 2, 3, 4, 4, 5, 5, 5, 5)  # class of a match by its length; longer ones are of the last class
LONGEST = 6
_COPIES = 3  # continuations of one context that are candidates

# Shares of candidates that were right, over outputs of the shipped target (maths, code, summarising, retrieval, chat;
# greedy and at temperature 1). Rows: match classes 1 to 6. Columns: the copy is the target's first successor,
# its second, or neither. First where the context had one continuation only, then where it had several.
_ONLY = (
    (0.36, 0.22, 0.21),
    (0.67, 0.38, 0.29),
    (0.74, 0.61, 0.40),
    (0.81, 0.68, 0.40),
    (0.89, 0.74, 0.45),
    (0.98, 0.87, 0.93),
)
_SEVERAL = (
    (0.29, 0.23, 0.10),
    (0.43, 0.38, 0.20),
    (0.49, 0.45, 0.31),
    (0.47, 0.45, 0.17),
    (0.60, 0.50, 0.30),
    (0.93, 0.80, 0.70),
)
_LATER_COPIES = (0.25, 0.13, 0.06)  # of the second and third continuation
_LATER_SUCCESSORS = (0.10, 0.07, 0.04, 0.03, 0.02, 0.015, 0.01, 0.008)
_SUCCESSORS_BESIDE_LONG_MATCH = 0.2  # of the above, beside a match of the last class
_SUCCESSOR_ALONE = 0.3  # the first one, where nothing can be copied

_COPY, _SUCCESSOR = 0, 1


def _class_prior(key: int) -> float:
    """The acceptance rate of a class before anything was measured in this process."""
    source, bucket, rank, several, agreement = _unpack(key)
    if source == _COPY:
        if rank:
            return _LATER_COPIES[agreement]
        return (_SEVERAL if several else _ONLY)[bucket - 1][agreement]
    if bucket == 0:
        return _SUCCESSOR_ALONE / (1 + rank) ** 1.5
    return _LATER_SUCCESSORS[rank] * (_SUCCESSORS_BESIDE_LONG_MATCH if bucket == LONGEST else 1.0)


def _pack(source: int, bucket: int, rank: int, several: bool, agreement: int) -> int:
    return (((bucket * 8 + rank) * 2 + several) * 3 + agreement) * 2 + source


def _unpack(key: int) -> tuple[int, int, int, bool, int]:
    key, source = divmod(key, 2)
    key, agreement = divmod(key, 3)
    key, several = divmod(key, 2)
    bucket, rank = divmod(key, 8)
    return source, bucket, rank, bool(several), agreement


_CLASSES = _pack(1, LONGEST, 7, True, 2) + 1
_PRIOR = tuple(
    min(max(_class_prior(key), 0.001), 0.99) if _unpack(key)[0] or _unpack(key)[1] else 0.0 for key in range(_CLASSES)
)

SUCCESSOR_CLASSES = tuple(
    tuple(_pack(_SUCCESSOR, bucket, rank, False, 0) for rank in range(SUCCESSORS)) for bucket in range(LONGEST + 1)
)

_OF_MATCH = _pack(0, 1, 0, False, 0)  # classes of each class of a match; they stand together
_UNKNOWN = (-1.0,) * _OF_MATCH
_SUCCESSOR_RATES = tuple(slice(keys[0], keys[-1] + 1, keys[1] - keys[0]) for keys in SUCCESSOR_CLASSES)

COPY_CLASSES = tuple(
    tuple(
        tuple(
            tuple(_pack(_COPY, bucket, rank, several, agreement) for agreement in range(3)) for rank in range(_COPIES)
        )
        for several in (False, True)
    )
    for bucket in range(LONGEST + 1)
)
"""By class of the match, whether the context had several continuations, rank, and agreement: 0 and 1 for the first and
the second successor, 2 for neither."""

_KEYS = tuple(
    (
        *SUCCESSOR_CLASSES[bucket],
        *(key for several in COPY_CLASSES[bucket] for rank in several for key in rank if bucket),
    )
    for bucket in range(LONGEST)
)
"""Classes by that of the match, all but the last."""


Candidate = tuple[int, int]
"""A token that may come next, and its class. Hundreds are made in a round: a plain tuple takes a third of the time."""


class AcceptanceRates:
    """How often candidates of each class were right, discounted: the past weighs less the longer ago it is.

    Args:
        parent: rates that these start from, and that learn with them; None for those that come with the package.
        weight: candidates that the parent's rate counts as.
        memory: a candidate's weight falls to 1/e over so many of its class.
    """

    def __init__(self, parent: AcceptanceRates | None = None, *, weight: float = 8.0, memory: float = 200.0) -> None:
        own = [0.0] * _CLASSES, [0.0] * _CLASSES, weight, 1.0 - 1.0 / memory
        self._levels: list[tuple[list[float], list[float], float, float]] = [*(parent._levels if parent else ()), own]
        """From the first parent down to these rates: of each class, candidates that were right, and all; both
        arguments. Loops over them take half the time of calls from one to the next."""
        # A round looks up some fifty rates of which it changes ten: they are kept, and counts tell who changed others.
        self._known = [-1.0] * _CLASSES
        self._judged: list[int] = parent._judged if parent else [0] * (LONGEST + 1)
        self._known_at = [0] * (LONGEST + 1)

    def rate(self, key: int) -> float:
        """The chance that a candidate of this class is the next token, between 0 and 1."""
        rate = _PRIOR[key]
        for right, seen, weight, _ in self._levels:
            rate = (right[key] + weight * rate) / (seen[key] + weight)
        return rate

    def shortest(self, least: float) -> int:
        """Length of the shortest matches behind which a candidate may be right so often, by all but the longest ones.

        Behind those one is always looked for, so that rates that have become low can rise again.
        """
        for bucket, keys in enumerate(_KEYS):
            if any(self.rate(key) >= least for key in keys):
                return BUCKETS.index(bucket)
        return len(BUCKETS)

    def known(self, bucket: int) -> list[float]:
        """Rates by class, those of this class of a match up to date: below 0 where `rate` was not asked yet.

        Who asks then may enter what it says.
        """
        if self._known_at[bucket] != self._judged[bucket]:
            self._known[bucket * _OF_MATCH : (bucket + 1) * _OF_MATCH] = _UNKNOWN
            self._known_at[bucket] = self._judged[bucket]
        return self._known

    def of_successors(self, bucket: int) -> list[float]:
        """`rate` of all successors beside a match of this class, by rank."""
        known = self.known(bucket)
        rates = known[_SUCCESSOR_RATES[bucket]]
        if min(rates) < 0.0:
            for key in SUCCESSOR_CLASSES[bucket]:
                if known[key] < 0.0:
                    known[key] = self.rate(key)
            rates = known[_SUCCESSOR_RATES[bucket]]
        return rates

    def judge(self, candidates: Sequence[Candidate], token: int) -> int:
        """This token was the next one: all candidates that there were for it are right or wrong.

        Args:
            candidates: of one context.
            token: the next one.

        Returns:
            The candidate that was likeliest, of equal ones the highest id; -1 if there was none.
        """
        if not candidates:
            return -1
        bucket = candidates[0][1] // _OF_MATCH
        best, likeliest, known, levels = -1.0, -1, self.known(bucket), self._levels
        for one, key in candidates:
            rate = known[key]
            if rate < 0.0:
                rate = self.rate(key)
            if rate > best or (rate == best and one > likeliest):
                best, likeliest = rate, one
            hit, rate = one == token, _PRIOR[key]
            for right, seen, weight, keep in levels:
                right[key] = good = right[key] * keep + hit
                seen[key] = judged = seen[key] * keep + 1.0
                rate = (good + weight * rate) / (judged + weight)
            known[key] = rate  # as `rate` would say now
        self._judged[bucket] += 1
        self._known_at[bucket] = self._judged[bucket]
        return likeliest

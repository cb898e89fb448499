"""Two samples, and whether they have one distribution: for subjects whose distribution nobody can compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.evidence import Finding

SHARPNESS = (0.25, 0.5, 1.0)
"""Powers of the learned ratio that evidence is averaged over: the lower, the less it trusts what it learned."""

_BATCHES = 24  # of pairs that `_replay` learns from
PRIOR = 2.0
"""Imaginary sightings that a ratio starts with."""


Key = tuple[int, ...]
"""The number of a prompt, and tokens."""


class View:
    """Evidence from one way of looking at a sequence: its first token, its first two, …, or each token by itself.

    What distinguishes the two systems is learned from earlier pairs and tested on later ones (`statistics.swap_log_e`).
    """

    def __init__(self, name: str, scope: str, question: str, length: int, joint: bool) -> None:
        self.name, self.scope, self.question = name, scope, question
        self.length, self._joint = length, joint
        self._first: Counter[Key] = Counter()
        self._second: Counter[Key] = Counter()
        self._logs = np.zeros(len(SHARPNESS))
        self.pairs = 0

    def _keys(self, prompt: int, sequence: Sequence[int]) -> list[Key]:
        if self._joint:
            return [(prompt, *sequence[: self.length])]
        return [(prompt, position, token) for position, token in enumerate(sequence[: self.length])]

    def _ratio(self, prompt: int, sequence: Sequence[int]) -> float:
        keys = self._keys(prompt, sequence)
        return float(sum(np.log((self._first[key] + PRIOR) / (self._second[key] + PRIOR)) for key in keys))

    def add(self, prompt: int, first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> None:
        """Judge pairs by what is known so far, then learn from them."""
        ratios = [(self._ratio(prompt, a), self._ratio(prompt, b)) for a, b in zip(first, second, strict=True)]
        table = np.array(ratios).reshape(-1)
        even = np.arange(0, 2 * len(ratios), 2)
        for i, sharpness in enumerate(SHARPNESS):
            self._logs[i] += st.swap_log_e(even, even + 1, sharpness * table)
        for a, b in zip(first, second, strict=True):
            self._first.update(self._keys(prompt, a))
            self._second.update(self._keys(prompt, b))
        self.pairs += len(ratios)

    @property
    def log_e(self) -> float:
        """See `evidence.Evidence`."""
        return st.log_mean_exp(self._logs)

    def shares(self) -> list[tuple[Key, float, float]]:
        """Outcomes with their share in the one sample and in the other."""
        total = max(self._first.total(), 1), max(self._second.total(), 1)
        keys = sorted(set(self._first) | set(self._second), key=lambda key: -(self._first[key] + self._second[key]))
        return [(key, self._first[key] / total[0], self._second[key] / total[1]) for key in keys]

    def detectable_tv(self, threshold: float, power: float) -> float:
        """Distance that would have been found, by simulation with the shares seen and both samples' sizes."""
        if self.pairs < 50 or not self._joint:
            return 1.0
        p = np.array([(a + b) / 2 for _, a, b in self.shares()])
        p /= p.sum()
        margin = NormalDist().inv_cdf(power)

        def found(distance: float) -> bool:
            rng = np.random.default_rng(0)
            results = []
            for _ in range(12):
                other = st.worst_case(p, distance, rng)
                results.append(_replay(p, other, self.pairs, rng))
            values = np.array(results)
            return bool(values.mean() - margin * values.std() >= threshold)

        if not found(0.5):
            return 1.0
        low, high = 0.0, 0.5
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (low, middle) if found(middle) else (middle, high)
        return high

    def finding(self, threshold: float, power: float) -> Finding:
        """See `evidence.Evidence`."""
        rows = self.shares()
        observed = 0.5 * sum(abs(a - b) for _, a, b in rows)
        p = np.array([(a + b) / 2 for _, a, b in rows])
        expected = float(np.sqrt(2) * st.expected_tv(p / p.sum(), self.pairs)) if rows and self.pairs else None
        plot = {
            "kind": "cells",
            "rows": [
                {
                    "prompt": 0,
                    "label": " ".join(map(str, key[1:])),
                    "expected": b,
                    "observed": a,
                    "sd": float(np.sqrt(max((a + b) * (1 - (a + b) / 2), 0.0) / max(self.pairs, 1))),
                }
                for key, a, b in rows[:20]
            ],
        }
        return Finding(
            self.name,
            self.scope,
            self.question,
            "the sequences of both systems are independent; the reference is lossless",
            self.log_e,
            self.pairs,
            "pairs",
            self.detectable_tv(threshold, power) if self._joint else None,
            observed if self.pairs else None,
            expected,
            None,
            None,
            plot if self._joint and self.length == 1 else {},
        )


def _replay(first: st.Floats, second: st.Floats, pairs: int, rng: np.random.Generator) -> float:
    """log E of a simulated comparison, learned batch by batch."""
    size = len(first)
    counts = np.zeros((2, size))
    logs = np.zeros(len(SHARPNESS))
    for part in np.array_split(np.arange(pairs), _BATCHES):
        a = rng.choice(size, size=len(part), p=first)
        b = rng.choice(size, size=len(part), p=second)
        ratio = np.log((counts[0] + PRIOR) / (counts[1] + PRIOR))
        for i, sharpness in enumerate(SHARPNESS):
            logs[i] += st.swap_log_e(a, b, sharpness * ratio)
        counts[0] += np.bincount(a, minlength=size)
        counts[1] += np.bincount(b, minlength=size)
    return st.log_mean_exp(logs)


def views(scope: str, num_tokens: int) -> list[View]:
    """The usual four."""
    return [
        View("two samples", scope, "Do both systems begin sequences with the same tokens, as often?", 1, True),
        View(
            "two samples, 2 tokens",
            scope,
            "Do both write the same first two tokens, as often?",
            min(2, num_tokens),
            True,
        ),
        View("two samples, 3 tokens", scope, "Do both write the same first three tokens?", min(3, num_tokens), True),
        View("two samples, positions", scope, "Do both write the same tokens at each position?", num_tokens, False),
    ]

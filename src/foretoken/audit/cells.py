"""Evidence from small worlds: how often each of all possible sequences was written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.evidence import Finding
from foretoken.audit.statistics import Floats, GTest, Ints

_GROUPS = 10  # of sequences, in `drafter_cells`
FEW = 16
"""Most cells that a plot shows all of."""


class SequenceCounts:
    """How often each of the possible first sequences was seen: the data of a small world.

    Args:
        probs: for each prompt, the joint distribution of the first `depth` tokens, ``[V ** depth]``.
        vocab_size: V.
        depth: tokens.
    """

    def __init__(self, probs: Sequence[Floats], vocab_size: int, depth: int) -> None:
        self.probs, self.vocab_size, self.depth = list(probs), vocab_size, depth
        self.counts = [np.zeros(len(p), dtype=np.int64) for p in probs]

    def add(self, prompt: int, tokens: Ints) -> None:
        """Count sequences ``[n, depth]`` after prompt number `prompt`."""
        cells = np.zeros(len(tokens), dtype=np.int64)
        for column in tokens.T:
            cells = cells * self.vocab_size + column
        self.counts[prompt] += np.bincount(cells, minlength=len(self.counts[prompt]))

    @property
    def total(self) -> int:
        """Sequences seen."""
        return int(sum(counts.sum() for counts in self.counts))


class Cells:
    """G-test evidence on a grouping of sequences into cells.

    Args:
        observed: the counts of sequences.
        groups: for each prompt, the cell of each sequence, ``[V ** depth]``.
        name, scope, question: see `Finding`.
        labels: names of the cells, for the plot.
        note: what the plot shows.
    """

    def __init__(
        self,
        observed: SequenceCounts,
        groups: Sequence[Ints],
        name: str,
        scope: str,
        question: str,
        labels: Sequence[str] = (),
        note: str = "",
    ) -> None:
        self.observed, self.groups, self.note = observed, groups, note
        self.name, self.scope, self.question, self.labels = name, scope, question, labels

    def strata(self) -> list[tuple[Ints, Floats]]:
        """For each prompt, counts and distribution of the cells."""
        result = []
        for counts, p, group in zip(self.observed.counts, self.observed.probs, self.groups, strict=True):
            size = int(group.max()) + 1
            grouped = np.bincount(group, weights=counts, minlength=size).astype(np.int64)
            mass = np.bincount(group, weights=p, minlength=size)
            result.append((grouped, mass / mass.sum()))
        return result

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(np.sum([st.dirichlet_log_e(n, p) for n, p in self.strata()], axis=0))

    def detectable_tv(self, threshold: float, power: float) -> float:
        """Distance that would have been found."""
        return st.detectable_tv([(p, int(n.sum())) for n, p in self.strata()], threshold, power)

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        strata = self.strata()
        total = max(sum(int(n.sum()) for n, _ in strata), 1)
        weights = [int(n.sum()) / total for n, _ in strata]
        tests = [st.g_test(n, p) for n, p in strata]
        g, df = sum(test.g for test in tests), sum(test.df for test in tests)
        return Finding(
            self.name,
            self.scope,
            self.question,
            "the sequences are independent, and the claimed distribution is that of the target run plainly in float64",
            self.log_e,
            self.observed.total,
            "sequences",
            self.detectable_tv(threshold, power),
            sum(w * st.total_variation(n, p) for w, (n, p) in zip(weights, strata, strict=True)),
            sum(w * st.expected_tv(p, int(n.sum())) for w, (n, p) in zip(weights, strata, strict=True)),
            GTest(g, df, 0.0 if math.isinf(g) else st.chi2_sf(g, df)),
            None,
            self._plot(strata),
        )

    def _plot(self, strata: Sequence[tuple[Ints, Floats]]) -> dict[str, Any]:
        """All of a few cells in order; of many, the most probable ones, and those with significant deviations."""
        rows: list[dict[str, Any]] = []
        for number, (counts, p) in enumerate(strata):
            total = int(counts.sum())
            if total == 0:
                continue
            spread = np.sqrt(p * (1 - p) / total)
            chosen = list(range(len(p)))
            if len(p) > FEW:
                away = np.abs(counts - total * p) - 6 * np.sqrt(total * p) - 6  # beyond any chance
                far = [int(i) for i in np.argsort(-away)[:8] if away[i] > 0]
                likely = [int(i) for i in np.argsort(-p)[: 20 - len(far)]]
                chosen = sorted({*likely, *far}, key=lambda i: -p[i])
            for i in chosen:
                if p[i] > 0 or counts[i] > 0:
                    label = self.labels[i] if i < len(self.labels) else str(i)
                    rows.append(
                        {
                            "prompt": number,
                            "label": label,
                            "expected": float(p[i]),
                            "observed": float(counts[i] / total),
                            "sd": float(spread[i]),
                        }
                    )
        return {"kind": "cells", "rows": rows, "note": self.note}


class Positions:
    """The distribution of each of the first tokens by itself: where in the first round a deviation sits."""

    def __init__(self, observed: SequenceCounts, scope: str, speculative: int) -> None:
        self.scope = scope
        self._speculative = speculative
        size, depth = observed.vocab_size, observed.depth
        cells = np.arange(size**depth)
        self.parts = [
            Cells(observed, [cells // size ** (depth - 1 - t) % size] * len(observed.probs), "", scope, "")
            for t in range(depth)
        ]
        self.observed = observed

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp([part.log_e for part in self.parts])

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        found = [part.finding(threshold + math.log(len(self.parts)), power) for part in self.parts]
        worst = max(found, key=lambda one: one.log_e)
        rows = []
        for t, one in enumerate(found):
            kind = "after the draft" if t == self._speculative else f"drafted {t + 1}"
            rows.append(
                {
                    "label": f"token {t + 1}",
                    "note": kind,
                    "observed": one.observed_tv,
                    "expected": one.expected_tv,
                    "log_e": one.log_e,
                }
            )
        return Finding(
            "each position",
            self.scope,
            "Does each of the first tokens, taken alone, have its distribution?",
            worst.assumption,
            self.log_e,
            worst.samples,
            "sequences",
            max(one.detectable_tv or 0.0 for one in found),
            worst.observed_tv,
            worst.expected_tv,
            worst.g_test,
            None,
            {"kind": "positions", "rows": rows, "note": "Distance by position in the first round."},
        )


def joint_cells(observed: SequenceCounts, scope: str) -> Cells:
    """All sequences, each a cell of its own: evidence against every deviation there is."""
    size, depth = observed.vocab_size, observed.depth
    identity = np.arange(size**depth)
    letters = "abcdefghijklmnopqrstuvwxyz"
    labels = [" ".join(letters[i // size ** (depth - 1 - t) % size] for t in range(depth)) for i in identity]
    return Cells(
        observed,
        [identity] * len(observed.probs),
        "joint distribution",
        scope,
        f"Do the first {depth} tokens together have the distribution that was written down for them?",
        labels,
        "Share of sequences after the first prompt: the most probable ones, and any that are far off",
    )


def drafter_cells(observed: SequenceCounts, drafter_probs: Sequence[Floats], scope: str) -> Cells:
    """Sequences grouped by how much likelier the drafter finds them than the target: the direction of most faults."""
    grouped = []
    for p, drafter in zip(observed.probs, drafter_probs, strict=True):
        ratio = np.log(np.maximum(drafter, 1e-300)) - np.log(np.maximum(p, 1e-300))
        order = np.argsort(-np.where(p > 0, ratio, np.inf), kind="stable")
        reached = p[order].cumsum()
        group = np.zeros(len(p), dtype=np.int64)
        group[order] = np.minimum((reached - p[order] / 2) * _GROUPS, _GROUPS - 1).astype(np.int64)
        group[p <= 0] = 0
        _, group = np.unique(group, return_inverse=True)
        grouped.append(group.reshape(-1).astype(np.int64))
    return Cells(
        observed,
        grouped,
        "towards the drafter",
        scope,
        "Are sequences that the drafter likes written more often, or less often, than they should be?",
        [f"group {i + 1}" for i in range(_GROUPS)],
        f"Share of sequences; group 1: what the drafter overrates most, group {_GROUPS}: what it underrates most",
    )

"""Kinds of evidence: each gathers data, and says how strongly these speak against the claim.

All of them are e-processes (see `statistics`): nonnegative, with a mean of at most 1 under the claim at any time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.statistics import Floats, GTest, Ints


@dataclass(frozen=True)
class Finding:
    """What one piece of evidence came to.

    Attributes:
        name: which it is.
        scope: on what: a world, or a model.
        question: what it asks, for people.
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
        """The whole result; `threshold` and `power` are for what could have been found."""


FEW = 16
"""Most cells that a plot shows all of."""


class Texts:
    """How often each of the possible first texts was seen: the data of a small world.

    Args:
        laws: for each prompt, the joint law of the first `depth` tokens, ``[V ** depth]``.
        vocab_size: V.
        depth: tokens.
    """

    def __init__(self, laws: Sequence[Floats], vocab_size: int, depth: int) -> None:
        self.laws, self.vocab_size, self.depth = list(laws), vocab_size, depth
        self.counts = [np.zeros(len(law), dtype=np.int64) for law in laws]

    def add(self, prompt: int, tokens: Ints) -> None:
        """Count texts ``[n, depth]`` after prompt number `prompt`."""
        cells = np.zeros(len(tokens), dtype=np.int64)
        for column in tokens.T:
            cells = cells * self.vocab_size + column
        self.counts[prompt] += np.bincount(cells, minlength=len(self.counts[prompt]))

    @property
    def total(self) -> int:
        """Texts seen."""
        return int(sum(counts.sum() for counts in self.counts))


class Cells:
    """G-test evidence on a grouping of texts into cells.

    Args:
        texts: the data.
        groups: for each prompt, the cell of each text, ``[V ** depth]``.
        name, scope, question: see `Finding`.
        labels: names of the cells, for the plot.
        note: what the plot shows.
    """

    def __init__(
        self,
        texts: Texts,
        groups: Sequence[Ints],
        name: str,
        scope: str,
        question: str,
        labels: Sequence[str] = (),
        note: str = "",
    ) -> None:
        self.texts, self.groups, self.note = texts, groups, note
        self.name, self.scope, self.question, self.labels = name, scope, question, labels

    def strata(self) -> list[tuple[Ints, Floats]]:
        """For each prompt, counts and law of the cells."""
        result = []
        for counts, law, group in zip(self.texts.counts, self.texts.laws, self.groups, strict=True):
            size = int(group.max()) + 1
            grouped = np.bincount(group, weights=counts, minlength=size).astype(np.int64)
            mass = np.bincount(group, weights=law, minlength=size)
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
            "the texts are independent, and the claimed law is that of the target run plainly in float64",
            self.log_e,
            self.texts.total,
            "texts",
            self.detectable_tv(threshold, power),
            sum(w * st.total_variation(n, p) for w, (n, p) in zip(weights, strata, strict=True)),
            sum(w * st.expected_tv(p, int(n.sum())) for w, (n, p) in zip(weights, strata, strict=True)),
            GTest(g, df, 0.0 if math.isinf(g) else st.chi2_sf(g, df)),
            None,
            self._plot(strata),
        )

    def _plot(self, strata: Sequence[tuple[Ints, Floats]]) -> dict[str, Any]:
        """All of a few cells in order; of many, the likeliest, and those too far out to be chance."""
        rows: list[dict[str, Any]] = []
        for number, (counts, law) in enumerate(strata):
            total = int(counts.sum())
            if total == 0:
                continue
            spread = np.sqrt(law * (1 - law) / total)
            chosen = list(range(len(law)))
            if len(law) > FEW:
                away = np.abs(counts - total * law) - 6 * np.sqrt(total * law) - 6  # beyond any chance
                far = [int(i) for i in np.argsort(-away)[:8] if away[i] > 0]
                likely = [int(i) for i in np.argsort(-law)[: 20 - len(far)]]
                chosen = sorted({*likely, *far}, key=lambda i: -law[i])
            for i in chosen:
                if law[i] > 0 or counts[i] > 0:
                    label = self.labels[i] if i < len(self.labels) else str(i)
                    rows.append(
                        {
                            "prompt": number,
                            "label": label,
                            "expected": float(law[i]),
                            "observed": float(counts[i] / total),
                            "sd": float(spread[i]),
                        }
                    )
        return {"kind": "cells", "rows": rows, "note": self.note}


class Positions:
    """The law of each of the first tokens by itself: where in the first round a deviation sits."""

    def __init__(self, texts: Texts, scope: str, speculative: int) -> None:
        self.scope = scope
        self._speculative = speculative
        size, depth = texts.vocab_size, texts.depth
        cells = np.arange(size**depth)
        self.parts = [
            Cells(texts, [cells // size ** (depth - 1 - t) % size] * len(texts.laws), "", scope, "")
            for t in range(depth)
        ]
        self.texts = texts

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
            "Does each of the first tokens, taken alone, have its law?",
            worst.assumption,
            self.log_e,
            worst.samples,
            "texts",
            max(one.detectable_tv or 0.0 for one in found),
            worst.observed_tv,
            worst.expected_tv,
            worst.g_test,
            None,
            {"kind": "positions", "rows": rows, "title": "distance by position in the first round"},
        )


def joint_cells(texts: Texts, scope: str) -> Cells:
    """All texts, each a cell of its own: evidence against every deviation there is."""
    size, depth = texts.vocab_size, texts.depth
    identity = np.arange(size**depth)
    letters = "abcdefghijklmnopqrstuvwxyz"
    labels = [" ".join(letters[i // size ** (depth - 1 - t) % size] for t in range(depth)) for i in identity]
    return Cells(
        texts,
        [identity] * len(texts.laws),
        "joint law",
        scope,
        f"Do the first {depth} tokens together have the law that was written down for them?",
        labels,
        "share of texts after the first prompt: the likeliest ones, and any that are far off",
    )


def drafter_cells(texts: Texts, drafter_laws: Sequence[Floats], scope: str, groups: int = 10) -> Cells:
    """Texts grouped by how much likelier the drafter finds them: few cells, and the direction that most faults have."""
    grouped = []
    for law, drafter in zip(texts.laws, drafter_laws, strict=True):
        ratio = np.log(np.maximum(drafter, 1e-300)) - np.log(np.maximum(law, 1e-300))
        order = np.argsort(-np.where(law > 0, ratio, np.inf), kind="stable")
        reached = law[order].cumsum()
        group = np.zeros(len(law), dtype=np.int64)
        group[order] = np.minimum((reached - law[order] / 2) * groups, groups - 1).astype(np.int64)
        group[law <= 0] = 0
        _, group = np.unique(group, return_inverse=True)
        grouped.append(group.reshape(-1).astype(np.int64))
    return Cells(
        texts,
        grouped,
        "towards the drafter",
        scope,
        "Are texts that the drafter likes written more often, or less often, than they should be?",
        [f"group {i + 1}" for i in range(groups)],
        f"share of texts; group 1: what the drafter overrates most, group {groups}: what it underrates most",
    )


BINS = 20


class Pit:
    """Randomised probability integral transform of tokens, each under its own context."""

    def __init__(self, name: str, scope: str, question: str, note: str = "") -> None:
        self.name, self.scope, self.question, self.note = name, scope, question, note
        self.counts = np.zeros(BINS, dtype=np.int64)
        self._law = np.full(BINS, 1 / BINS)

    def add(self, values: Floats) -> None:
        """Count values in [0, 1)."""
        self.counts += np.bincount((values * BINS).astype(np.int64), minlength=BINS)

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(st.dirichlet_log_e(self.counts, self._law))

    def detectable_tv(self, threshold: float, power: float) -> float:
        """Distance of the transform from uniform that would have been found."""
        return st.detectable_tv([(self._law, int(self.counts.sum()))], threshold, power)

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        total = int(self.counts.sum())
        return Finding(
            self.name,
            self.scope,
            self.question,
            "the law of each token is known from its context; deviations that cancel out over contexts are not seen",
            self.log_e,
            total,
            "tokens",
            self.detectable_tv(threshold, power),
            st.total_variation(self.counts, self._law) if total else None,
            st.expected_tv(self._law, total) if total else None,
            st.g_test(self.counts, self._law),
            None,
            {"kind": "pit", "counts": self.counts.tolist(), "note": self.note},
        )


class LogLikelihood:
    """Whether tokens are as likely, on average, as their laws say."""

    name = "log-likelihood"

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self._tilts = np.zeros(len(st.TILTS))
        self._score, self._variance, self._count = 0.0, 0.0, 0

    def add(self, laws: Floats, tokens: Ints) -> None:
        """Count tokens ``[n]`` under laws ``[n, V]``."""
        self._tilts += st.tilt_log_e(laws, tokens).sum(axis=0)
        score, variance = st.log_likelihood_score(laws, tokens)
        self._score += float(score.sum())
        self._variance += float(variance.sum())
        self._count += len(tokens)

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(self._tilts)

    @property
    def z(self) -> float:
        """Sum of ``log p(x) - E[log p]`` in standard deviations."""
        return self._score / math.sqrt(self._variance) if self._variance else 0.0

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            "Are tokens as likely, on average, as their laws say? (Too likely: too cold, truncated, greedy.)",
            "the law of each token is known from its context",
            self.log_e,
            self._count,
            "tokens",
            z=self.z,
        )


class Offsets:
    """The transform by distance from the beginning of a round.

    The d-th token after a round began has the target's law whatever the rounds after it do, and whichever verifier
    runs: how the next rounds fall is decided after it. Grouping by how a token came about instead (accepted, residual,
    bonus) would not be a test: an accepted token has another law than the target's by design.
    """

    name = "place in the round"

    def __init__(self, scope: str, width: int) -> None:
        self.scope = scope
        self.parts = [Pit("", scope, "") for _ in range(width)]
        self._likelihoods = [LogLikelihood(scope) for _ in range(width)]

    def add(self, rounds: Sequence[int], values: Floats, laws: Floats, tokens: Ints) -> None:
        """Count one text: its rounds, and transform, law and token of each place."""
        starts = np.cumsum([0, *rounds[:-1]])
        for d, (part, likelihood) in enumerate(zip(self.parts, self._likelihoods, strict=True)):
            places = starts + d
            places = places[places < len(values)]
            part.add(values[places])
            likelihood.add(laws[places], tokens[places])

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp([*(one.log_e for one in self.parts), *(one.log_e for one in self._likelihoods)])

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        extra = threshold + math.log(2 * len(self.parts))
        found = [part.finding(extra, power) for part in self.parts]
        rows = [
            {
                "label": f"token {d + 1}",
                "note": f"{one.samples:,} tokens",
                "observed": one.observed_tv,
                "expected": one.expected_tv,
                "log_e": max(one.log_e, likelihood.log_e),
                "z": likelihood.z,
            }
            for d, (one, likelihood) in enumerate(zip(found, self._likelihoods, strict=True))
            if one.samples
        ]
        worst = max(found, key=lambda one: one.log_e)
        return Finding(
            self.name,
            self.scope,
            "Does the d-th token after a round began have its law?",
            worst.assumption,
            self.log_e,
            found[0].samples,
            "rounds",
            None,
            worst.observed_tv,
            worst.expected_tv,
            worst.g_test,
            max((likelihood.z for likelihood in self._likelihoods), key=abs, default=None),
            {"kind": "positions", "rows": rows, "title": "distance by place after a round began"} if rows else {},
        )


class Tokens:
    """Token-by-token evidence on longer texts: transforms, log-likelihood, places in the round.

    Args:
        scope: on what.
        seed: of the randomisation of the transform.
        drafter: the drafter's law is known too: a second transform puts first what the drafter prefers.
        width: places of a round that are told apart; 0 for none.
    """

    def __init__(self, scope: str, seed: int, drafter: bool, width: int) -> None:
        self.likely = Pit(
            "transform",
            scope,
            "Are probable and improbable tokens drawn as often as their laws say?",
            "flat if they are; left: the likeliest tokens of each context, right: the least likely ones",
        )
        self.leaning = (
            Pit(
                "transform, drafter's order",
                scope,
                "Are tokens that the drafter prefers drawn more often, or less often, than their laws say?",
                "flat if not; left: what the drafter overrates most, right: what it underrates most",
            )
            if drafter
            else None
        )
        self.likelihood = LogLikelihood(scope)
        self.offsets = Offsets(scope, width) if width else None
        self.possible = Possible(scope)
        self._rng = np.random.default_rng([seed, 7])

    def add(
        self,
        laws: Floats,
        tokens: Ints,
        drafter_laws: Floats | None = None,
        rounds: Sequence[int] | None = None,
        loose: Floats | None = None,
    ) -> None:
        """Count one text.

        Args:
            laws: ``[T, V]``, the claimed law of each token.
            tokens: ``[T]``.
            drafter_laws: ``[T, V]``.
            rounds: how many tokens each round added.
            loose: ``[T, V]``, laws with limits loosened by more than rounding (`law.probabilities`).
        """
        rows = np.arange(len(tokens))
        good = laws[rows, tokens] > 0
        border = ~good if loose is None else ~good & (loose[rows, tokens] > 0)
        if loose is None:
            border = np.zeros_like(good)
        self.possible.add(len(tokens), int((~good & ~border).sum()), int(border.sum()))
        uniforms = self._rng.random(len(tokens))
        values = st.pit(laws, tokens, np.argsort(-laws, axis=1, kind="stable"), uniforms)
        self.likely.add(values[good])
        self.likelihood.add(laws[good], tokens[good])
        if self.leaning is not None and drafter_laws is not None:
            ratio = np.log(np.maximum(drafter_laws, 1e-300)) - np.log(np.maximum(laws, 1e-300))
            order = np.argsort(-np.where(laws > 0, ratio, -np.inf), axis=1, kind="stable")
            self.leaning.add(st.pit(laws, tokens, order, uniforms)[good])
        if self.offsets is not None and rounds is not None and good.all():
            self.offsets.add(rounds, values, laws, tokens)

    def parts(self) -> list[Evidence]:
        """The pieces of evidence."""
        optional = [self.leaning, self.offsets]
        return [self.possible, self.likely, self.likelihood, *(one for one in optional if one is not None)]


class Possible:
    """Whether tokens were sampled that the claim gives no probability at all."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.tokens, self.impossible, self.borderline = 0, 0, 0

    def add(self, tokens: int, impossible: int, borderline: int) -> None:
        """Count."""
        self.tokens += tokens
        self.impossible += impossible
        self.borderline += borderline

    @property
    def log_e(self) -> float:
        """Infinite as soon as one was seen."""
        return math.inf if self.impossible else 0.0

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            "impossible tokens",
            self.scope,
            "Were tokens sampled that the sampling parameters rule out?",
            "tokens that rounding could let through the filters are not counted",
            self.log_e,
            self.tokens,
            "tokens",
            plot={"kind": "count", "found": self.impossible, "excused": self.borderline},
        )


class Greedy:
    """Whether greedy decoding takes the best token.

    Every token is judged under its own context, so that one tie does not make all that follows an error. A token counts
    as wrong when the best one's logit exceeds its own by more than numerical noise.
    """

    name = "greedy"

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.gaps: list[float] = []
        self.noise = 0.0

    def add(self, gaps: Sequence[float], noise: float) -> None:
        """Count tokens: each one's distance from the best logit, and the noise that is known of so far."""
        self.gaps.extend(gaps)
        self.noise = max(self.noise, noise)

    @property
    def wrong(self) -> int:
        """Tokens that no noise explains."""
        return sum(gap > self.noise for gap in self.gaps)

    @property
    def ties(self) -> int:
        """Tokens that are not the best, within noise."""
        return sum(0 < gap <= self.noise for gap in self.gaps)

    @property
    def log_e(self) -> float:
        """Infinite as soon as one was wrong."""
        return math.inf if self.wrong else 0.0

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            "At temperature 0, is every token the best one?",
            f"logits agree to {self.noise:.2g}, the noise measured on this subject",
            self.log_e,
            len(self.gaps),
            "tokens",
            plot={
                "kind": "count",
                "found": self.wrong,
                "excused": self.ties,
                "worst": max(self.gaps, default=0.0),
                "noise": self.noise,
            },
        )

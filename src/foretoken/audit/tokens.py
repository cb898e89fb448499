"""Evidence from longer samples: every token judged under its own context."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.evidence import Evidence, Finding
from foretoken.audit.faults import Ends
from foretoken.audit.statistics import Floats, Ints

BINS = 20


class Pit:
    """Randomised probability integral transform of tokens, each under its own context."""

    def __init__(self, name: str, scope: str, question: str, note: str = "") -> None:
        self.name, self.scope, self.question, self.note = name, scope, question, note
        self.counts = np.zeros(BINS, dtype=np.int64)
        self._p = np.full(BINS, 1 / BINS)

    def add(self, values: Floats) -> None:
        """Count values in [0, 1)."""
        self.counts += np.bincount((values * BINS).astype(np.int64), minlength=BINS)

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(st.dirichlet_log_e(self.counts, self._p))

    def detectable_tv(self, threshold: float, power: float) -> float:
        """Distance of the transform from uniform that would have been found."""
        return st.detectable_tv([(self._p, int(self.counts.sum()))], threshold, power)

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        total = int(self.counts.sum())
        return Finding(
            self.name,
            self.scope,
            self.question,
            "the distribution of each token is known from its context; deviations that cancel out over contexts "
            "are not seen",
            self.log_e,
            total,
            "tokens",
            self.detectable_tv(threshold, power),
            st.total_variation(self.counts, self._p) if total else None,
            st.expected_tv(self._p, total) if total else None,
            st.g_test(self.counts, self._p),
            None,
            {"kind": "pit", "counts": self.counts.tolist(), "note": self.note},
        )


class LogLikelihood:
    """Whether tokens are as likely, on average, as their distributions say."""

    name = "log-likelihood"

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self._tilts = np.zeros(len(st.TILTS))
        self._score, self._variance, self._count = 0.0, 0.0, 0

    def add(self, probs: Floats, tokens: Ints) -> None:
        """Count tokens ``[n]`` under distributions ``[n, V]``."""
        self._tilts += st.tilt_log_e(probs, tokens).sum(axis=0)
        score, variance = st.log_likelihood_score(probs, tokens)
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
            "Are tokens as likely, on average, as their distributions say? (Too likely: too cold, truncated, greedy.)",
            "the distribution of each token is known from its context",
            self.log_e,
            self._count,
            "tokens",
            z=self.z,
        )


class Offsets:
    """The transform by distance from the beginning of a round.

    The d-th token after a round began has the target's distribution whatever the rounds after it do, and whichever
    verifier runs: how the next rounds fall is decided after it. Grouping by how a token came about instead (accepted,
    residual, bonus) would not be a test: an accepted token has another distribution than the target's by design.
    """

    name = "position in the round"

    def __init__(self, scope: str, width: int) -> None:
        self.scope = scope
        self.parts = [Pit("", scope, "") for _ in range(width)]
        self._likelihoods = [LogLikelihood(scope) for _ in range(width)]

    def add(self, rounds: Sequence[int], values: Floats, probs: Floats, tokens: Ints) -> None:
        """Count one sample: its rounds, and transform, distribution and token of each position."""
        starts = np.cumsum([0, *rounds[:-1]])
        for d, (part, likelihood) in enumerate(zip(self.parts, self._likelihoods, strict=True)):
            positions = starts + d
            positions = positions[positions < len(values)]
            part.add(values[positions])
            likelihood.add(probs[positions], tokens[positions])

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
            "Does the d-th token after a round began have its distribution?",
            worst.assumption,
            self.log_e,
            found[0].samples,
            "rounds",
            None,
            worst.observed_tv,
            worst.expected_tv,
            worst.g_test,
            max((likelihood.z for likelihood in self._likelihoods), key=abs, default=None),
            {"kind": "positions", "rows": rows, "note": "Distance by position after a round began."} if rows else {},
        )


class Tokens:
    """Token-by-token evidence on longer samples: transforms, log-likelihood, positions in the round.

    Args:
        scope: on what.
        seed: of the randomisation of the transform.
        drafter: the drafter's distribution is known too: a second transform puts first what the drafter prefers.
        width: positions of a round that are counted separately; 0 for none.
        ends: the tokens that end an output.
    """

    def __init__(self, scope: str, seed: int, drafter: bool, width: int, ends: Sequence[int] = ()) -> None:
        self.likely = Pit(
            "transform",
            scope,
            "Are probable and improbable tokens drawn as often as their distributions say?",
            "Flat if they are; left: the most probable tokens of each context, right: the least probable ones",
        )
        self.leaning = (
            Pit(
                "drafter's order",
                scope,
                "Are tokens that the drafter prefers drawn more often, or less often, than their distributions say?",
                "Flat if not; left: what the drafter overrates most, right: what it underrates most",
            )
            if drafter
            else None
        )
        self.likelihood = LogLikelihood(scope)
        self.offsets = Offsets(scope, width) if width else None
        self.possible = Possible(scope)
        self.ends = Ends(ends) if ends else None
        self.largest_rest = 0.0
        """Over all tokens, the largest probability of any but the most probable one."""
        self._rng = np.random.default_rng([seed, 7])

    def add(
        self,
        probs: Floats,
        tokens: Ints,
        drafter_probs: Floats | None = None,
        rounds: Sequence[int] | None = None,
        loose: Floats | None = None,
    ) -> None:
        """Count one sample.

        Args:
            probs: ``[T, V]``, the claimed distribution of each token.
            tokens: ``[T]``.
            drafter_probs: ``[T, V]``.
            rounds: how many tokens each round added.
            loose: ``[T, V]``, distributions with limits loosened by more than rounding (`reference.probabilities`).
        """
        rows = np.arange(len(tokens))
        self.largest_rest = max(self.largest_rest, 1.0 - float(probs.max(axis=1).min()))
        good = probs[rows, tokens] > 0
        border = ~good if loose is None else ~good & (loose[rows, tokens] > 0)
        if loose is None:
            border = np.zeros_like(good)
        self.possible.add(len(tokens), int((~good & ~border).sum()), int(border.sum()))
        uniforms = self._rng.random(len(tokens))
        values = st.pit(probs, tokens, np.argsort(-probs, axis=1, kind="stable"), uniforms)
        self.likely.add(values[good])
        self.likelihood.add(probs[good], tokens[good])
        if self.ends is not None:
            self.ends.add(probs[good], tokens[good])
        if self.leaning is not None and drafter_probs is not None:
            ratio = np.log(np.maximum(drafter_probs, 1e-300)) - np.log(np.maximum(probs, 1e-300))
            order = np.argsort(-np.where(probs > 0, ratio, -np.inf), axis=1, kind="stable")
            self.leaning.add(st.pit(probs, tokens, order, uniforms)[good])
        if self.offsets is not None and rounds is not None and good.all():
            self.offsets.add(rounds, values, probs, tokens)

    def parts(self) -> list[Evidence]:
        """The pieces of evidence."""
        optional = [self.leaning, self.offsets, self.ends]
        return [self.possible, self.likely, self.likelihood, *(one for one in optional if one is not None)]


class Possible:
    """Whether tokens were sampled that the claim gives no probability at all."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.tokens, self.impossible, self.borderline = 0, 0, 0

    def add(self, tokens: int, impossible: int, borderline: int) -> None:
        """Add the counts of one more output."""
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

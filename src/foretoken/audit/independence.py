"""Whether outputs that were asked for with different seeds are independent of one another, and of the seeds' values.

Every token is turned into a number that is uniform on [0, 1) and independent of all others under the claim
(`statistics.pit`, each token under its own context). So any two of them, chosen without looking at the later one, are
independent: within an output, between outputs of a batch, between calls, between calls with neighbouring seeds.

A subject may well give equal outputs where it is asked twice with one seed. The audit never does that: the seeds of a
request differ (`SampleRequest.seeds`), and so do those of requests but for an accident of probability 2^-31.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.evidence import Finding
from foretoken.audit.statistics import Floats, Ints

CELLS = 5
"""Intervals of [0, 1) that the members of a pair are sorted into."""

SCOPE = "outputs among one another"


class Pairs:
    """Evidence that the second member of pairs depends on the first.

    Under the claim the cell of the second is uniform given the first and everything before. So, for each cell of the
    first, the Dirichlet mixture over the uniform distribution (`statistics.dirichlet_log_e`) is a product of ratios of
    predictive probabilities, each of mean 1 given the past: a test martingale, whichever pairs overlap, as long as each
    number is the second of one pair at most and comes after its first. The sum over cells of the first is the same
    product with its factors sorted, and the mean over ways of pairing a mean of martingales.

    Args:
        name, question: see `Finding`.
        ways: of pairing that are told apart.
    """

    def __init__(self, name: str, question: str, ways: int) -> None:
        self.name, self.question, self.scope = name, question, SCOPE
        self.counts = np.zeros((ways, CELLS, CELLS), dtype=np.int64)
        self._p = np.full(CELLS, 1 / CELLS)

    def add(self, way: int, first: Ints, second: Ints) -> None:
        """Count pairs of cells, of any equal shape."""
        index = (first * CELLS + second).reshape(-1)
        self.counts[way] += np.bincount(index, minlength=CELLS * CELLS).reshape(CELLS, CELLS)

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(st.dirichlet_log_e(self.counts, self._p).sum(axis=1))

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`; distances are those of the way of pairing with the largest."""
        each = st.log_mean_exp_rows(st.dirichlet_log_e(self.counts, self._p).sum(axis=1))
        worst = self.counts[int(np.argmax(each))].reshape(-1)
        total = int(worst.sum())
        uniform = np.full(CELLS * CELLS, 1 / CELLS**2)
        return Finding(
            self.name,
            self.scope,
            self.question,
            "each output was asked for with a seed of its own",
            self.log_e,
            total,
            "pairs",
            None,
            st.total_variation(worst, uniform) if total else None,
            st.expected_tv(uniform, total) if total else None,
        )


MODULI = (2, 8)
"""Seeds are sorted by their remainder."""


class BySeed:
    """Evidence that outputs have another distribution where the seed has a certain remainder.

    Given the seeds, tokens' transforms are uniform and independent: one Dirichlet mixture for each remainder, added up
    over remainders as over independent strata.
    """

    name = "by the seed's value"
    scope = SCOPE

    def __init__(self) -> None:
        # Of the seed of a request, and of a sample: which of them a subject uses is its own affair.
        self._counts = [np.zeros((modulus, CELLS * 2), dtype=np.int64) for modulus in MODULI * 2]

    def add(self, request_seed: int, seeds: Sequence[int], values: Floats) -> None:
        """Count transforms ``[n, T]`` of outputs of a request."""
        bins = (values * (CELLS * 2)).astype(np.int64)
        for i, counts in enumerate(self._counts):
            keys = np.full(len(bins), request_seed) if i < len(MODULI) else np.asarray(seeds[: len(bins)])
            index = (keys % len(counts))[:, None] * (CELLS * 2) + bins
            counts += np.bincount(index.reshape(-1), minlength=counts.size).reshape(counts.shape)

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        p = np.full(CELLS * 2, 1 / (CELLS * 2))
        return st.log_mean_exp([st.log_mean_exp(st.dirichlet_log_e(n, p).sum(axis=0)) for n in self._counts])

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            "Do even and odd seeds, and those of every remainder by 8, give the same distribution?",
            "each output was asked for with a seed of its own",
            self.log_e,
            int(self._counts[0].sum()),
            "tokens",
        )


class Independence:
    """The evidence about outputs among one another, gathered over all parts of an audit.

    Args:
        seed: of the randomisation of the transforms.
    """

    LAGS = 3
    """Distances of tokens of one output that are compared."""

    def __init__(self, seed: int) -> None:
        self.within = Pairs("within an output", "Are the tokens of an output drawn independently?", 2 * self.LAGS)
        self.batch = Pairs("within a batch", "Are outputs of one request independent (not equal, nor opposite)?", 6)
        self.calls = Pairs("between calls", "Are outputs of successive requests independent?", 2)
        self.neighbours = Pairs("neighbouring seeds", "Are outputs of neighbouring seeds independent?", 2)
        self.by_seed = BySeed()
        self._rng = np.random.default_rng([seed, 19])
        self._last: Ints | None = None

    def parts(self) -> list[Pairs | BySeed]:
        """The pieces of evidence."""
        return [self.within, self.batch, self.calls, self.neighbours, self.by_seed]

    def transform(self, probs: Floats, tokens: Ints) -> Floats:
        """Transforms of tokens ``[m]`` under distributions ``[m, V]``, ``[2, m]``: by id, and by falling probability.

        A token of probability 0 has none; it is counted as impossible elsewhere, and gets any number here.
        """
        uniforms = self._rng.random(len(tokens))
        orders = (np.broadcast_to(np.arange(probs.shape[1]), probs.shape), np.argsort(-probs, axis=1, kind="stable"))
        return np.stack([st.pit(probs, tokens, order, uniforms) for order in orders])

    def add(self, request_seed: int, seeds: Sequence[int], values: Floats, *, neighbour: bool = False) -> None:
        """Take up the outputs of one call to the subject.

        Outputs of several lengths are cut to the shortest one: whether a token counts is then decided by tokens at
        earlier positions, so that the martingales go on, position by position.

        Args:
            request_seed: of the call.
            seeds: of each output.
            values: ``[2, n, T]`` from `transform`.
            neighbour: the seeds are those of the last call, plus 1.
        """
        self.by_seed.add(request_seed, seeds, values[0])
        cells = (values * CELLS).astype(np.int64)
        rows, length = cells.shape[1:]
        half = rows // 2
        for i, now in enumerate(cells):
            for lag in range(1, min(self.LAGS, length - 1) + 1):
                self.within.add(i * self.LAGS + lag - 1, now[:, :-lag], now[:, lag:])
            self.batch.add(3 * i, now[:-1], now[1:])
            self.batch.add(3 * i + 1, now[:half], now[half : 2 * half])
            self.batch.add(3 * i + 2, now[:half], now[::-1][:half])
            if self._last is not None:
                earlier = self._last[i]
                n, t = min(len(earlier), rows), min(earlier.shape[1], length)
                (self.neighbours if neighbour else self.calls).add(i, earlier[:n, :t], now[:n, :t])
        self._last = cells

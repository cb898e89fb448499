"""The tests themselves, as pure functions of counts and probabilities, in float64.

Evidence is measured by *e-values*: a statistic E >= 0 whose mean is at most 1 if the subject is lossless. E is a
likelihood ratio, so it multiplies over independent data, and Ville's inequality says that a lossless subject ever
reaches E >= 1/a, at whatever time one looks, with probability at most a. So an audit may look after every sample and
stop when it likes. The mean of several e-values is one again: that is the correction over all tests.
(Vovk and Wang 2021, "E-values", arXiv 1912.06116; Ramdas et al. 2023, arXiv 2210.01948.)

Everything is a natural logarithm, "log E". p-values of the familiar fixed-size tests are computed beside them, for the
reader; no decision rests on those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TILTS = (-0.8, -0.4, -0.2, -0.1, -0.05, 0.05, 0.1, 0.2, 0.4, 0.8)
"""Exponents of `tilt_log_e`: the distribution p^(1 + tilt), as a temperature of 1 / (1 + tilt) would make it."""

DISTANCES = (0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
"""Total variation distances that `concentrations` spreads its prior over."""

_DATA_SETS = 32  # that `detectable_tv` simulates
EXPECTED = 5.0
"""Smallest expectation of a cell of a G-test; smaller ones are pooled."""


def log_gamma(x: Floats) -> Floats:
    """Logarithm of the gamma function, elementwise."""
    return torch.lgamma(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))).numpy()


def log_mean_exp(x: Sequence[float] | Floats) -> float:
    """``log(mean(exp(x)))``: the logarithm of the mean of e-values given by their logarithms."""
    values = np.asarray(x, dtype=np.float64)
    top = float(values.max())
    if not math.isfinite(top):
        return top
    return top + math.log(float(np.exp(values - top).mean()))


def log_mean_exp_rows(x: Floats) -> Floats:
    """`log_mean_exp` of each row of ``[n, m]``."""
    return np.array([log_mean_exp(row) for row in x])


def chi2_sf(x: float, df: int) -> float:
    """Upper tail of the chi-squared distribution with `df` degrees of freedom."""
    if df <= 0:
        return 1.0
    half = torch.tensor([df / 2, max(x, 0.0) / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def normal_tails(z: float) -> float:
    """Probability that a standard normal is further from 0 than z."""
    return math.erfc(abs(z) / math.sqrt(2))


def concentrations(cells: int) -> Floats:
    """Prior concentrations for `dirichlet_log_e`, one for each of `DISTANCES`.

    A Dirichlet distribution with parameters ``c p`` has a mean chi-squared divergence from p of ``(K - 1)/(c + 1)``,
    and a deviation of total variation d has a divergence of at least ``4 d²`` (Cauchy and Schwarz).
    """
    return np.array([max(cells - 1, 1) / (4 * d * d) for d in DISTANCES])


def dirichlet_log_e(counts: Ints, probs: Floats) -> Floats:
    """Evidence that counts do not come from a known multinomial distribution, against all others at once.

    The likelihood under a Dirichlet mixture of distributions, centred at the claimed one, over that under the claimed
    distribution: a test martingale in the number of samples, exact for any counts, however small.
    (Lindon and Malek 2022, "Anytime-valid inference for multinomial count data", arXiv 2011.03567.)

    Args:
        counts: ``[..., K]``.
        probs: ``[K]``, sums to 1; cells of probability 0 are allowed.

    Returns:
        ``[..., C]`` log E, one for each of `concentrations`; +inf where an impossible cell was seen. They may be added
        up over independent strata; their mean (`log_mean_exp`) is one e-value.
    """
    size = counts.shape[-1]
    flat = counts.reshape(-1, size)
    rows, cells = flat.nonzero()  # only cells that were seen change the ratio
    possible = probs[cells] > 0
    impossible = np.bincount(rows[~possible], minlength=len(flat)) > 0
    rows, cells = rows[possible], cells[possible]
    n, p = flat[rows, cells].astype(np.float64), probs[cells]
    total = flat.sum(-1).astype(np.float64)
    known = n * np.log(p)
    result = []
    for c in concentrations(int((probs > 0).sum())):
        terms = log_gamma(c * p + n) - log_gamma(c * p) - known
        ratio = np.bincount(rows, weights=terms, minlength=len(flat)) + log_gamma(np.array(c)) - log_gamma(c + total)
        result.append(np.where(impossible, np.inf, ratio))
    return np.stack(result, axis=-1).reshape(*counts.shape[:-1], -1)


@dataclass(frozen=True)
class GTest:
    """A likelihood-ratio goodness-of-fit test: ``G = 2 sum O log(O/E)``, chi-squared with `df` for large counts."""

    g: float
    df: int
    p_value: float


def pool(probs: Floats, total: int) -> Ints:
    """A cell number for each outcome, so that every cell expects at least `EXPECTED` of `total` samples.

    Outcomes with a sufficient expected count have a cell of their own; the others share cells, most probable first.
    """
    cells = np.zeros(len(probs), dtype=np.int64)
    order = np.argsort(-probs, kind="stable")
    number, mass = 0, 0.0
    for i in order:
        cells[i] = number
        mass += float(probs[i]) * total
        if mass >= EXPECTED:
            number, mass = number + 1, 0.0
    if mass < EXPECTED and number > 0:
        cells[cells == number] = number - 1
    return cells


def g_test(counts: Ints, probs: Floats) -> GTest:
    """G-test of counts ``[K]`` against a known distribution ``[K]``, small cells pooled.

    Sokal and Rohlf, *Biometry*, ch. 17. With Williams' correction, which brings the small-sample distribution closer
    to chi-squared.
    """
    total = int(counts.sum())
    if total == 0:
        return GTest(0.0, 0, 1.0)
    if counts[probs <= 0].sum() > 0:
        return GTest(math.inf, max(len(probs) - 1, 1), 0.0)
    cells = pool(probs, total)
    size = int(cells.max()) + 1
    observed = np.bincount(cells, weights=counts.astype(np.float64), minlength=size)
    expected = np.bincount(cells, weights=probs, minlength=size) * total
    if size < 2:
        return GTest(0.0, 0, 1.0)
    seen = observed > 0
    g = 2 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    g /= 1 + (float((1 / (expected / total)).sum()) - 1) / (6 * total * (size - 1))
    return GTest(g, size - 1, chi2_sf(g, size - 1))


def total_variation(counts: Ints, probs: Floats) -> float:
    """Total variation distance of the observed shares from a distribution; biased upwards, see `expected_tv`."""
    total = max(int(counts.sum()), 1)
    return 0.5 * float(np.abs(counts / total - probs).sum())


def expected_tv(probs: Floats, total: int) -> float:
    """Mean `total_variation` for `total` samples of the distribution itself (normal approximation of each cell)."""
    if total == 0:
        return 1.0
    spread = np.minimum(np.sqrt(2 / math.pi * probs * (1 - probs) / total), 2 * probs * (1 - probs))
    return 0.5 * float(spread.sum())


def pit(probs: Floats, tokens: Ints, order: Ints, uniforms: Floats) -> Floats:
    """Randomised probability integral transform of tokens, each under its own distribution.

    ``F(x-) + u p(x)``, F the cumulative distribution in the given order: uniform on [0, 1] and independent over tokens
    if each token has its distribution (Smith 1985; Czado, Gneiting and Held 2009).

    Args:
        probs: ``[n, V]``.
        tokens: ``[n]``.
        order: ``[n, V]``, token ids in the order in which F adds them up.
        uniforms: ``[n]`` in [0, 1).
    """
    rows = np.arange(len(tokens))
    sorted_probs = np.take_along_axis(probs, order, axis=1)
    cumulative = sorted_probs.cumsum(axis=1)
    position = (order == tokens[:, None]).argmax(axis=1)
    width = sorted_probs[rows, position]
    return np.clip(cumulative[rows, position] - width + uniforms * width, 0.0, np.nextafter(1.0, 0.0))


def tilt_log_e(probs: Floats, tokens: Ints) -> Floats:
    """Evidence that tokens are likelier, or less likely, than their distributions say.

    The likelihood ratio of ``p^(1+t)`` (normalised) to p: ``t log p(x) - log sum p^(1+t)``, for each t of `TILTS`.

    Args:
        probs: ``[n, V]``.
        tokens: ``[n]``, each of positive probability.

    Returns:
        ``[n, T]`` log-factors; sums over tokens are log e-values, one for each tilt.
    """
    rows = np.arange(len(tokens))
    logs = np.log(np.where(probs > 0, probs, 1.0))
    chosen = logs[rows, tokens]
    norms = [np.log(np.where(probs > 0, np.exp((1 + t) * logs), 0.0).sum(axis=1)) for t in TILTS]
    return np.stack([t * chosen - norm for t, norm in zip(TILTS, norms, strict=True)], axis=1)


def log_likelihood_score(probs: Floats, tokens: Ints) -> tuple[Floats, Floats]:
    """``log p(x) - E[log p]`` of each token, and the variance that p gives it: a martingale difference.

    The sum of the first over the root of the sum of the second is standard normal for many tokens.
    """
    rows = np.arange(len(tokens))
    logs = np.log(np.where(probs > 0, probs, 1.0))
    mean = (probs * logs).sum(axis=1)
    variance = (probs * logs * logs).sum(axis=1) - mean * mean
    return logs[rows, tokens] - mean, np.maximum(variance, 0.0)


def swap_log_e(first: Ints, second: Ints, log_ratio: Floats) -> float:
    """Evidence that paired samples come from two different distributions, whatever these are.

    If both have one distribution, ``(x, y)`` and ``(y, x)`` are equally likely, so that for any positive function r
    fixed beforehand ``2 r(x) / (r(x) + r(y))`` has mean 1. It is large when r is the ratio of the two distributions.

    Args:
        first: ``[n]`` outcomes of the one.
        second: ``[n]`` of the other.
        log_ratio: ``[K]``, log r of each outcome, learned from *earlier* samples only.
    """
    difference = log_ratio[first] - log_ratio[second]
    return float((math.log(2) - np.logaddexp(0.0, -difference)).sum())


def worst_case(probs: Floats, distance: float, rng: np.random.Generator) -> Floats:
    """A distribution at that total variation distance from p that is as hard to distinguish from p as any.

    Half of p's mass, picked at random, grows by the factor ``1 + 2d``, the other half shrinks by ``1 - 2d``: the
    chi-squared divergence is then ``4 d²``, the least that a distance of d can have. A sharp distribution that does not
    split into halves is split as evenly as its outcomes allow.
    """
    order = rng.permutation(len(probs))
    # Largest first into the lighter half: as even a split as a greedy rule makes, random among small outcomes.
    order = order[np.argsort(-np.round(probs[order], 2), kind="stable")]
    up = np.zeros(len(probs), dtype=bool)
    mass = [0.0, 0.0]
    for i in order:
        side = int(mass[1] < mass[0] or (mass[1] == mass[0] and rng.random() < 0.5))
        up[i] = bool(side)
        mass[side] += float(probs[i])
    heavy = probs[up].sum()
    if heavy in (0.0, 1.0):
        return probs
    p = np.where(up, probs * (1 + distance / heavy), probs * (1 - distance / (1 - heavy)))
    p = np.maximum(p, 0.0)
    return p / p.sum()


def detectable_tv(strata: Sequence[tuple[Floats, int]], threshold: float, power: float = 0.99) -> float:
    """Smallest total variation distance that `dirichlet_log_e` finds with the wanted power, in the worst case.

    Simulated: `worst_case` distributions at a trial distance, `_DATA_SETS` of the audit's own size, and the distance
    bisected until the mean log E is enough standard deviations above the threshold.

    Args:
        strata: pairs of a distribution and how many samples of it there are; the evidence is their sum.
        threshold: log E that counts as a finding.
        power: probability of a finding, above 0.5.

    Returns:
        The distance, 1.0 if nothing could be found.
    """
    key = tuple((np.ascontiguousarray(probs[probs > 0]).tobytes(), total) for probs, total in strata if total > 0)
    return _detectable_tv(key, round(threshold, 6), power)


@lru_cache(maxsize=256)
def _detectable_tv(key: tuple[tuple[bytes, int], ...], threshold: float, power: float) -> float:
    strata = [(np.frombuffer(p), total) for p, total in key]
    margin = NormalDist().inv_cdf(power)

    def found(distance: float) -> bool:
        rng = np.random.default_rng(0)
        log_e = np.zeros((_DATA_SETS, len(DISTANCES)))
        for probs, total in strata:
            p = worst_case(probs, distance, rng)
            log_e += dirichlet_log_e(rng.multinomial(total, p, size=_DATA_SETS), probs)
        values = np.array([log_mean_exp(row) for row in log_e])
        return bool(values.mean() - margin * values.std() >= threshold)

    if not strata or not found(0.5):
        return 1.0
    low, high = 0.0, 0.5
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high

"""Every e-value has mean 1 under the claim: checked by enumeration, not by sampling."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import scipy.stats

from foretoken.audit import statistics as st

P = np.array([0.6, 0.25, 0.1, 0.05])


def counts_of(size: int, total: int):
    """All counts, with their multinomial coefficient's logarithm."""
    for counts in product(range(total + 1), repeat=size):
        if sum(counts) == total:
            yield np.array(counts), math.lgamma(total + 1) - sum(math.lgamma(n + 1) for n in counts)


@pytest.mark.parametrize("total", [1, 2, 7])
def test_dirichlet_evidence_has_mean_one(total):
    mean = np.zeros(len(st.DISTANCES))
    for counts, log_ways in counts_of(len(P), total):
        chance = math.exp(log_ways + float(counts @ np.log(P)))
        mean += chance * np.exp(st.dirichlet_log_e(counts, P))
    assert np.abs(mean - 1).max() < 1e-9


def test_dirichlet_evidence_is_a_martingale():
    counts = np.array([3, 2, 0, 1])
    before = st.dirichlet_log_e(counts, P)
    after = sum(P[i] * np.exp(st.dirichlet_log_e(counts + np.eye(4, dtype=int)[i], P)) for i in range(4))
    assert np.abs(after - np.exp(before)).max() < 1e-9


def test_an_impossible_cell_settles_it():
    assert np.isinf(st.dirichlet_log_e(np.array([3, 0, 1]), np.array([0.5, 0.5, 0.0]))).all()


def test_tilts_have_mean_one():
    factors = np.exp(st.tilt_log_e(np.tile(P, (4, 1)), np.arange(4)))
    assert np.abs(P @ factors - 1).max() < 1e-12


def test_swaps_have_mean_one():
    ratio = np.array([0.5, -1.0, 0.0, 2.0])
    mean = sum(
        P[i] * P[j] * math.exp(st.swap_log_e(np.array([i]), np.array([j]), ratio)) for i in range(4) for j in range(4)
    )
    assert abs(mean - 1) < 1e-12


def test_log_likelihood_score_is_centred():
    score, variance = st.log_likelihood_score(np.tile(P, (4, 1)), np.arange(4))
    assert abs(P @ score) < 1e-12
    assert abs(P @ score**2 - variance[0]) < 1e-12


def test_the_transform_is_uniform():
    order = np.tile(np.array([2, 0, 3, 1]), (4, 1))
    low = st.pit(np.tile(P, (4, 1)), np.arange(4), order, np.zeros(4))
    high = st.pit(np.tile(P, (4, 1)), np.arange(4), order, np.full(4, 1 - 1e-12))
    # Each token fills an interval as long as its probability, and together they fill [0, 1].
    assert np.allclose(high - low, P)
    assert np.allclose(np.sort(low), np.r_[0.0, P[[2, 0, 3]].cumsum()])


def test_g_test_agrees_with_scipy():
    counts = np.array([130, 45, 17, 8])
    expected = scipy.stats.power_divergence(counts, P * 200, lambda_="log-likelihood")
    correction = 1 + ((1 / P).sum() - 1) / (6 * 200 * 3)
    assert st.g_test(counts, P).g * correction == pytest.approx(expected.statistic)
    assert st.chi2_sf(expected.statistic, 3) == pytest.approx(expected.pvalue)


def test_pooling_leaves_no_small_cell():
    p = np.r_[0.5, np.full(50, 0.01)]
    cells = st.pool(p, 200)
    assert np.bincount(cells, weights=p).min() * 200 >= st.EXPECTED - 1e-9
    assert st.g_test(np.r_[100, np.full(50, 2)], p).df == cells.max()


@pytest.mark.parametrize("distance", [0.02, 0.1])
def test_the_worst_case_is_where_it_should_be(distance):
    p = np.full(40, 1 / 40)
    other = st.worst_case(p, distance, np.random.default_rng(0))
    assert 0.5 * np.abs(other - p).sum() == pytest.approx(distance)
    assert ((other - p) ** 2 / p).sum() == pytest.approx(4 * distance**2)


def test_detectable_distance_is_detected():
    p = np.full(20, 1 / 20)
    threshold = math.log(1000)
    reach = st.detectable_tv([(p, 3000)], threshold)
    assert 0.05 < reach < 0.15
    assert st.detectable_tv([(p, 12000)], threshold) == pytest.approx(reach / 2, rel=0.2)
    rng = np.random.default_rng(5)
    other = st.worst_case(p, reach, rng)
    found = sum(st.log_mean_exp(st.dirichlet_log_e(rng.multinomial(3000, other), p)) >= threshold for _ in range(300))
    assert found >= 290


def test_looking_often_does_not_make_false_alarms():
    rng = np.random.default_rng(1)
    counts = np.zeros((400, 4), dtype=np.int64)
    peak = np.zeros(400)
    for _ in range(60):
        counts += rng.multinomial(10, P, size=400)
        peak = np.maximum(peak, [st.log_mean_exp(row) for row in st.dirichlet_log_e(counts, P)])
    assert (peak >= math.log(10)).mean() <= 0.1

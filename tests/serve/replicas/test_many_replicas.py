"""The simulation of many replicas, against what queueing theory says, and at its limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.errors import ParameterError
from foretoken.serve.replicas.simulation import Plant, simulate

ONE = Plant(replicas=1, rows=1, max_queue=10**6, prefill_seconds=0.0, decode_seconds=1.0, slowdown=0.0)


def test_one_replica_with_one_row_is_the_m_m_1_queue():
    figures = simulate(ONE, 0.5, 40_000)
    mean = sum(figures.waits) / len(figures.waits)
    assert mean == pytest.approx(0.5 / (1 - 0.5), rel=0.1)  # ρ / (μ - λ)
    assert figures.replica_busy == pytest.approx(0.5, rel=0.05)
    assert (figures.answered, figures.refused, figures.broken) == (40_000, 0, None)


def test_several_rows_are_the_m_m_c_queue():
    figures = simulate(replace(ONE, rows=4), 3.2, 40_000)
    mean = sum(figures.waits) / len(figures.waits)
    assert mean == pytest.approx(0.7455, rel=0.12)  # Erlang C with 4 servers and 3.2 erlang, / (4 - 3.2)


def test_too_many_requests_are_refused_and_none_is_lost():
    plant = replace(ONE, replicas=10, max_queue=2)
    figures = simulate(plant, 30.0, 5_000)
    assert figures.answered + figures.refused == figures.arrived == 5_000
    assert figures.refused > 1_000
    assert figures.broken == "replicas"
    assert figures.most_at_once == 3


def test_gateways_break_first_where_they_are_the_slowest():
    plant = replace(ONE, replicas=1_000, rows=8, gateway_seconds=0.01)
    assert plant.gateway_capacity == 100
    assert simulate(plant, 200.0, 3_000).broken == "gateways"
    assert simulate(replace(plant, gateways=4), 200.0, 3_000).broken is None


def test_prefixes_are_found_where_they_count_and_load_stays_in_balance():
    plant = replace(ONE, replicas=20, rows=4, prefill_seconds=0.5, shared=0.9, kept=20, conversations=200)
    affine, plain = (simulate(replace(plant, affine=affine), 20.0, 4_000) for affine in (True, False))
    assert affine.known > 0.9 * affine.answered
    assert plain.known < 0.5 * plain.answered
    assert affine.most_at_once <= plain.most_at_once + plant.slack
    assert affine.replica_busy < plain.replica_busy


def test_a_batch_slows_its_requests_down():
    slow = simulate(replace(ONE, rows=8, slowdown=0.5), 2.0, 3_000)
    fast = simulate(replace(ONE, rows=8), 2.0, 3_000)
    assert slow.replica_busy > fast.replica_busy
    assert replace(ONE, rows=8, slowdown=0.5).replica_capacity == pytest.approx(8 / 4.5)


def test_a_seed_gives_one_run():
    assert simulate(ONE, 0.9, 500, seed=3) == simulate(ONE, 0.9, 500, seed=3)
    assert simulate(ONE, 0.9, 500, seed=3) != simulate(ONE, 0.9, 500, seed=4)
    assert simulate(ONE, 0.9, 0).wait(0.99) == 0.0


def test_a_plant_without_replicas_is_refused():
    with pytest.raises(ParameterError, match="at least 1"):
        replace(ONE, replicas=0)

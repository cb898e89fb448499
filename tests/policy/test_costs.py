"""Costs: lines, their corrections, outliers, the drift that all share, and what is stored for another process."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Drift, Line, fitted


def test_a_line_interpolates_and_extrapolates():
    line = Line.through([(1, 10.0), (6, 12.0), (9, 13.2)])
    assert line(1) == pytest.approx(10.0, rel=0.01)
    assert line(6) == pytest.approx(12.0, rel=0.01)
    assert line(3) == pytest.approx(10.8, rel=0.02)
    assert line(16) == pytest.approx(16.0, rel=0.02)


def test_passes_of_another_width_teach_what_a_change_costs():
    costs = Costs(Line(10.0, 1.0), [])
    costs.record(6, 19.0, [], changed=True)  # nothing is known of the machine yet
    assert costs.change == 0.0
    for _ in range(20):
        costs.record(1, 11.0, [])
        costs.record(6, 21.0, [], changed=True)
    assert costs.change == pytest.approx(5.0, rel=0.02)
    assert costs.target(6) == pytest.approx(16.0, rel=0.02)  # such passes say nothing of others
    assert costs.round(6, changed=True) == pytest.approx(21.0, rel=0.02)
    assert Costs.read(costs.as_json()).change == pytest.approx(5.0, rel=0.02)


def test_a_pass_after_a_prompt_s_says_nothing_of_what_a_known_change_of_width_costs():
    """It finds neither its code nor its weights in the caches: the cost seemed to rise from request to request."""
    costs = Costs(Line(10.0, 1.0), [])
    costs.measure([(1, 11.0), (5, 15.0)], [], change=0.5)
    for _ in range(20):
        costs.record(1, 14.0, [], changed=True, behind=True)
    assert costs.change == 0.5
    costs.record(1, 14.0, [], changed=True)
    assert costs.change > 0.5
    unknown = Costs(Line(10.0, 1.0), [])
    unknown.measure([(1, 11.0), (5, 15.0)], [])
    unknown.record(1, 12.0, [], changed=True, behind=True)
    assert unknown.change == pytest.approx(1.0, rel=0.1)


def test_one_slow_measurement_does_not_bend_a_line():
    assert fitted([(1, 10.4), (2, 10.8), (3, 30.0), (6, 12.4), (9, 13.6)])[1] == pytest.approx(0.4, rel=0.05)


def test_a_line_always_rises_with_size():
    fixed, each = fitted([(1, 10.0), (6, 8.0), (9, 7.0)])
    assert each > 0.0
    assert fixed > 0.0


@pytest.mark.parametrize("seed", range(3))
def test_rounds_correct_sizes_off_the_line(seed):
    random = np.random.default_rng(seed)
    line, drift = Line(10.0, 0.2), Drift()
    true = {1: 10.2, 6: 14.0, 11: 15.0}
    for _ in range(300):
        for size, seconds in true.items():
            slow = 3.0 if random.random() < 0.02 else 1.0
            line.record(size, seconds * slow * exp(random.normal(0.0, 0.1)), drift)
    for size, seconds in true.items():
        # Choices depend on ratios: a factor common to all sizes is the drift's.
        assert line(size) / line(1) == pytest.approx(seconds / true[1], rel=0.08)


def test_a_slower_machine_changes_no_ratio():
    line, drift = Line(10.0, 0.2), Drift()
    for at in range(400):
        size = (1, 6)[at % 2]
        line.record(size, 1.7 * (10.0 + 0.2 * size), drift)
    assert line(6) / line(1) == pytest.approx(11.2 / 10.2, rel=0.02)


def test_a_surprise_far_from_what_was_measured_is_its_size_s_not_the_drift_s():
    line, drift = Line.through([(1, 10.0), (3, 10.4), (9, 11.6)]), Drift()
    for _ in range(40):
        line.record(32, 3.0 * 16.2, drift)  # arithmetic takes longer than reading there, which no narrow pass shows
    assert line(32) / line(1) == pytest.approx(3.0 * 1.62, rel=0.1)
    assert line(128) / line(1) > 2.0 * (9.8 + 0.2 * 128) / 10.0  # and all the more beyond
    assert line(9) / line(1) == pytest.approx(1.16, rel=0.1)
    assert abs(drift.value) < 0.1


def test_a_surprise_where_costs_are_known_is_the_drift_s():
    line, drift = Line.through([(1, 10.0), (3, 10.4), (9, 11.6)]), Drift()
    for _ in range(40):
        line.record(6, 11.0, drift)
    for _ in range(40):
        line.record(6, 1.3 * 11.0, drift)
    assert line(6) / line(1) == pytest.approx(1.1, rel=0.06)
    assert exp(drift.value) == pytest.approx(1.3, rel=0.06)


def test_a_single_outlier_among_many_changes_next_to_nothing():
    line, drift = Line(10.0, 0.2), Drift()
    for _ in range(30):
        line.record(4, 10.8, drift)
    before = line(4)
    line.record(4, 108.0, drift)
    assert line(4) < 1.02 * before


def test_costs_of_further_rows_and_of_lag_are_estimated_apart():
    costs = Costs(Line(10.0, 0.1), [DrafterCosts(Line(0.5, 1.0), row=0.0, lag=0.01)])
    for _ in range(60):
        costs.record(1, 10.1, [(0, 4, 4, 0, 4.5 * 1.3)])
        costs.record(1, 10.1, [(0, 4, 1, 200, 4.5 + 200 * 0.02)])
    assert costs.draft(0, 4, 4, 0) == pytest.approx(4.5 * 1.3, rel=0.05)
    assert costs.draft(0, 4, 1, 200) == pytest.approx(8.5, rel=0.1)
    assert costs.draft(0, 4, 1, 0) == pytest.approx(4.5, rel=0.05)


def test_another_process_starts_from_the_line():
    costs = Costs(Line.through([(1, 10.0), (6, 12.0)]), [DrafterCosts(Line(0.5, 1.0), row=0.2, lag=0.01)])
    again = Costs.read(costs.as_json())
    assert again.target(6) / again.target(1) == pytest.approx(1.2, rel=0.01)
    assert again.draft(0, 3, 2, 10) == pytest.approx(costs.draft(0, 3, 2, 10), rel=0.01)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Costs.read({"target": [1.0], "drafters": []})


def test_costs_by_bytes_are_in_passes_of_the_target():
    costs = Costs.by_bytes(100.0, [10.0, 0.0])
    assert costs.target(1) == pytest.approx(1.0)
    assert costs.draft(0, 4, 1, 0) == pytest.approx(0.4)
    assert costs.draft(1, 16, 1, 0) == pytest.approx(0.0, abs=1e-4)
    assert costs.target(2) == pytest.approx(1.04)
    assert Costs.by_bytes(100.0, [10.0], 0.5).target(3) == pytest.approx(2.0)


def test_the_time_of_free_drafts_is_told_by_rows_and_tokens():
    costs = Costs(Line(10.0, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    assert costs.copy(5) == 0.0
    for at in range(300):
        rows, drafted = ((1, 0), (1, 15), (4, 0), (32, 64))[at % 4]
        costs.record(rows, 10.0 + 0.1 * rows, [], (rows, drafted, 0.2 + 0.03 * (rows + drafted)))
    for units in (1, 16, 96):
        assert costs.copy(units) == pytest.approx(0.2 + 0.03 * units, rel=0.1)
    before = costs.copy(4)
    costs.record(1, 10.1, [], (1, 3, 100.0))  # other work on the machine
    assert costs.copy(4) < 1.05 * before


def test_what_copies_take_moves_neither_the_drift_nor_what_passes_cost():
    """Their line is a guess from one round; what they take follows no line at all."""
    costs = Costs(Line(1.5, 0.06), [DrafterCosts(Line(0.0, 0.0))])
    random = np.random.default_rng(0)
    for turn in range(200):
        drafted = (0, 0, 16)[turn % 3]
        costs.record(17, 1.5 + 0.06 * 17, [], (1, drafted, 0.01 * float(random.lognormal(0.0, 1.0)) * (1 + drafted)))
    assert costs.drift.value == pytest.approx(0.0, abs=0.02)
    assert costs.target(17) == pytest.approx(1.5 + 0.06 * 17, rel=0.02)
    assert costs.target(1) == pytest.approx(1.56, rel=0.02)
    assert costs.copy(17) == pytest.approx(0.17, rel=0.5)
    assert costs.copy(1) == pytest.approx(0.01, rel=0.5)


def test_usual_measurements_of_a_known_size_are_taken_together_and_surprises_at_once():
    line, drift = Line(2.0, 0.1), Drift()
    for _ in range(12):
        line.record(1, 2.1, drift)
        line.record(64, 8.4, drift)
    before = line(64)
    line.record(64, 8.4 * 1.1, drift)
    assert line(64) == before  # waits for two more
    line.record(64, 8.4 * 1.1, drift)
    line.record(64, 8.4 * 1.1, drift)
    assert line(64) * exp(drift.value) > before * 1.001
    before = line(64) * exp(drift.value)
    line.record(64, 5 * 8.4, drift)
    assert line(64) * exp(drift.value) > before * 1.01


def behind_drafts(costs, slower, rounds=60):
    """So many rounds with drafts of four tokens that take that many times as long as their line says."""
    for _ in range(rounds):
        costs.record(5, slower * 1.4, [], (1, 4, 0.1))


def measured_together():
    """Costs of rounds of 1 + 0.1 n, whose plain passes take 0.8 where they go together."""
    costs = Costs(Line(1.0, 0.1), [DrafterCosts(Line(0.0, 0.0))])
    costs.measure([(1, 1.0), (5, 1.4), (9, 1.8)], [[]], together=0.8)
    return costs


def plain_seconds(costs):
    return costs.plain(1) * exp(costs.drift.value)


def test_rounds_with_drafts_do_not_make_plain_passes_slower_than_they_were():
    """They find the processor's caches empty. Plain decoding would not, and drafts would seem to pay beside it."""
    costs = measured_together()
    assert plain_seconds(costs) == pytest.approx(0.8, rel=0.02)
    behind_drafts(costs, 1.5)
    assert costs.target(5) * exp(costs.drift.value) == pytest.approx(2.1, rel=0.1)
    assert plain_seconds(costs) == pytest.approx(0.8, rel=0.02)


def test_plain_passes_are_as_slow_as_they_were_last():
    costs = measured_together()
    for _ in range(40):
        costs.together.took(1, 1.2, 8)
        costs.together.record(1, 1.2 * exp(-costs.drift.value) / costs.target(1), 8, costs.drift)
    assert plain_seconds(costs) == pytest.approx(1.2, rel=0.05)


def test_where_all_rounds_get_faster_plain_passes_do():
    costs = measured_together()
    behind_drafts(costs, 0.6)
    assert 0.45 < plain_seconds(costs) < 0.65

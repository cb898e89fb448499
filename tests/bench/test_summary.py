"""Numbers from made-up runs, where the right answers are known."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from foretoken.bench import costs, plots, tables
from foretoken.bench.records import Record
from foretoken.bench.report import page
from foretoken.bench.summary import BenchResults
from foretoken.bench.turns import Spread

GIGA = 10**9
MODEL = {"name": "pair/target", "parameters": GIGA, "read_parameters": GIGA, "cached_per_token": 0}
SMALL = {"name": "pair/drafter", "parameters": GIGA // 10, "read_parameters": GIGA // 10, "cached_per_token": 0}
SETTINGS = {"kind": "settings", "target": MODEL, "drafter": SMALL, "dtype": "bfloat16", "threads": 2}


def run(engine: str, seconds: float, repeat: int = 0, category: str = "a", batch: int = 1, **more: Any) -> Record:
    family, _, rest = engine.partition(":")
    mode, _, k = rest.partition(" k=")
    return {
        "kind": "run",
        "engine": engine,
        "family": family,
        "mode": mode,
        "k": int(k) if k else None,
        "batch": batch,
        "temperature": 0.0,
        "repeat": repeat,
        "category": category,
        "items": [f"{category}{place}" for place in range(batch)],
        "prompt_tokens": [10] * batch,
        "generated": 40 * batch,
        "first_seconds": 0.5,
        "seconds": seconds,
        **more,
    }


def records() -> list[Record]:
    made: list[Record] = [SETTINGS, {"kind": "bandwidth", "bytes_per_second": 80e9, "repeat": 0}]
    texts = [[1] * 40]
    for repeat, slow in enumerate((1.0, 2.0, 4.0)):
        for category, factor in (("a", 1.0), ("b", 3.0)):
            common = {"repeat": repeat, "category": category}
            made += [
                run("foretoken:plain", 4 * slow * factor, rounds=40, tokens=texts, parts={"target": 4.0}, **common),
                run(
                    "foretoken:draft-model k=4",
                    (2 if category == "a" else 4) * slow * factor,
                    rounds=20,
                    drafted=80,
                    accepted=20,
                    drafted_by_position=[20, 18, 10, 10],
                    accepted_by_position=[14, 4, 2, 0],
                    parts={"drafter": 1.6, "target": 0.4},
                    tokens=[[1] * 30 + [2] * 10],
                    **common,
                ),
                run("transformers:draft-model k=4", 8 * slow * factor, rounds=20, **common),
            ]
    made.append(
        {"kind": "skipped", "engine": "llama-cpp:plain", "batch": 4, "temperature": 0, "why": "can't", "reason": "no"}
    )
    return made


def test_rates_and_ratios_are_formed_repeat_by_repeat() -> None:
    """Every repeat is twice as slow as the one before: rates spread, ratios don't."""
    results = BenchResults(records())
    ours, plain, theirs = results.rows(1, 0.0)
    assert [row.engine for row in (ours, plain, theirs)] == [
        "foretoken:draft-model k=4",
        "foretoken:plain",
        "transformers:draft-model k=4",
    ]
    assert plain.rate == Spread(80 / 32, 80 / 64, 80 / 16)
    assert ours.over_plain == Spread(16 / 14, 16 / 14, 16 / 14)
    assert ours.over_reference == Spread(32 / 14, 32 / 14, 32 / 14)
    assert plain.over_plain is None
    assert results.reference_at(1, 0.0) == "transformers:draft-model k=4"
    assert theirs.over_reference is None
    assert BenchResults(records(), "foretoken:plain").rows(1, 0.0)[0].over_reference == ours.over_plain
    alone = BenchResults([one for one in records() if not str(one.get("engine")).startswith("transformers")])
    assert alone.reference_at(1, 0.0) == "foretoken:plain"
    assert plain.decode_rate.high == pytest.approx(2 * 39 / (16 - 1))


def test_categories_have_ratios_of_their_own() -> None:
    results = BenchResults(records())
    for category, times in (("a", 2.0), ("b", 1.0)):
        told = results.ratio("foretoken:draft-model k=4", "foretoken:plain", 1, 0.0, category)
        assert told is not None
        assert told.median == pytest.approx(times)


def test_only_common_cases_count() -> None:
    told = [record for record in records() if record.get("engine") != "foretoken:plain" or record["repeat"] == 1]
    row = BenchResults(told).rows(1, 0.0)[0]
    assert row.over_plain == Spread(16 / 14, 16 / 14, 16 / 14)


def test_acceptance_and_texts() -> None:
    row = BenchResults(records()).rows(1, 0.0)[0]
    assert row.acceptance_length == 2.0
    assert row.acceptance == 0.25
    assert row.same_outputs == (0.0, 6)
    assert row.same_tokens == 0.75
    assert costs.acceptance_by_position(BenchResults(records()).of(row.engine, 1, 0.0)) == [0.7, 0.2, 0.1, 0.0]


def test_memory_traffic() -> None:
    plain = [run("foretoken:plain", 2.45, rounds=40)]
    # 39 passes over 2 GB in 1.95 s are 40 GB/s.
    assert costs.bandwidth_share(plain, SETTINGS, 80e9) == pytest.approx(0.5)
    drafted = [run("foretoken:draft-model k=4", 2.45, rounds=40, drafted=195)]
    assert costs.bandwidth_share(drafted, SETTINGS, 80e9) == pytest.approx(0.75)
    untold = [run("openvino:draft-model k=5", 2.45, rounds=40)]
    assert costs.bandwidth_share(untold, SETTINGS, 80e9) == pytest.approx(0.75)
    assert costs.bandwidth_share([run("x:plain", 2.45)], SETTINGS, 80e9) is None
    quantised = [run("foretoken+quantize=int8:plain", 2.45, rounds=40)]
    assert costs.bandwidth_share(quantised, SETTINGS, 80e9) == pytest.approx(0.25)
    quantised = [run("foretoken+quantize=int4:plain", 2.45, rounds=40)]
    assert costs.bandwidth_share(quantised, SETTINGS, 80e9) == pytest.approx(0.140625)
    cached = {**SETTINGS, "target": {**MODEL, "cached_per_token": GIGA // 30}}
    assert costs.bandwidth_share(plain, cached, 80e9) == pytest.approx(1.0)
    assert costs.limit_rate(SETTINGS, 80e9) == 40.0


def test_the_prediction() -> None:
    results = BenchResults(records())
    runs, plain = results.of("foretoken:draft-model k=4", 1, 0.0), results.of("foretoken:plain", 1, 0.0)
    assert costs.step_cost(runs, plain) == pytest.approx((1.6 / 80) / (4.0 / 40))
    assert costs.predicted_speed_up([0.7, 0.2], 2, 0.2) == pytest.approx(1.9 / 1.4)
    assert costs.parts(runs) == {"drafter": pytest.approx(0.04), "target": pytest.approx(0.01)}


def test_the_table_says_what_there_is_to_say() -> None:
    output = io.StringIO()
    tables.show(BenchResults(records()), Console(file=output, width=80, color_system=None))
    text = output.getvalue()
    for words in (
        "pair/target, 1,000.0M parameters",
        "80.0 GB/s: plain decoding of one sequence up to 40 tokens/s",
        "draft-model k=4",
        "greedy; reference: transformers:draft-model k=4",
        "not run: llama-cpp:plain at batch 4 can't be run: no",
        "draft-model k=4 is 1.14 times foretoken's own plain decoding, 2.29 times the best of transformers",
    ):
        assert words in text
    assert max(map(len, text.splitlines()[8:-4])) <= 80


def test_the_page_has_its_plots_and_loads_nothing() -> None:
    made = records()
    for record in [one for one in made if one["kind"] == "run"]:
        made.append({**record, "k": 8, "engine": record["engine"].replace("k=4", "k=8")} if record["k"] else record)
        made.append({**record, "batch": 4, "generated": 160, "prompt_tokens": [10] * 4})
    text = page(BenchResults(made))
    for words in (
        "Engines, batch 1, greedy",
        "Categories",
        "Acceptance",
        "Milliseconds a token",
        "Tokens drafted a round",
        "stroke-dasharray",
        "Distance from memory",
        "Batch sizes",
        "llama-cpp:plain at batch 4",
    ):
        assert words in text, words
    assert "http" not in text
    assert "nan" not in text


def test_plots_of_nothing_are_empty() -> None:
    assert plots.bars([], "x") == plots.groups({}, [], "x") == plots.stacks({}, "x") == plots.lines({}, "k", "y") == ""


def test_names_cannot_break_out_of_a_plot() -> None:
    picture = plots.bars([("<script>", Spread(0.0, 0.0, 0.0), True)], "x")
    assert "<script>" not in picture


def test_what_runs_later_is_no_longer_left_out() -> None:
    made = records()
    made.append({**run("llama-cpp:plain", 1.0, batch=4), "temperature": 0})
    assert BenchResults(made).skipped == []
    assert tables.left_out(BenchResults(records())) == ["llama-cpp:plain at batch 4 can't be run: no"]

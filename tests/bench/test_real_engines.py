"""Foretoken's and transformers' own workers, on a checkpoint of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import workloads
from foretoken.bench.engines import parse
from foretoken.bench.plan import BenchPlan
from foretoken.bench.records import Store
from foretoken.bench.run import measure
from foretoken.bench.summary import BenchResults
from foretoken.models import machine
from foretoken.peers import workers
from foretoken.peers.launch import request


def test_both_write_the_same_outputs(shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(machine, "bandwidth", lambda *_: 1e10)
    tokenizer = AutoTokenizer.from_pretrained(shipped)
    prompts = workloads.encode(workloads.select(workloads.load("builtin"), 1), tokenizer, 200)
    chosen = [*parse("foretoken", [3]), *parse("foretoken:draft-model", ["auto"]), *parse("transformers", [3])]
    chosen += [*parse("foretoken:suffix", [8]), *parse("foretoken:suffix,draft-model", [3])]
    plan = BenchPlan(
        target=shipped,
        drafter=shipped,
        engines=tuple(chosen),
        prompts=tuple(prompts),
        batches=(1, 3),
        repeats=1,
        max_new_tokens=12,
        dtype="float32",
        threads=1,
        cache=tmp_path,
    )
    store = Store(None, plan.settings())
    measure(plan, store)
    results = BenchResults(store.records)
    left_out = {(one["engine"], one["batch"]) for one in results.skipped}
    assert left_out == {("transformers:draft-model k=3", 3), ("transformers:prompt-lookup k=3", 3)}, results.skipped
    for batch in (1, 3):
        for row in results.rows(batch, 0.0):
            assert row.engine == "transformers:plain" or row.same_outputs == (1.0, 3), row
            if row.mode == "plain":
                assert row.acceptance_length == pytest.approx(1.0)
            elif row.mode == "draft-model" and row.family == "foretoken" and row.k == 3:
                # It drafts for itself: all is accepted, up to the end of the text.
                assert row.acceptance_length is not None
                assert row.acceptance_length >= 3.0
    assert {"foretoken", "transformers"} <= set(tables_versions(results))


def test_no_timed_request_copies_from_the_requests_before(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt comes for the warm-up, for its prefill, and in every repeat."""
    monkeypatch.syspath_prepend(str(Path(workers.__file__).parent))
    import foretoken_worker as worker  # type: ignore[import-not-found]

    options = {"threads": 1, "options": {}, "dtype": "float32", "device": "cpu", "target": str(shipped), "max_batch": 1}
    _, run = worker.make(options)
    rounds = [
        run(request(mode, 4, [[9, 8, 7, 9, 8]], 24, {"temperature": 0.0}, [0]))["rounds"]
        for mode in ("suffix", "suffix:1000", "suffix:1000")
    ]
    assert len(set(rounds)) == 1


def tables_versions(results: BenchResults) -> list[str]:
    return [name for one in results.machines for name in one.get("versions", {})]

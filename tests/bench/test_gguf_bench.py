"""Benchmarks of GGUF files: Foretoken's runner beside llama.cpp's own server, on the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("xllamacpp", reason="GGUF files need llama.cpp: pip install '.[gguf]'")
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')

from foretoken import tiny_pair_path
from foretoken.bench.engines import parse
from foretoken.bench.records import Store
from foretoken.bench.run import measure
from foretoken.bench.summary import BenchResults
from foretoken.cli.bench_options import PlanOptions
from foretoken.errors import ParameterError
from foretoken.models import machine
from foretoken.peers.workers import __file__ as workers


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    """The shipped drafter, which is small, as a file."""
    import sys

    sys.path.insert(0, str(Path(workers).parent))
    import gguf_writer

    file = tmp_path_factory.mktemp("bench") / "small.gguf"
    gguf_writer.convert(tiny_pair_path() / "drafter", file, "float32")
    return file


def test_foretoken_and_llama_cpp_write_the_same_from_one_file(drafter, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "bandwidth", lambda *_: 1e10)
    options = PlanOptions(
        target=drafter,
        drafter=drafter,
        engines="foretoken:plain,foretoken:draft-model,llama-server",
        k="3",
        limit=1,
        # The model answers code with its end token, which the server bans where tokens go on behind it.
        category="maths",
        repeats=1,
        max_new_tokens=12,
        dtype="float32",
        threads=1,
        cache=tmp_path,
    )
    plan = options.plan()
    described = plan.settings()["target"]
    assert described["read_parameters"] == pytest.approx(described["parameters"], rel=0.02)
    store = Store(None, plan.settings())
    measure(plan, store)
    results = BenchResults(store.records)
    assert not results.skipped
    rows = {row.engine: row for row in results.rows(1, 0.0)}
    assert len(rows) == len(plan.engines) == len([*parse("foretoken", [3])[:2], *parse("llama-server", [3])])
    outputs = [one["tokens"] for one in store.records if one["kind"] == "run"]
    assert all(one == outputs[0] for one in outputs)


def test_a_file_is_not_widened(drafter):
    with pytest.raises(ParameterError, match="can't be widened"):
        PlanOptions(target=drafter, widen="500M").plan()

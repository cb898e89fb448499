"""Runs with an engine that computes nothing: turns, files, interruptions, and what is left out."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.engines import EngineConfig
from foretoken.bench.errors import BenchError
from foretoken.bench.plan import BenchPlan, cases
from foretoken.bench.records import Store, read
from foretoken.bench.run import measure
from foretoken.bench.summary import BenchResults
from foretoken.models import machine
from foretoken.peers.kinds import EngineKind
from foretoken.workloads import Item, Prompt

SETTINGS = {"target": "t", "max_new_tokens": 32}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "bandwidth", lambda *_: 1e10)


def engines(kind: EngineKind, **options: str) -> tuple[EngineConfig, ...]:
    given = tuple(sorted(options.items()))
    return EngineConfig(kind, "plain", None, given), EngineConfig(kind, "draft-model", 2, given)


def plan(small: Path, peers: Path, chosen: tuple[EngineConfig, ...], **changes: Any) -> BenchPlan:
    prompts = tuple(Prompt(Item(f"{name}{i}", name, "x"), (i, 2, 3)) for name in ("a", "b") for i in range(2))
    made = BenchPlan(small, small, chosen, prompts, repeats=2, max_new_tokens=32, threads=1, peers=peers)
    return replace(made, **changes)


def test_every_case_is_run_by_every_engine(small: Path, peers: Path, kind: EngineKind) -> None:
    chosen = plan(small, peers, engines(kind), batches=(1, 2), temperatures=(0.0, 1.0))
    store = Store(None, chosen.settings())
    measure(chosen, store)
    runs = store.of("run")
    assert len(runs) == len(cases(chosen)) * 2 == (4 + 2) * 2 * 2 * 2
    assert {run["seconds"] for run in runs if run["mode"] == "plain"} == {1.0}
    assert {run["first_seconds"] for run in runs if run["mode"] == "draft-model"} == {0.5 / 32}
    assert {run["generated"] for run in runs if run["batch"] == 2} == {64}
    assert all(("tokens" in run) == (run["temperature"] == 0) for run in runs)
    assert len(store.of("bandwidth")) == len(cases(chosen))
    assert {"engine": "fake", "versions": {"fake": "1.0"}, "kind": "machine"} in store.records


def test_engines_take_turns(small: Path, peers: Path, kind: EngineKind, tmp_path: Path) -> None:
    chosen = plan(small, peers, engines(kind, log=str(tmp_path / "log")))
    measure(chosen, Store(None, chosen.settings()))
    modes = [line.split()[0] for line in (tmp_path / "log").read_text().splitlines() if line.endswith(" 32")]
    assert len(modes) == 16
    assert all(set(modes[place : place + 2]) == {"plain", "draft-model"} for place in range(0, 16, 2))
    assert len(set(modes[::2])) == 2  # nobody is always first


def test_an_interrupted_run_goes_on(small: Path, peers: Path, kind: EngineKind, tmp_path: Path) -> None:
    chosen, file = plan(small, peers, engines(kind)), tmp_path / "out.jsonl"

    def interrupt(made: int, *_: object) -> None:
        if made == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(chosen, Store(file, chosen.settings()), interrupt)
    with file.open("a") as opened:
        opened.write('{"kind": "run", "engine": "fake:pl')
    store, counts = Store(file, chosen.settings()), []
    assert len(store.of("run")) == 5
    measure(chosen, store, lambda made, planned, _: counts.append(planned))
    assert counts[0] == 16 - 5
    again = Store(file, chosen.settings())
    assert len(again.done()) == len(again.of("run")) == 16
    before = file.read_text()
    measure(chosen, again)
    assert file.read_text() == before
    # Further repeats and engines join what is there.
    more = plan(small, peers, (*engines(kind), EngineConfig(kind, "prompt-lookup", 3)), repeats=3)
    measure(more, Store(file, more.settings()))
    assert len(read(file)) > len(before.splitlines())
    assert len(Store(file, more.settings()).done()) == 4 * 3 * 3


def test_results_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    Store(file, SETTINGS)
    Store(file, SETTINGS)
    assert len(read(file)) == 1
    with pytest.raises(BenchError, match="max_new_tokens 32, and now it is 64: name another file"):
        Store(file, {**SETTINGS, "max_new_tokens": 64})


@pytest.mark.parametrize(
    "text", ["hello", "settings = 1", "hello\n{}", '{"kind": "dog"}\n', '{"kind": "run"}\n', "[" * 100_000 + "\n"]
)
def test_files_that_hold_something_else_are_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(BenchError, match=r"notes\.txt"):
        Store(file, SETTINGS)
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["", '{"ki', '{"kind": "settings", "tar'])
def test_a_first_line_that_was_cut_short_is_written_anew(tmp_path: Path, text: str) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text(text)
    assert Store(file, SETTINGS).records == read(file) == [{"kind": "settings", **SETTINGS}]


def test_a_pipe_is_written_to_and_not_read(tmp_path: Path) -> None:
    """As in ``--json /dev/stdout | jq``."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with Path(pipe).open("r+b", buffering=0):  # a writer, so that a read waits
        store = Store(pipe, SETTINGS)
        store.add({"kind": "machine"})
        told = os.read(reader, 1 << 16)
    os.close(reader)
    assert [json.loads(line) for line in told.splitlines()] == store.records


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("processor", {"cpu": "other"}),
        ("GPU", {"gpu": {"name": "other"}}),
        ("Foretoken", {"versions": {"foretoken": "0"}}),
    ],
)
def test_results_of_another_machine_are_not_mixed(
    small: Path, peers: Path, kind: EngineKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, value: Any
) -> None:
    chosen, file = plan(small, peers, engines(kind), repeats=1), tmp_path / "out.jsonl"
    measure(chosen, Store(file, chosen.settings()))
    before, here = file.read_text(), machine.describe()
    monkeypatch.setattr(machine, "describe", lambda *_: {**here, **value})
    measure(chosen, Store(file, chosen.settings()))  # nothing is left to be measured
    with pytest.raises(BenchError, match=rf"measured with {what} .*: name another file"):
        measure(replace(chosen, repeats=2), Store(file, chosen.settings()))
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("behaviour", "why", "reason"),
    [
        ("can't", "can't", "it has no such mode"),
        ("broken", "failed", "ValueError: shapes differ"),
        ("no start", "failed", "RuntimeError: no such model"),
        ("short", "failed", "wrote [31] tokens where 32"),
        ("die", "failed", "status 3"),
        ("no tokens", "failed", "holds no outputs"),
    ],
)
def test_an_engine_that_cannot_is_left_out_with_its_reason(
    small: Path, peers: Path, kind: EngineKind, behaviour: str, why: str, reason: str
) -> None:
    chosen = plan(
        small, peers, (EngineConfig(kind, "plain"), EngineConfig(kind, "plain", None, (("behaviour", behaviour),)))
    )
    store = Store(None, chosen.settings())
    measure(chosen, store)
    (skipped,) = store.of("skipped")
    assert (skipped["why"], skipped["batch"]) == (why, 1)
    assert reason in skipped["reason"]
    assert len(store.of("run")) == 8


def test_a_process_that_is_started_again_is_warmed_up_again(
    small: Path, peers: Path, kind: EngineKind, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    chosen = plan(small, peers, engines(kind, behaviour="die in draft-model", log=str(log)), repeats=1)
    measure(chosen, Store(None, chosen.settings()))
    timed = ["plain 1", "plain 32"]
    first = ["plain 16", *timed, "draft-model 16"]
    assert log.read_text().splitlines() == [*first, "plain 16", *timed, *timed, *timed]


def test_engines_of_the_processor_are_not_measured_as_those_of_a_gpu(
    small: Path, peers: Path, kind: EngineKind
) -> None:
    cpu = replace(kind, name="cpu", cpu_only=True)
    chosen = plan(small, peers, (EngineConfig(kind, "plain"), EngineConfig(cpu, "plain")), device="cuda", repeats=1)
    store = Store(None, chosen.settings())
    measure(chosen, store)
    (skipped,) = store.of("skipped")
    assert (skipped["engine"], skipped["why"]) == ("cpu:plain", "can't")
    assert "runs on the processor alone, not on cuda: measure it with --device cpu" in skipped["reason"]
    assert {run["engine"] for run in store.of("run")} == {"fake:plain"}


def test_what_does_not_batch_and_what_is_not_installed(small: Path, peers: Path, kind: EngineKind) -> None:
    absent = replace(kind, name="absent", folders=("absent",))
    chosen = plan(small, peers, (EngineConfig(kind, "prompt-lookup", 2), EngineConfig(absent, "plain")), batches=(1, 2))
    store = Store(None, chosen.settings())
    measure(chosen, store)
    told = {(one["engine"], one["batch"]): one["reason"] for one in store.of("skipped")}
    assert told[("fake:prompt-lookup k=2", 2)] == "fake does not decode several prompts in mode prompt-lookup at once"
    assert "foretoken bench peers --install absent" in told[("absent:plain", 1)]
    assert {(run["engine"], run["batch"]) for run in store.of("run")} == {("fake:prompt-lookup k=2", 1)}


def test_settings_tell_models_apart(small: Path, shipped: Path, peers: Path, kind: EngineKind) -> None:
    one, other = (plan(folder, peers, engines(kind)) for folder in (small, shipped))
    assert json.dumps(one.settings()) != json.dumps(replace(other, drafter=small).settings())
    assert one.settings()["target"]["read_parameters"] == one.settings()["target"]["parameters"] - 96 * 64
    assert one.max_length == 3 + 32 + 2 + 1


def test_the_machine_is_described() -> None:
    told = machine.describe()
    assert told["cores"] >= 1
    assert set(told["versions"]) == {"foretoken", "torch", "transformers"}


def test_a_run_without_its_fields_is_no_result(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Store(file, SETTINGS).add({"kind": "machine"})
    with file.open("a") as opened:
        opened.write('{"kind": "run", "engine": "x"}\n')
    store = Store(file, SETTINGS)
    with pytest.raises(BenchError, match=r"damaged or none of a benchmark's \('batch'\)"):
        store.done()
    with pytest.raises(BenchError, match="damaged or none"):
        BenchResults(store.records)

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, GPT2Config
from typer.testing import CliRunner, Result

from bench.test_summary import records
from foretoken.cli.app import app
from foretoken.cli.bench_progress import watching
from foretoken.cli.screen import Screen
from foretoken.models import machine
from foretoken.peers import kinds
from foretoken.peers.kinds import EngineKind


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture
def _fake(kind: EngineKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, "fake", kind)
    monkeypatch.setattr(machine, "bandwidth", lambda *_: 1e10)


@pytest.mark.usefixtures("_fake")
def test_run_measures_and_writes(peers: Path, tmp_path: Path) -> None:
    given = ["run", "--engines", "fake", "--peers", peers, "-k", "2", "-n", 32, "--limit", 1, "--repeats", 2]
    given += ["--batch", "1,2", "--json", tmp_path / "out.jsonl", "--html", tmp_path / "out.html"]
    result = call(*given)
    assert result.exit_code == 0, result.output
    assert "draft-model k=2" in result.stdout
    assert "left: fake:" in result.stderr
    assert "2.00" in result.stdout
    assert "fake does not decode several prompts in mode prompt-lookup at once" in result.stdout
    assert "<svg" in (tmp_path / "out.html").read_text()
    before = (tmp_path / "out.jsonl").read_text()
    assert call(*given).exit_code == 0
    told = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one for one in told if one["kind"] == "run"] == [
        json.loads(line) for line in before.splitlines() if '"kind": "run"' in line
    ]
    other = call(*given, "-n", 16)
    assert other.exit_code == 2
    assert "max_new_tokens 32, and now it is 16" in other.stderr


@pytest.mark.usefixtures("_fake")
def test_a_wrong_reference_is_told_before_anything_is_measured(peers: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    given = ["run", "--engines", "fake:plain", "--peers", peers, "-n", 32, "--limit", 1, "--repeats", 1, "--json", out]
    wrong = call(*given, "--reference", "fake:plian")
    assert wrong.exit_code == 2
    assert "reference 'fake:plian' is not among the engines: choose one of fake:plain" in wrong.stderr
    assert '"run"' not in out.read_text()
    # One that was measured before counts, one that can't run doesn't keep what was measured from being shown.
    assert call(*given).exit_code == 0
    other = [*given[:2], "fake:draft-model,openvino:plain", *given[3:], "-k", 2]
    result = call(*other, "--reference", "fake:plain")
    assert result.exit_code == 0, result.output
    assert "reference: fake:plain" in result.stdout
    absent = call(*other, "--reference", "openvino:plain")
    assert absent.exit_code == 0, absent.output
    assert "reference 'openvino:plain' could not be run" in absent.stderr
    assert "draft-model k=2" in absent.stdout


@pytest.mark.usefixtures("_fake")
def test_sizes_of_models_that_are_no_llamas_are_left_out(peers: Path, tmp_path: Path, shipped: Path) -> None:
    folder = tmp_path / "gpt2"
    GPT2Config(n_positions=64, n_layer=1, n_head=2, n_embd=8).save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    given = ["run", "--engines", "fake:plain", "--peers", peers, "--limit", 1, "--repeats", 1, "--target", folder]
    result = call(*given, "-n", 24, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert f"target: {tmp_path.name}/gpt2, " in result.stdout
    assert "memory reads: 10.0 GB/s\n" in result.stdout
    long = call(*given, "-n", 64)  # its context is said under another name than a Llama's
    assert long.exit_code == 2
    assert "the target's context is too short" in long.stderr
    (folder / "config.json").write_text("{")
    broken = call(*given, "-n", 24)
    assert broken.exit_code == 2
    assert "config.json that can't be read" in broken.stderr


def test_progress_is_told_where_nobody_sees_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with watching(Screen(no_color=True), lambda: now) as progress:
        for made in range(41):
            progress(made, 40, "fake:plain")
            now += 30.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 40 runs: fake:plain"
    assert lines[1] == "4 of 40 runs, about 18 min left: fake:plain"
    assert lines[-1] == "40 of 40 runs: fake:plain"
    assert len(lines) == 11


def test_report_shows_a_file_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records()))
    result = call("report", file, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "2.29 times the best of transformers (draft-model k=4)" in result.stdout
    assert "How fast?" in (tmp_path / "page.html").read_text()
    other = call("report", file, "--reference", "foretoken:plain")
    assert "1.14 times foretoken's own plain decoding" in other.stdout
    wrong = call("report", file, "--reference", "vllm")
    assert wrong.exit_code == 2
    assert "choose one of foretoken:draft-model k=4" in wrong.stderr
    missing = call("report", tmp_path / "none.jsonl")
    assert missing.exit_code == 2
    assert "can't be read: No such file or directory\n" in missing.stderr


def test_results_of_another_command_are_named(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    run = {"kind": "run", "engine": "none", "batch": 1, "temperature": 0.0, "repeat": 0, "items": ["code", "1"]}
    told = [{"kind": "settings", "target": "dir"}, {**run, "workload": "code", "seconds": {"target": 1.0}}]
    file.write_text("".join(json.dumps(record) + "\n" for record in told))
    result = call("report", file)
    assert result.exit_code == 2
    assert "not of 'foretoken bench run'" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engines", "gpt"], "unknown engine 'gpt'"),
        (["--engines", ","], "engines is empty"),
        (["--engines", "foretoken:medosa"], "unknown mode 'medosa'"),
        (["-k", "0"], "from 1 to 256"),
        (["--batch", "one"], "batch is 'one'"),
        (["--batch", "0"], "1 to 1,024"),
        (["--temperature", "-1"], "0 to 100"),
        (["--workload", "mmlu"], "unknown workload 'mmlu'"),
        (["--workload", "spec_bench"], "--data FILE"),
        (["--category", "cooking"], "'cooking'"),
        (["--prompt-tokens", "5000"], "5,000"),
        (["--max-new-tokens", "5000"], "max_new_tokens"),
        (["--target", "/nowhere"], "'/nowhere' holds no config.json"),
        (["--dtype", "int4"], "'int4'"),
        (["--widen", "huge"], "size 'huge'"),
        (["--widen", "1M"], "1.0M parameters can't be had"),
        (["--json", "/nowhere/out.jsonl"], "can't write"),
    ],
)
def test_bad_options_are_said_in_one_line(options: list[str], words: str) -> None:
    result = call("run", *options)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_nothing_that_could_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "bandwidth", lambda *_: 1e10)
    result = call("run", "--engines", "openvino:plain", "--peers", tmp_path, "--limit", 1)
    assert result.exit_code == 2
    assert "foretoken bench peers --install openvino" in result.stderr
    assert "nothing was measured" in result.stderr


def test_widen_says_what_it_made(small: Path, tmp_path: Path) -> None:
    result = call("widen", small, tmp_path, "--to", "1M", "--vocab-size", 96, "--random-weights")
    assert result.exit_code == 0, result.output
    assert "1.0M parameters" in result.stderr
    wrong = call("widen", small, tmp_path, "--to", "huge")
    assert wrong.exit_code == 2
    assert "'huge'" in wrong.stderr


def test_peers_are_listed(peers: Path) -> None:
    result = call("peers", "--peers", peers)
    assert result.exit_code == 0
    assert "openvino      not installed: foretoken bench peers --install openvino" in result.stdout
    assert call("peers", "--install", "foretoken", "--peers", peers).exit_code == 2

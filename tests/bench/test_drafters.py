"""The table of drafters and workloads: its arithmetic on made-up runs, and the measurement itself on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from foretoken import Engine, load, verify
from foretoken.bench import drafter_runs, drafter_table
from foretoken.cli.app import app
from foretoken.engine.outputs import PARTS
from foretoken.errors import ParameterError
from foretoken.workloads import Item, Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shipped: Path) -> Path:
    """A random model of two layers with the shipped pair's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=0,
        pad_token_id=3,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(path)
    return path


def run(word: str, rounds: int, emitted: int, seconds: float, repeat: int = 0, session: int = 0, **more: Any) -> Any:
    """A run of two texts whose seconds are spread evenly over the parts, a fifth of them in the first rounds."""
    return {
        "kind": "run",
        "engine": word,
        "workload": "maths",
        "temperature": 0.0,
        "repeat": repeat,
        "session": session,
        "rounds": rounds,
        "emitted": emitted,
        "drafted": 0,
        "accepted": 0,
        "seconds": dict.fromkeys(PARTS, seconds / 4),
        "first_seconds": dict.fromkeys(PARTS, seconds / 20),
        "outputs": ["x", "y"],
        **more,
    }


def test_lengths_costs_rates_and_ratios() -> None:
    runs = [
        run("none", 100, 100, 1.0),
        run("suffix", 22, 100, 0.5),
        run("none", 100, 100, 2.0, repeat=1),
        run("suffix", 30, 100, 0.5, repeat=1, outputs=["x", "z"]),
    ]
    cell = drafter_table.cells(runs)["maths", 0.0, "suffix"]
    assert cell.mean_acceptance_length == pytest.approx(200 / 52)
    # Both repeats: 1 second, of it 0.2 in the first rounds of four texts.
    assert cell.milliseconds == pytest.approx(1e3 * 0.8 / (52 - 4))
    assert cell.round_seconds["drafter"] == pytest.approx(0.2 / 48)
    assert cell.rate.median == pytest.approx(200)
    assert (cell.over_plain.low, cell.over_plain.high) == (pytest.approx(2.0), pytest.approx(4.0))
    assert cell.same_outputs == 0.75
    plain = drafter_table.cells(runs)["maths", 0.0, "none"]
    assert (plain.mean_acceptance_length, plain.over_plain.median) == (1.0, 1.0)


def test_ratios_are_formed_within_a_session() -> None:
    runs = [
        run("none", 100, 100, 1.0),
        run("one", 50, 100, 0.5),
        run("none", 100, 100, 10.0, session=1),  # the machine was ten times slower when this drafter was added
        run("other", 50, 100, 5.0, session=1),
    ]
    found = drafter_table.cells(runs)
    assert found["maths", 0.0, "one"].over_plain.median == pytest.approx(2.0)
    assert found["maths", 0.0, "other"].over_plain.median == pytest.approx(2.0)
    assert found["maths", 0.0, "none"].rate.low == pytest.approx(10.0)


def test_markdown_marks_the_fastest() -> None:
    runs = [run("none", 100, 100, 1.0), run("one", 50, 100, 0.5), run("two", 40, 100, 0.25)]
    runs.append(run("none", 10, 10, 1.0, workload="code"))
    told = drafter_table.markdown(drafter_table.cells(runs)).splitlines()
    assert told[0] == "Greedy:"
    assert told[2] == "| drafter | maths | code |"
    rows = dict(line.strip("| ").split(" | ", 1) for line in told[4:7])
    assert rows["`two`"].endswith("| –")
    assert rows["`two`"].startswith("2.50; 5.3 (1.3) ms; **4.00×**")
    assert "; 2.00× |" in rows["`one`"]
    assert rows["`none`"] == "1.00; 8.2 (2.0) ms; 100/s | 1.00; 100.0 (25.0) ms; 10/s"


def call(folder: Path, json_file: Path, drafters: str, *more: str) -> Result:
    options = ["--target", str(folder), "--drafter", str(folder), "--json", str(json_file), "--drafters", drafters]
    options += ["--workloads", "copy-edit", "--limit", "2", "--repeats", "2", "--max-new-tokens", "12", *more]
    return CliRunner().invoke(app, ["bench", "drafters", *options], env={"COLUMNS": "120"})


def told_runs(file: Path) -> list[Any]:
    return [one for line in file.read_text().splitlines() if (one := json.loads(line))["kind"] == "run"]


def test_a_run_goes_on_and_takes_in_further_drafters(folder: Path, tmp_path: Path) -> None:
    out, tables = tmp_path / "out.jsonl", tmp_path / "tables.md"
    first = call(folder, out, "prompt-lookup+draft-model")
    assert first.exit_code == 0, first.output
    assert torch.get_num_threads() == 1  # as before: a run leaves nothing behind
    assert "0 of 4 runs: copy-edit, temperature 0" in first.stderr
    told = [json.loads(line) for line in out.read_text().splitlines()]
    runs = told_runs(out)
    # Two repeats at two temperatures, of two drafters and of plain decoding.
    assert len(runs) == 12
    assert {one["session"] for one in runs} == {0}
    for one in runs:
        assert sum(one["seconds"].values()) > sum(one["first_seconds"].values()) > 0
        if one["engine"] == "none":
            assert one["rounds"] == one["emitted"]
    found = drafter_table.cells(runs)
    assert found["copy-edit", 0.0, "draft-model"].mean_acceptance_length > 3  # it drafts with the target itself
    assert found["copy-edit", 0.0, "draft-model"].same_outputs == 1.0

    # The same again measures nothing; a further drafter brings plain decoding along.
    out.write_text("".join(json.dumps(one) + "\n" for one in told[:-1]))  # as if it had been interrupted
    for _ in range(2):
        assert call(folder, out, "prompt-lookup+draft-model").exit_code == 0
    last = call(folder, out, "ngram-storage@3", "--markdown", str(tables))
    sessions = [[one["engine"] for one in told_runs(out) if one["session"] == session] for session in range(4)]
    assert len(sessions[0]) == 11
    assert sorted(sessions[1]) == sorted(["none", told[-1]["engine"]])
    assert sorted(sessions[2]) == ["ngram-storage@3"] * 4 + ["none"] * 4
    assert sessions[3] == []
    assert "`ngram-storage@3`" in tables.read_text()
    assert "ngram-storage@3" in last.stdout


def test_what_cant_be_run_is_said_and_left_out(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    result = call(folder, out, "prompt-loopup+prompt-lookup", "--temperature", "0")
    assert "not run: prompt-loopup: unknown drafter" in " ".join(result.stderr.split())
    assert {one["engine"] for one in told_runs(out)} == {"none", "prompt-lookup"}


def test_a_block_does_not_copy_from_the_blocks_before(folder: Path) -> None:
    """Its prompts came in every repeat before."""
    engine = drafter_runs.make_engine("suffix:1000@4", load(folder), None)
    prompts = [Prompt(Item(str(number), "kind", ""), (number, 5, 6, number, 5)) for number in range(7, 9)]
    found = [drafter_runs.Block("code", 0.0, repeat, prompts).measure({"it": engine}, 12)["it"] for repeat in range(2)]
    assert found[0]["rounds"] == found[1]["rounds"]
    assert found[0]["outputs"] == found[1]["outputs"]


def test_words_become_engines(folder: Path) -> None:
    target = load(folder)
    made = drafter_runs.make_engine("prompt-lookup,draft-model@7", target, load(folder))
    assert isinstance(made, Engine)
    assert [part.name for part in made.drafter.drafters] == ["prompt-lookup", "draft-model"]
    assert made.num_speculative_tokens == 7
    assert drafter_runs.make_engine("prompt-lookup@auto", target, None).num_speculative_tokens == "auto"
    assert drafter_runs.make_engine("prompt-lookup", target, None).num_speculative_tokens == drafter_runs.CHAIN
    assert (
        drafter_runs.make_engine("prompt-lookup,ngram-storage", target, None).num_speculative_tokens
        == drafter_runs.TREE
    )
    assert drafter_runs.make_engine("none", target, None).drafter.name == "none"
    assert drafter_runs.make_engine("prompt-lookup;verifier=coupled@4", target, None).verifier is verify.get("coupled")
    with pytest.raises(ParameterError, match="an option as NAME=VALUE"):
        drafter_runs.make_engine("prompt-lookup;coupled", target, None)
    with pytest.raises(ParameterError, match="name it with --drafter"):
        drafter_runs.make_engine("draft-model", target, None)
    with pytest.raises(ParameterError, match="number of tokens after the @"):
        drafter_runs.make_engine("prompt-lookup@few", target, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workloads", "cooking"], "unknown workload 'cooking': choose one of maths, code, summarising"),
        (["--workloads", "maths"], "needs its file"),
        (["--temperature", "hot"], "temperature is 'hot'"),
        (["--dtype", "int4"], "dtype 'int4'"),
        (["--copy-edit-target", "/nowhere"], "'/nowhere' holds no config.json"),
    ],
)
def test_bad_options_are_said_in_one_line(folder: Path, tmp_path: Path, options: list[str], words: str) -> None:
    result = call(folder, tmp_path / "out.jsonl", "none", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


def test_results_of_other_settings_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    assert call(folder, tmp_path / "out.jsonl", "none", "--temperature", "0").exit_code == 0
    other = call(folder, tmp_path / "out.jsonl", "none", "--max-new-tokens", "13")
    assert other.exit_code == 2
    assert "max_new_tokens 12, and now it is 13" in other.stderr


def test_results_of_other_prompts_are_not_mixed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    assert call(folder, out, "none", "--temperature", "0").exit_code == 0
    before = out.read_text()
    for more in (["--limit", "1"], ["--repeats", "3", "--limit", "3"]):
        other = call(folder, out, "none", "--temperature", "0", *more)
        assert other.exit_code == 2
        assert "copy-edit are of other prompts: name another file, or the same limit" in " ".join(other.stderr.split())
    assert out.read_text() == before
    # The same folder by another name is the same target.
    monkeypatch.chdir(folder.parent)
    assert call(Path(folder.name), out, "none", "--temperature", "0").exit_code == 0
    # So it is where the file has it as it was given.
    earlier = before.replace(json.dumps(str(folder.resolve())), json.dumps(folder.name))
    assert earlier != before
    out.write_text(earlier)
    assert call(Path(folder.name), out, "none", "--temperature", "0").exit_code == 0
    assert out.read_text().startswith(earlier)
    monkeypatch.chdir(tmp_path)
    other = call(folder, out, "none", "--temperature", "0")
    assert other.exit_code == 2
    assert "now it is" in other.stderr

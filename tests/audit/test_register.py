from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from foretoken.audit import AuditError
from foretoken.audit.known_faults import KNOWN_FAULTS
from foretoken.audit.register import Outcome, page, run
from foretoken.audit.register_entries import Entry, entries
from foretoken.cli.app import app

ANSWER = {
    "verdict": "PASS",
    "summary": "No deviation found.",
    "details": {"foretoken": "0.1"},
    "findings": [
        {"name": "joint distribution", "observed_tv": 0.05, "expected_tv": 0.06, "detectable_tv": 0.1},
        {"name": "joint distribution", "observed_tv": 0.08, "expected_tv": 0.06, "detectable_tv": 0.09},
        {"name": "transform", "observed_tv": 0.9, "expected_tv": 0.1, "detectable_tv": 0.9},
    ],
    "speculation": {"drafted": 10, "accepted": 4},
    "samples": 123,
}

FAKE = """
import json, pathlib, sys
mode = sys.argv[2]
with open({log!r}, "a") as log:
    log.write(mode + "\\n")
if mode == "stop":
    raise KeyboardInterrupt
if mode == "absent":
    sys.exit("error: it is | not installed")
print(json.dumps({answer}))
"""


@pytest.fixture
def fake(tmp_path):
    """A program in place of the audit, and the modes that it was asked for."""
    log = tmp_path / "log"
    log.touch()
    file = tmp_path / "fake.py"
    file.write_text(FAKE.format(log=str(log), answer=repr(ANSWER)))
    return (sys.executable, str(file)), lambda: log.read_text().split()


def entry(mode):
    return Entry("Foretoken", mode, ("engine", mode))


def test_answers_are_kept_and_the_rest_goes_on(tmp_path, fake):
    program, asked = fake
    first, second, absent = entry("a"), entry("b"), entry("absent")
    out = tmp_path / "register"

    def killed(one, outcome):
        if one is second and outcome is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, [first, second, absent], ["--tv", "0.2"], 5, killed, program)
    assert [one["mode"] for one in json.loads((out / "register.json").read_text())] == ["a"]
    assert "| Foretoken | b | not carried out yet |" in (out / "register.md").read_text()
    (out / "entries" / "foretoken-b.json").write_text('{"engine": "Fore')  # as if it had been cut off
    outcomes = run(out, [first, second, absent], ["--tv", "0.2"], 5, program=program)
    assert asked() == ["a", "b", "absent"]
    assert [one.verdict for one in outcomes] == ["PASS", "NOT RUN", "PASS"]
    run(out, [first, second, absent], ["--tv", "0.2"], 5, program=program)
    assert asked() == ["a", "b", "absent", "absent"]  # what did not run is tried again
    run(out, [first], ["--tv", "0.1"], 5, program=program)
    assert asked()[-1] == "a"  # another command


def test_the_page(tmp_path, fake):
    program, _ = fake
    run(tmp_path / "out", [entry("a"), entry("absent")], ["--tv", "0.2"], 5, program=program)
    text = (tmp_path / "out" / "register.md").read_text()
    assert "| Foretoken | 0.1 | a | PASS | 0.080 (0.060) | 0.100 | 10 drafted, 4 accepted | 123 |" in text
    assert "| Foretoken | absent | error: it is \\| not installed |" in text
    assert "`foretoken audit engine a --tv 0.2`" in text
    (kept,) = (one for one in json.loads((tmp_path / "out" / "register.json").read_text()) if one["mode"] == "a")
    assert kept["upstream"].startswith("https://")


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AuditError, match="name another folder"):
        run(tmp_path / "file", [], [], 5)


def test_every_engine_is_listed_and_names_are_unique():
    found = entries({"vllm": "env/bin/python"})
    engines = {"Foretoken", "Foretoken's server", "transformers", "vLLM", "OpenVINO GenAI", "llama.cpp"}
    assert {one.engine for one in found} == engines
    assert len({one.name for one in found}) == len(found)
    commands = [one.command(()) for one in found if one.engine == "vLLM"]
    assert all(command.endswith("--python env/bin/python") for command in commands)
    assert any(command.startswith("FORETOKEN_VLLM_MEND=0 ") for command in commands)
    with pytest.raises(AuditError, match="environment of 'sglang'"):
        entries({"sglang": "python"})


def test_every_method_of_vllm_is_listed_with_both_batches_with_the_plug_in_and_without():
    modes = {one.mode for one in entries() if one.engine == "vLLM"}
    methods = ["draft-model", "draft-model, drawn drafts", "prompt-lookup"]
    methods += [f"Foretoken's {name}" for name in ("Lookup", "PromptLookup", "Suffix", "NgramStorage", "Retrieval")]
    for method in methods:
        for batch in (1, 16):
            for plug_in in ("Foretoken's plug-in", "no plug-in"):
                assert f"{method}, batch {batch}, {plug_in}" in modes


def test_a_failure_that_is_understood_is_explained_and_a_success_is_not():
    def answer(one, verdict):
        return Outcome(one.engine, one.mode, "command", "https://example.org", verdict, "", "1", "2026-11-23")

    found = entries()
    for fault in KNOWN_FAULTS:
        touched = [one for one in found if fault.explains(one.engine, one.mode)]
        assert touched, fault.title  # a mode that was renamed
        assert fault.title in page([answer(touched[0], "FAIL")])
        assert fault.title not in page([answer(touched[0], "PASS")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--environment", "vllm"], "ENGINE=FILE"),
        (["--environment", "sglang=python"], "environment of 'sglang'"),
        (["--only", "nothing at all"], "no entry contains"),
        (["--tv", "2"], "tv=2.0"),
    ],
)
def test_bad_input(tmp_path, arguments, message):
    result = CliRunner().invoke(app, ["audit", "register", "-o", str(tmp_path), *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_the_list_runs_nothing(tmp_path):
    result = CliRunner().invoke(app, ["audit", "register", "-o", str(tmp_path / "out"), "--list", "--only", "early"])
    assert result.exit_code == 0
    assert "foretoken audit transformers --mode early-exit --tv 0.1" in result.stdout
    assert not (tmp_path / "out").exists()

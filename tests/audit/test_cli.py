from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from audit import test_endpoint as servers
from foretoken.cli.app import app

SAMPLERS = """
from audit.samplers import PlainSampler, leaning

def right(world):
    return PlainSampler(world)

def wrong(world):
    return PlainSampler(world, leaning)

def broken(world):
    return lambda prompt, count, num_tokens, params, seed: [[99] * num_tokens] * count
"""


@pytest.fixture(autouse=True)
def samplers(tmp_path, monkeypatch):
    (tmp_path / "my_samplers.py").write_text(SAMPLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


def test_pass_is_status_0(tmp_path):
    result = run("callable", "my_samplers:right", "--tv", "0.35", "--html", "report.html", "-t", "1.0")
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout
    assert "<svg" in (tmp_path / "report.html").read_text()


def test_quick_is_coarser_and_shorter():
    """And it is said beforehand how much is to be done, on the other stream."""
    result = run("callable", "my_samplers:right", "--quick", "--json", "-t", "1.0")
    plan = json.loads(result.stdout)["plan"]
    assert (result.exit_code, plan["tv"], plan["max_seconds"]) == (0, 0.3, 120.0)
    assert "texts, 120 seconds at most" in result.stderr
    plan = json.loads(run("callable", "my_samplers:wrong", "--quick", "--tv", "0.4", "--json", "-t", "1.0").stdout)[
        "plan"
    ]
    assert (plan["tv"], plan["max_seconds"]) == (0.4, 120.0)


def test_fail_is_status_1():
    result = run("callable", "my_samplers:wrong", "--json", "-t", "1.0")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "FAIL"


def test_inconclusive_is_status_3():
    result = run("callable", "my_samplers:right", "--max-texts", "50", "-t", "1.0")
    assert result.exit_code == 3
    assert "INCONCLUSIVE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["callable", "my_samplers:broken"], "holds the token 99"),
        (["callable", "my_samplers:absent"], "can't be imported"),
        (["callable", "my_samplers"], "MODULE:FUNCTION"),
        (["callable", ":"], "MODULE:FUNCTION"),
        (["callable", "my_samplers:__name__"], "name a function"),
        (["callable", "builtins:len"], "len failed, given a world: TypeError"),
        (["callable", "builtins:id"], "return a function that samples"),
        (["callable", "my_samplers:right", "--audit-seed", "-1"], "seed=-1"),
        (["callable", "my_samplers:right", "--max-seconds", "nan"], "max_seconds"),
        (["callable", "my_samplers:right", "--level", "2"], "level=2.0"),
        (["callable", "my_samplers:right", "--html", "no/such/report.html"], "can't write"),
        (["callable", "my_samplers:right", "-t", "-1"], "temperature is -1.0"),
        (["transformers", "--mode", "magic"], "unknown mode 'magic'"),
        (["transformers", "--option", "x"], "NAME=VALUE"),
        (["engine", "--verifier", "magic"], "unknown verifier"),
        (["vllm", "--python", "/no/such/python"], "can't be started"),
        (["endpoint", "http://127.0.0.1:9", "--target", "a", "--reference", "b"], "one of --world"),
        (["endpoint", "http://127.0.0.1:9", "--world", "nowhere"], "holds no world"),
        (["endpoint", "http://127.0.0.1:9", "--model", "m"], "--tokenizer"),
        (["engine", "--target", "no/such/model"], "no/such/model: there is no such folder"),
        (["transformers", "--mode", "plain", "--target", "/nope"], "/nope: there is no such folder"),
    ],
)
def test_bad_input_is_status_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""  # nothing half-reported


def test_a_world_is_made_served_and_audited(tmp_path):
    result = run("make-world", "here", "--kind", "stranger")
    assert result.exit_code == 0
    (folder,) = (tmp_path / "here").iterdir()
    from foretoken.audit import load_world

    with servers.serving(servers.Server(load_world(folder))) as url:
        result = run("endpoint", url, "--world", str(folder), "--tv", "0.35", "--texts-per-request", "256")
        assert result.exit_code == 0, result.output
        result = run("endpoint", url, "--tokenizer", str(folder / "target"), "--prompts", "none.txt")
        assert result.exit_code == 2
        (tmp_path / "prompts.txt").write_text("a b c a b\nc d e f\n")
        options = ["--tokenizer", str(folder / "target"), "--prompts", "prompts.txt", "--texts-per-request", "64"]
        result = run("endpoint", url, *options, "--tv", "0.35", "--num-tokens", "16")
        assert result.exit_code == 0, result.output

"""`foretoken tune`, and what takes its profile."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.tune import duration
from foretoken.errors import ParameterError
from foretoken.tune import Meter


@pytest.fixture
def tune(call, models, tmp_path, monkeypatch):
    """Calls the command; a rung of the race is one turn, which is enough to see what becomes of it."""
    monkeypatch.setattr("foretoken.tune.plan._PASSES", (1, 1, 1))
    monkeypatch.setattr("foretoken.tune.plan._FEWEST", 1)

    def run(*arguments, target=models.target):
        given = ["--target", target, "-o", tmp_path / "profile.json", "-n", 8, "-t", 0, *arguments]
        return call("tune", *given, COLUMNS="100")

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("hello hello hello\none two three one two three\n", encoding="utf-8")
    return path


def test_a_profile_is_made_and_used(tune, call, models, tmp_path, file, monkeypatch):
    monkeypatch.setattr("foretoken.tune.candidates.registered", lambda: ["prompt-lookup"])
    result = tune("--prompts", file, "--drafter", models.drafter, "--drafter", "retrieval:nowhere", "--budget", "40s")
    assert result.exit_code == 0, result.stderr
    assert "plain decoding" in result.stdout
    assert "Can't be used: retrieval:nowhere: " in result.stdout
    assert [path.name for path in tmp_path.iterdir() if "profile" in path.name] == ["profile.json"]
    profile = json.loads((tmp_path / "profile.json").read_text())
    assert profile["target"] == models.target
    ranked = profile["measured"]["ranked"]
    assert {"none", "prompt-lookup", models.drafter} <= {one["drafter"] for one in ranked}
    assert [ranked[0][name] for name in ("drafter", "verifier", "num_speculative_tokens")] == [
        profile[name] for name in ("drafter", "verifier", "num_speculative_tokens")
    ]
    assert all(one["mean_acceptance_length"] >= 1 and one["round_seconds"] > 0 for one in ranked)

    def written(*arguments):
        found = CliRunner().invoke(app, ["generate", "hello", "-t", "0", "-n", "12", "--json", *map(str, arguments)])
        assert found.exit_code == 0, found.stderr
        return json.loads(found.stdout)["token_ids"]

    assert written("--profile", tmp_path / "profile.json") == written("--target", models.target)


def test_generate_and_chat_take_a_profile_and_options_win(call, models, tmp_path):
    from foretoken.engine.profile import Profile, fingerprint, this_machine

    path = tmp_path / "profile.json"
    Profile(models.target, fingerprint(models.target), models.drafter, "coupled", 3, machine=this_machine()).save(path)

    def chat(*arguments):
        given = ["chat", "--profile", str(path), *arguments]
        return CliRunner().invoke(app, given, input="/set verifier\n/k\n/drafter\n/drafter none\n/k 2\n").stderr

    assert "verifier is coupled\nnum_speculative_tokens is 3\n" in chat()
    assert f"drafter is {models.drafter}\ndrafter is now none\n" in chat()
    assert "verifier is block\nnum_speculative_tokens is auto\n" in chat("--verifier", "block", "-k", "auto")
    assert "drafter is prompt-lookup\n" in chat("--drafter", "prompt-lookup")
    refused = call("generate", "hello", "--profile", path, "--target", models.foreign)
    assert refused.exit_code == 2
    assert "another model" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_measured_trees_come_from_the_profile(models, tmp_path):
    from foretoken.cli.options import ModelOptions
    from foretoken.cli.screen import Screen
    from foretoken.cli.setup import load_engine
    from foretoken.engine.profile import Profile, fingerprint

    path, rates = tmp_path / "profile.json", ((0.5, 0.25), (0.25, 0.125))
    Profile(models.target, fingerprint(models.target), models.drafter, "traversal", 12, "measured", rates).save(path)
    drafter = load_engine(ModelOptions(profile=path), Screen()).drafter
    assert drafter.tree.shape.rates == rates
    assert not load_engine(ModelOptions(profile=path, tree="none"), Screen()).drafter.trees


def test_an_interrupted_run_goes_on(tune, tmp_path, file, monkeypatch):
    whole, calls = Meter.run, []

    def run(self, candidate, turn):
        calls.append(candidate)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return whole(self, candidate, turn)

    monkeypatch.setattr(Meter, "run", run)
    monkeypatch.setattr("foretoken.tune.candidates.registered", lambda: ["prompt-lookup", "suffix"])
    result = tune("--prompts", file)
    assert result.exit_code == 130
    assert "the same command goes on from there" in result.stderr
    assert not (tmp_path / "profile.json").exists()
    assert len((tmp_path / "profile.json.state").read_text().splitlines()) == 1 + 6
    other = tune("--prompts", file, "-n", 9)
    assert other.exit_code == 2
    assert "max_new_tokens" in other.stderr
    result = tune("--prompts", file, "--budget", "30s")
    assert result.exit_code == 0, result.stderr
    assert "goes on with the 6 measurements" in result.stderr
    assert (tmp_path / "profile.json").exists()
    assert not (tmp_path / "profile.json.state").exists()


def test_too_little_time_is_said(tune, file):
    result = tune("--prompts", file, "--budget", "0.001s")
    assert result.exit_code == 2
    assert "give more time with --budget" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "EMPTY"], "holds no prompts"),
        (["--prompts", "/no/such/file"], "can't be read"),
        (["--budget", "soon"], "such as 90s, 5m or 1h"),
        (["-o", "/no/such/folder/profile"], "can't write"),
        (["--target", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_named(tune, tmp_path, arguments, words):
    (tmp_path / "empty").write_text("\n \n")
    result = tune(*[str(tmp_path / "empty") if word == "EMPTY" else word for word in arguments])
    assert result.exit_code == 2, result.stdout
    assert words in result.stderr.replace("\n", " ")
    assert result.stderr.count("\n") == 1


def test_an_output_must_be_named(call):
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "--output" in result.stderr


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("20", 20), (" 3 m", 180)])
def test_times(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-5m", "5 minutes", "inf"])
def test_no_times(text):
    with pytest.raises(ParameterError, match="90s, 5m or 1h"):
        duration(text)

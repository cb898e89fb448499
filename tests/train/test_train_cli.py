"""``foretoken train`` as a user calls it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app

SMALL = ["--num-samples", "40", "-n", "8", "--batch-tokens", "256", "--no-amp", "--dtype", "float32"]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def train(kind: str, target: Path, data: Path, out: Path, *more: object) -> Result:
    return call("train", kind, "--target", target, "--data", data, "-o", out, *SMALL, *more)


def test_a_trained_head_drafts_for_generate(target, data, tmp_path):
    made = train("eagle3", target, data, tmp_path / "head", "--steps", 3, "--target-layers", "1,2", "--licence", "CC0")
    assert made.exit_code == 0, made.output
    assert "sequences" in made.output
    assert "tokens a pass" in made.output
    card = (tmp_path / "head" / "README.md").read_text()
    assert "CC0" in card
    assert "| prompt-lookup, without training |" in card
    # Three steps teach nothing, and both the command and the card say so.
    assert "not worth using" in made.output
    assert "**This drafter is not worth using" in card
    again = train("eagle3", target, data, tmp_path / "head", "--steps", 3, "--target-layers", "1,2")
    assert again.exit_code == 0, again.output
    ran = call("generate", "w1 w2 w3", "--raw", "--target", target, "--drafter", tmp_path / "head", "-n", 5, "-t", 0)
    assert ran.exit_code == 0, ran.output


def test_wrong_input_is_one_line_and_status_2(target, data, tmp_path):
    for arguments, words in (
        (("eagle3", target, data, tmp_path / "a", "--steps", 0), "steps"),
        (("eagle3", target, data, tmp_path / "a", "--target-layers", "one"), "target layers"),
        (("draft", target, data, tmp_path / "a", "-t", "hot"), "temperature"),
        (("medusa", target, tmp_path / "none.txt", tmp_path / "a"), "can't be read"),
        (("medusa", tmp_path / "no_model", data, tmp_path / "a"), "no folder"),
        (("medusa", target, data, tmp_path / "a", "--cache-size", "lots"), "cache"),
    ):
        refused = train(*arguments)
        assert refused.exit_code == 2
        assert words in refused.output
        assert "Traceback" not in refused.output


def test_ctrl_c_keeps_the_run_and_says_how_it_goes_on(target, data, tmp_path, monkeypatch):
    from foretoken.train import loop

    numbers = iter(range(100))

    def stop_from_main():  # where signals arrive
        if next(numbers) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(loop.Optimizers, "step", _then(loop.Optimizers.step, stop_from_main))
    monkeypatch.setattr("sys.argv", ["foretoken", "train", "medusa", "-o", str(tmp_path / "my head")])
    stopped = train("medusa", target, data, tmp_path / "out", "--steps", 20)
    assert stopped.exit_code == 130
    assert "goes on" in stopped.output
    assert "'" in stopped.output  # the command can be pasted
    assert (tmp_path / "out" / "training" / "checkpoint.pt").is_file()
    assert not (tmp_path / "out" / "config.json").exists()
    done = train("medusa", target, data, tmp_path / "out", "--steps", 20)
    assert done.exit_code == 0, done.output


def _then(first, second):
    def both(*arguments, **named):
        result = first(*arguments, **named)
        second()
        return result

    return both


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "draft"])
def test_help_names_the_options(kind):
    shown = call("train", kind, "--help")
    assert shown.exit_code == 0
    assert "--num-samples" in shown.output

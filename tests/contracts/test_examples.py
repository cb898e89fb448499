"""The examples of parts of one's own run, and show what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_custom_drafter_speeds_up_and_changes_nothing(capsys):
    runpy.run_path(str(EXAMPLES / "custom_drafter.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "FollowerTree(branches=2) with verifier 'traversal'" in out
    assert "the target's own output: True" in out
    assert float(re.search(r"length: ([\d.]+)", out)[1]) > 1.5


def test_the_custom_verifier_is_proven_and_the_mistake_is_found(capsys):
    runpy.run_path(str(EXAMPLES / "custom_verifier.py"), run_name="__main__")
    out = capsys.readouterr().out
    errors = {
        name: float(error) for name, error in re.findall(r"(plain|without-residual), tokens .*: error (\S+),", out)
    }
    assert errors["plain"] < 1e-12 < 1e-3 < errors["without-residual"]
    assert re.search(r"accepted [1-9]\d*% of the draft tokens", out)

"""The programs in examples/ run as they stand there."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_ELSEWHERE = {
    "custom_drafter.py": "tests/contracts",
    "custom_verifier.py": "tests/contracts",
    "audit_endpoint.py": "an audit takes minutes; tests/audit runs what it calls",
    "audit_transformers.py": "an audit takes minutes; tests/audit runs what it calls",
    "audit_vllm.py": "needs an environment with vLLM",
}
PRINTS = {
    "quickstart.py": r"\d+ tokens in \d+ target passes: \d\.\d\d tokens a pass\n\d+ of \d+ draft tokens accepted",
    "batch_and_stream.py": r"(?s)'def add\(a, b\):' -> .*'To be, or not to be' -> .*'role': 'user'.* -> ",
    "predicted_output.py": r"[1-9]\d* of \d+ predicted tokens accepted\n\d+ tokens in \d+ target passes, \d+ without",
    "inside_transformers.py": r"(?s)\['def add\(a, b\):.*To be, or not.*\]\n.*def fibonacci\(n\):",
    "asyncio_service.py": "(?s)"
    + "".join(
        rf"(?=.*'{asked}' -> ['\"](?!error))"
        for asked in (r"def add\(a, b\):", "To be, or not to be", "Three spiders have")
    ),
}


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert re.search(PRINTS[name], capsys.readouterr().out)


def test_every_example_is_run_somewhere():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*PRINTS, *RUN_ELSEWHERE}

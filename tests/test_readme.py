"""The README's snippets run as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


# All fenced blocks at once: a search for one language alone would take closing fences for opening ones.
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def test_python_snippets(capsys):
    namespace: dict[str, object] = {}
    snippets = blocks("python")
    assert len(snippets) == 2
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()


COMMANDS = [line for block in blocks("") for line in block.splitlines() if line.startswith("foretoken ")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands(command):
    arguments = shlex.split(command)[1:]
    if "path/or/hub-id" in arguments:
        place = arguments.index("--target")
        del arguments[place : place + 2]
    outcome = CliRunner().invoke(app, arguments, input="hello\n/quit\n")
    assert outcome.exit_code == 0, outcome.output
    assert outcome.output.strip()


def test_there_are_commands():
    assert len(COMMANDS) >= 5

"""Clients of other people, unmodified, in an environment of their own, and the lines of the docs for curl."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from serve_harness import LONGEST, MODEL

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "clients").glob("*.py"))
PYTHON = Path(os.environ.get("FORETOKEN_CLIENTS_PYTHON", ROOT / ".venv-clients" / "bin" / "python"))


@pytest.mark.skipif(not PYTHON.exists(), reason="`make test-clients` installs them")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_client(server, script):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "key", "PYTHONPATH": ""}
    done = subprocess.run(
        [PYTHON, script, server.url, MODEL],
        capture_output=True,
        text=True,
        timeout=4 * LONGEST,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_lines_of_the_docs(server):
    page = (ROOT / "docs" / "serving.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```sh\n")[1:]]
    commands = [block for block in blocks if block.startswith("curl ")]
    assert commands
    for command in commands:
        there = command.replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -sS --fail-with-body ", 1)
        done = subprocess.run(["bash", "-c", there], capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.rstrip().endswith("data: [DONE]")

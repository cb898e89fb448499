"""The wheel as a user gets it: built, installed into an empty folder, run from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str | Path, **options) -> str:
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", folder)
    return next(folder.glob("foretoken-*.whl"))


def test_it_contains_the_pair_and_stays_small(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("target", "drafter"):
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            assert f"foretoken/assets/tiny_pair/{part}/{file}" in names
    for file in ("MODEL_CARD.md", "eagle3/config.json", "eagle3/model.safetensors", "eagle3/README.md"):
        assert f"foretoken/assets/tiny_pair/{file}" in names
    for file in ("index.html", "app.js", "app.css", "icon.svg", "preact.LICENSE"):
        assert f"foretoken/serve/page/{file}" in names
    assert "foretoken/py.typed" in names
    assert not [name for name in names if name.startswith(("tests", "recipes", "web"))]
    assert wheel.stat().st_size < 40e6


def test_it_installs_and_runs(wheel, tmp_path):
    site = tmp_path / "site"
    run("-m", "pip", "install", "--no-deps", "--quiet", "--no-compile", "--target", site, wheel)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    path = run("-c", "import foretoken; print(foretoken.__file__)", env=environment, cwd=tmp_path)
    assert Path(path.strip()).is_relative_to(site)
    options = ("--raw", "--temperature", "0", "-n", "8", "--eager", "--drafter", "prompt-lookup")
    text = run("-m", "foretoken", "generate", "def add(a, b):", *options, env=environment, cwd=tmp_path)
    assert text.strip()

"""GGUF files on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("xllamacpp", reason="GGUF files need llama.cpp: pip install '.[gguf]'")
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "gguf"))

from convert import convert

from foretoken import tiny_pair_path
from foretoken.cli.app import app


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return str(convert(tiny_pair_path() / "drafter", tmp_path_factory.mktemp("cli"), "small", ["BF16"])[0])


def run(*options):
    return CliRunner().invoke(app, ["generate", "1, 2, 3, 1, 2,", "--max-new-tokens", "8", *options])


def test_a_file_writes_with_and_without_speculation(file):
    outputs = []
    for drafter in ("none", "auto", f"auto,{file}", str(tiny_pair_path() / "drafter")):
        result = run("--target", file, "--drafter", drafter, "-t", "0", "--json")
        assert result.exit_code == 0, result.output
        outputs.append(json.loads(result.stdout)["token_ids"])
    assert len(outputs[0]) == 8
    assert all(one == outputs[0] for one in outputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n-ctx", "4"], ["takes 4", "shorten the prompt"]),
        (["--n-ctx", "0"], ["n_ctx is 0"]),
        (["--quantize", "int8"], ["rounded as it comes"]),
        (["--runner", "hf"], ["transformers", "'gguf'"]),
    ],
)
def test_options_that_do_not_fit_a_file_are_told(file, options, words):
    result = run("--target", file, "--raw", *options)
    assert result.exit_code == 2
    assert all(word in result.output.replace("\n", " ") for word in words)


def test_a_broken_file_is_told(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"nonsense, and a lot of it, for a GGUF file")
    result = run("--target", str(tmp_path / "broken.gguf"))
    assert result.exit_code == 2
    assert "is no GGUF file" in result.output

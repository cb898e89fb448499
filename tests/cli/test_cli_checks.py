"""What is wrong with names, paths and options is told at once: before torch or transformers is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from foretoken import drafters, verify
from foretoken.cli import checks
from foretoken.cli.options import LoadOptions, ModelOptions
from foretoken.errors import ForetokenError

_RUN = """
import json, sys
from typer.testing import CliRunner
from foretoken.cli.app import app

done = []
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    slow = {"torch", "transformers", "openvino", "numpy"} & set(sys.modules)
    done.append([result.exit_code, result.stdout, result.stderr, sorted(slow)])
json.dump(done, sys.stdout)
"""


def run(calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Call the command line in a fresh process, where nothing heavy must have been imported after any of the calls."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", _RUN], input=json.dumps(calls), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for call, (_, _, _, slow) in zip(calls, results, strict=True):
        assert not slow, f"{call} imported {slow}"
    return [(code, out, " ".join(err.split())) for code, out, err, _ in results]


def test_names_are_those_of_the_library():
    assert drafters.names() == checks.DRAFTERS
    assert verify.names() == checks.VERIFIERS


def test_mistakes_are_told_before_anything_heavy_is_imported():
    said = [
        (["generate", "hello", "--target", "/no/such/folder"], "there is no folder '/no/such/folder'"),
        (["generate", "hello", "--target", "no-such/model"], "no model of that name has been downloaded"),
        (["chat", "--target", "/no/such/folder"], "there is no folder '/no/such/folder'"),
        (["generate", "hello", "--drafter", "promt-lookup"], "did you mean 'prompt-lookup'?"),
        (["generate", "hello", "--drafter", "telepathy"], "unknown drafter 'telepathy'"),
        (["generate", "hello", "--drafter", "/no/such/folder"], "there is no such folder"),
        (["generate", "hello", "--drafter", "prompt-lookup,sufix"], "did you mean 'suffix'?"),
        (["generate", "hello", "--verifier", "tokn"], "did you mean 'token'?"),
        (["generate", "hello", "--vocab", "intersect"], "did you mean 'intersection'?"),
        (["generate", "hello", "--runner", "natve"], "did you mean 'native'?"),
        (["generate", "hello", "--tree", "statc"], "did you mean 'static'?"),
        (["generate", "hello", "-k", "1000"], "from 0 (no speculation) to 256"),
        (["generate", "hello", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "hello", "--seed", "-1"], "leave it out for a fresh one"),
        (["generate", "hello", "--logprobs", "-1"], "leave it out to report nothing"),
        (["generate", "hello", "--profile", "/no/such/file"], "there is no such file"),
        (["generate", "hello", "--n-ctx", "512"], "--n-ctx is for GGUF files"),
        (["generate", "hello", "--drafter", "auto,draft-model", "--n-gpu-layers", "1"], "--n-gpu-layers is for GGUF"),
        (["generate", "hello", "--raw", "--chat-template", "x"], "--raw makes none: leave one of them out"),
        (["generate", "hello", "--chat-template", "/no/such/file"], "chat template '/no/such/file' can't be read"),
        (["generate", "--prompt-file", "/no/such/file"], "prompt file '/no/such/file' can't be read"),
        (["tune", "-o", "/tmp/profile.json", "--target", "/no/such/folder"], "there is no folder"),
        (["tune", "-o", "/tmp/profile.json", "--drafter", "promt-lookup"], "did you mean 'prompt-lookup'?"),
        (["tune", "-o", "/tmp/profile.json", "--drafter", "no-such/model"], "unknown drafter 'no-such/model'"),
        (["tune", "-o", "/tmp/profile.json", "--n-ctx", "512"], "--n-ctx is for GGUF files"),
        (["tune", "-o", "/tmp/profile.json", "--budget", "soon"], "give a time above 0"),
        (["generate", "hello", "--temprature", "1"], "--temperature"),
    ]
    for (arguments, part), (code, out, err) in zip(said, run([arguments for arguments, _ in said]), strict=True):
        assert code == 2, arguments
        assert part in err
        assert out == ""


def test_help_and_version_import_nothing_heavy():
    for code, out, err in run([["--version"], ["--help"], ["generate", "--help"], ["bench", "run", "--help"]]):
        assert code == 0, err
        assert out


def test_what_is_meant_passes(models, tmp_path):
    for drafter in ("suffix:100", "prompt-lookup,recycling", models.drafter, f"prompt-lookup,{models.drafter}", "none"):
        checks.check_models(ModelOptions(target=models.target, drafter=drafter, num_speculative_tokens=" 3 "))
    checks.check_models(ModelOptions(drafter="draft-model", verifier="lenient:0.5", tree="dynamic"))


def test_options_of_gguf_files_are_for_a_target_or_a_drafter_that_is_one(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    file = str(tmp_path / "model.gguf")
    for target, named in ((file, []), (None, [file]), (None, ["suffix", f"auto,{file}"])):
        checks.check_gguf_options(LoadOptions(target=target, n_ctx=512), named)


def test_names_that_no_folder_can_have_are_named_too():
    for name in ("", " ", "a\0b", "x" * 5000, "~nobody/model", "../no", "a b"):
        with pytest.raises(ForetokenError):
            checks.check_models(ModelOptions(target=name))
        with pytest.raises(ForetokenError):
            checks.check_models(ModelOptions(drafter=name))

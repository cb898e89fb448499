"""The audit of GGUF files: what they claim is computed plainly by llama.cpp."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("xllamacpp", reason="GGUF files need llama.cpp: pip install '.[gguf]'")
pytest.importorskip("gguf", reason='GGUF files of tests need the "gguf" package')
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "gguf"))

import numpy as np
from convert import convert
from typer.testing import CliRunner

from foretoken import load, tiny_pair_path
from foretoken.audit import ReferenceModel, SampleRequest
from foretoken.audit.external import external_subject
from foretoken.cli.app import app
from foretoken.cli.audit_run import end_tokens, load_module, load_reference
from foretoken.models.native.loader import openvino_refusal
from foretoken.models.processor import multiplies_int8
from foretoken.sampling import SamplingParams


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return convert(tiny_pair_path() / "drafter", tmp_path_factory.mktemp("audit"), "small", ["Q8_0"])[0]


def test_the_reference_is_a_plain_pass_over_the_rounded_weights(file):
    reference, tokenizer = load_reference(str(file))
    prompt = tokenizer("The sum of").input_ids
    outputs = [[5, 6, 7], [8], []]
    scores = reference.scores(prompt, outputs)
    assert [len(one) for one in scores] == [3, 1, 0]
    model = load(file)
    text = torch.tensor([[*prompt, 5, 6]])
    steps = torch.arange(text.shape[1])[None] - 1
    logits = model.forward(text, steps, torch.tensor([text.shape[1]]), model.open(1)).logits[0, len(prompt) - 1 :]
    assert np.abs(scores[0] - logits.double().numpy()).max() < 1e-2
    assert end_tokens(reference) == model.eos_token_ids


@pytest.mark.grid
@pytest.mark.parametrize(
    "runner",
    [
        "gguf",
        pytest.param(
            "native",
            marks=pytest.mark.skipif(
                openvino_refusal(torch.float32, torch.device("cpu")) is not None or not multiplies_int8(),
                reason="OpenVINO does not run here, or the processor has no VNNI",
            ),
        ),
    ],
)
def test_an_audit_of_a_file_passes(runner, file):
    options = ["--drafter", "lookup", "--num-tokens", "6", "--quick", "--tv", "0.5", "--json", "--runner", runner]
    result = CliRunner().invoke(app, ["audit", "engine", "--target", str(file), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "PASS"


def test_the_server_of_llama_cpp_may_write_end_tokens(tmp_path, monkeypatch):
    """As often as the model says: a token of probability 0.37 ends outputs."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "target"
    shutil.copytree(tiny_pair_path() / "drafter", folder)
    module, tokenizer = load_module(str(folder))
    prompt = tuple(tokenizer("Thank you.").input_ids)
    probs = ReferenceModel(module).probs(prompt, [[0]], SamplingParams())[0][0]
    end = int(probs.argmax())
    for file in ("config.json", "generation_config.json"):
        told = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**told, "eos_token_id": end}))
    subject = external_subject("llama-server", str(folder), mode="plain", python=sys.executable)
    try:
        samples = subject.sample(SampleRequest(prompt, 12, 2))
    finally:
        subject.close()
    ended = [sample.tokens for sample in samples if sample.tokens[0] == end]
    assert ended == [[end]] * len(ended)
    assert {sample.end_token for sample in samples if len(sample.tokens) == 1} == {end}
    assert 1 <= len(ended) <= 9  # 4.4 on average, with a standard deviation of 1.7


def test_a_runner_that_there_is_none_of_is_refused_before_anything_is_loaded():
    result = CliRunner().invoke(app, ["audit", "engine", "--runner", "lama", "--target", "nowhere.gguf"])
    assert result.exit_code != 0
    assert "use one of 'auto', 'native', 'hf', 'gguf'" in result.output

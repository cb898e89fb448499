"""The audit of rounded targets: what they claim is computed plainly from the rounded weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from foretoken import tiny_pair_path
from foretoken.cli.app import app
from foretoken.cli.audit_run import load_reference
from models.native.test_int4 import rounded_module

TARGET = tiny_pair_path() / "drafter"


def test_the_reference_is_a_plain_pass_over_the_rounded_weights():
    reference, tokenizer = load_reference(str(TARGET), quantize="int4")
    prompt = tokenizer("The sum of").input_ids
    module = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    found = reference.scores(prompt, [[5, 6, 7]])[0]
    with torch.inference_mode():
        exact, rounded = (
            one(torch.tensor([[*prompt, 5, 6]])).logits[0, len(prompt) - 1 :].double().numpy()
            for one in (module, rounded_module(module))
        )
    assert np.abs(found - rounded).max() < 1e-3
    assert np.abs(found - exact).max() > 0.1


def test_an_audit_of_a_rounded_target_passes():
    options = ["--drafter", "lookup", "--num-tokens", "6", "--quick", "--tv", "0.5", "--json", "--quantize", "int4"]
    result = CliRunner().invoke(app, ["audit", "engine", "--target", str(TARGET), *options])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--quantize", "int4"], "--quantize rounds the model that --target names"),
        (["--quantize", "w8a4", "--target", "nowhere"], "use one of 'int8', 'int4', 'w8a8', 'w4a8'"),
    ],
)
def test_what_can_not_be_rounded_is_refused_before_anything_is_loaded(options, named):
    result = CliRunner().invoke(app, ["audit", "engine", *options])
    assert result.exit_code == 2
    assert named in result.output

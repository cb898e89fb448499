"""The audit of a real vLLM, with Foretoken's repair and without; `make test-vllm` makes the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from foretoken.integrations.vllm.plugin import SWITCH

PYTHON = os.environ.get("FORETOKEN_VLLM")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs an interpreter with vLLM in FORETOKEN_VLLM: make test-vllm")

OURS = "foretoken.integrations.vllm."
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    **{
        name: {"method": "custom_class", "model": OURS + name}
        for name in ("Lookup", "PromptLookup", "Suffix", "NgramStorage")
    },
}


def verdict(arguments: list[str], mend: bool) -> str:
    """PASS, FAIL or INCONCLUSIVE."""
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "audit", "vllm", "--python", str(PYTHON), "--quick", "--json", *arguments],
        env={**os.environ, SWITCH: "1" if mend else "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stdout, done.stderr[-2000:]
    found: str = json.loads(done.stdout)["verdict"]
    return found


def drafting(name: str) -> list[str]:
    if name == "draft-model":
        return ["--mode", "draft-model"]
    return ["--speculative-config", json.dumps({**METHODS[name], "num_speculative_tokens": 2})]


@pytest.mark.parametrize("name", ["draft-model", *METHODS])
def test_with_the_repair_outputs_have_the_models_distribution(name: str) -> None:
    assert verdict(drafting(name), mend=True) == "PASS"


@pytest.mark.parametrize("name", ["draft-model", "PromptLookup"])
def test_without_it_they_do_not(name: str) -> None:
    assert verdict(drafting(name), mend=False) == "FAIL"

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

METHODS = {
    "draft-model": ["--mode", "draft-model"],
    "drawn drafts": [
        *("--mode", "draft-model", "--speculative-config"),
        json.dumps({"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}),
    ],
    "ngram": ["--mode", "prompt-lookup"],
    **{name: ["--proposer", name] for name in ("Lookup", "PromptLookup", "Suffix", "NgramStorage", "Retrieval")},
}
RANKS = ["--option", "tensor_parallel_size=2"]


def verdict(arguments: list[str], mend: bool) -> str:
    """PASS, FAIL or INCONCLUSIVE.

    An audit ends with its samples; the limits in seconds are for what hangs. In batches of 1 it takes fewer samples.
    """
    distance = "0.3" if "1" in arguments else "0.2"
    budget = ["--tv", distance, "--max-seconds", "1800"]
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "audit", "vllm", "--python", str(PYTHON), "--json", *budget, *arguments],
        env={**os.environ, SWITCH: "1" if mend else "0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
    )
    assert done.stdout, done.stderr[-2000:]
    found: str = json.loads(done.stdout)["verdict"]
    return found


@pytest.mark.parametrize("name", METHODS)
def test_with_the_repair_outputs_have_the_models_distribution(name: str) -> None:
    assert verdict([*METHODS[name], "--batch", "16"], mend=True) == "PASS"


@pytest.mark.parametrize("name", ["draft-model", "Lookup"])
def test_alone_and_in_two_ranks_they_do_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdict([*METHODS[name], "--batch", "1"], mend=True) == "PASS"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert verdict([*METHODS[name], "--batch", "16", *RANKS], mend=True) == "PASS"


@pytest.mark.parametrize("name", ["draft-model", "drawn drafts", "PromptLookup"])
def test_without_it_they_do_not(name: str) -> None:
    assert verdict([*METHODS[name], "--batch", "16"], mend=False) == "FAIL"

"""What the worker of vLLM makes of its options. The engine itself is tried by `make test-vllm`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import foretoken.peers.workers
from foretoken.peers.launch import request
from tiny import tiny_llama

WORKERS = str(Path(foretoken.peers.workers.__file__).parent)
USUAL = {
    "k": 3,
    "max_length": 64,
    "max_batch": 4,
    "dtype": "float32",
    "cache": "",
    "threads": 1,
}


@pytest.fixture
def made(monkeypatch, tmp_path):
    """The arguments that ``vllm.LLM`` is made with, for a mode and options."""
    module, given = ModuleType("vllm"), []
    module.__version__ = "0"
    module.LLM = lambda **how: given.append(how) or SimpleNamespace(get_metrics=lambda: [])
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.syspath_prepend(WORKERS)
    monkeypatch.delitem(sys.modules, "vllm_worker", raising=False)
    import vllm_worker

    tiny_llama().save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def worker(mode, **options):
        paths = {"target": str(tmp_path), "drafter": str(tmp_path)}
        return vllm_worker.make({**USUAL, **paths, "mode": mode, "options": options})[1]

    def call(mode, **options):
        worker(mode, **options)
        return given[-1]

    call.worker = worker
    yield call
    for name in ("vllm_worker", "protocol"):
        sys.modules.pop(name, None)


def test_modes(made, tmp_path):
    assert made("plain")["speculative_config"] is None
    draft = made("draft-model")["speculative_config"]
    assert draft == {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
        "max_model_len": 64,
    }
    ngram = made("prompt-lookup")["speculative_config"]
    assert (ngram["method"], ngram["num_speculative_tokens"]) == ("ngram", 3)


@pytest.mark.parametrize("name", ["Lookup", "PromptLookup", "Suffix", "NgramStorage", "Retrieval"])
def test_a_proposer_is_a_class_that_there_is(made, name):
    config = made("prompt-lookup", proposer=name)["speculative_config"]
    assert (config["method"], config["num_speculative_tokens"]) == ("custom_class", 3)
    module, _, chosen = config["model"].rpartition(".")
    assert module == "foretoken.integrations.vllm"
    assert hasattr(__import__(module, fromlist=[chosen]), chosen)


def test_vllms_own_suffix_method(made):
    assert made("prompt-lookup", proposer="suffix")["speculative_config"] == {
        "num_speculative_tokens": 3,
        "method": "suffix",
    }


def test_a_setting_without_a_method_adds_to_the_modes_own_and_one_with_it_replaces_it(made):
    drawn = {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}
    config = made("draft-model", speculative_config=drawn)["speculative_config"]
    assert config["method"] == "draft_model"
    assert config["num_speculative_tokens"] == 2
    assert config["draft_sample_method"] == "probabilistic"
    own = {"method": "suffix", "num_speculative_tokens": 5}
    assert made("prompt-lookup", speculative_config=own)["speculative_config"] == own


@pytest.mark.parametrize(("ends", "least"), [(False, 4), (True, 0)])
def test_end_tokens_are_ruled_out_unless_a_request_forbids_it(made, ends, least):
    """A least number of tokens masks them; outputs go on behind them in any case."""
    import vllm

    asked = []

    def generate(prompts, params, **_):
        asked.extend(params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2, 3, 4])]) for _ in prompts]

    vllm.SamplingParams = lambda **how: SimpleNamespace(**how)
    vllm.LLM = lambda **how: SimpleNamespace(get_metrics=lambda: [], generate=generate)
    run = made.worker("plain")
    assert run(request("plain", None, [[1]], 4, {}, [5], ends=ends))["tokens"] == [[1, 2, 3, 4]]
    assert (asked[0].min_tokens, asked[0].max_tokens, asked[0].ignore_eos) == (least, 4, True)


def test_further_options_are_the_engines(made):
    how = made("prompt-lookup", proposer="Lookup", tensor_parallel_size=2, additional_config={"foretoken": {}})
    assert how["tensor_parallel_size"] == 2
    assert how["additional_config"] == {"foretoken": {}}
    assert "proposer" not in how
    how = made("prompt-lookup", proposer="Lookup", drafter="lookup:1000")
    assert how["additional_config"] == {"foretoken": {"drafter": "lookup:1000"}}
    assert "drafter" not in how

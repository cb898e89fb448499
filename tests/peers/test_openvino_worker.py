"""What the worker of OpenVINO GenAI makes of its options, without the engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import foretoken.peers.workers
from tiny import tiny_llama

WORKERS = str(Path(foretoken.peers.workers.__file__).parent)


class Config(SimpleNamespace):
    """Takes any field."""

    max_new_tokens = 0


@pytest.fixture
def made(monkeypatch, tmp_path):
    """``made(**options)``: how the target and the drafter were exported, and the properties of the pipeline."""
    exported, pipelines = [], []

    def export(source, **how):
        exported.append(how)

        def save(folder):
            folder.mkdir(parents=True)
            (folder / "openvino_model.xml").write_text("")

        return SimpleNamespace(save_pretrained=save)

    class Pipeline:
        def __init__(self, folder, scheduler, device, extra):
            pipelines.append((folder, extra))

        def generate(self, inputs, configs):
            metrics = SimpleNamespace(raw_metrics=SimpleNamespace(m_batch_sizes=[1]))
            return [SimpleNamespace(m_request_id=0, m_generation_ids=[[7]], perf_metrics=metrics)]

    fakes = {
        "openvino": {"Tensor": list, "save_model": lambda *_: None},
        "openvino_genai": {
            "__version__": "0",
            "SchedulerConfig": Config,
            "GenerationConfig": Config,
            "ContinuousBatchingPipeline": Pipeline,
            "draft_model": lambda folder, device, **own: (folder, own),
        },
        "openvino_tokenizers": {"convert_tokenizer": lambda *_, **__: (None, None)},
        "optimum": {},
        "optimum.intel": {
            "OVModelForCausalLM": SimpleNamespace(from_pretrained=export),
            "OVWeightQuantizationConfig": lambda **how: how,
        },
    }
    for name, parts in fakes.items():
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(WORKERS)
    monkeypatch.delitem(sys.modules, "openvino_worker", raising=False)
    import openvino_worker

    for part in ("target", "drafter"):
        tiny_llama().save_pretrained(tmp_path / part)

    def call(mode="plain", **options):
        exported.clear()
        given = {"k": 3, "max_length": 64, "max_batch": 1, "dtype": "float32", "cache": str(tmp_path), "threads": 1}
        parts = {part: str(tmp_path / part) for part in ("target", "drafter")}
        run = openvino_worker.make({**given, **parts, "options": options})[1]
        params = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
        run({"mode": mode, "k": 3, "num_tokens": 1, "prompts": [[1]], "seeds": None, "params": params})
        return [*exported], *pipelines[-1]

    yield call
    for name in ("openvino_worker", "protocol"):
        sys.modules.pop(name, None)


def test_targets_are_rounded_where_it_is_asked_for_and_drafters_are_not(made):
    plain, folder, properties = made()
    assert [how.get("quantization_config") for how in plain] == [None]
    assert "quantize" not in properties
    rounded, other, properties = made(quantize="int4", KV_CACHE_PRECISION="f16")
    assert [how.get("quantization_config") for how in rounded] == [sys.modules["openvino_worker"].ROUNDINGS["int4"]]
    assert other != folder
    assert properties["KV_CACHE_PRECISION"] == "f16"
    assert "quantize" not in properties
    assert made(quantize="int4") == ([], other, made(quantize="int4")[2])  # converted once
    drafting = made("draft-model", quantize="int8")[0]
    assert sorted(str(how.get("quantization_config")) for how in drafting) == ["None", "{'bits': 8}"]


def test_roundings_that_there_are_none_of_are_refused(made):
    with pytest.raises(ValueError, match="quantize=int3: choose one of int8, int4, int4_sym"):
        made(quantize="int3")

"""Nothing is compiled inside a request: loading and the making of drafters have compiled all that requests need."""

import pytest

from foretoken import Engine, SamplingParams
from foretoken.drafters import get
from foretoken.models.native import compilation
from foretoken.models.tiny_pair import head_path, load_part

pytest.importorskip("openvino")

PARAMS = (
    SamplingParams(max_new_tokens=12),
    SamplingParams(max_new_tokens=12, temperature=0.9, seed=1),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_k=5, seed=2),
)


def drafter_of(kind, target):
    if kind == "draft-model":
        return load_part("drafter", backend="openvino")
    if kind == "eagle3":
        return get("eagle3", target, head=head_path())
    return get(kind, target)


@pytest.mark.parametrize("kind", ["none", "draft-model", "eagle3", "early-exit:4"])
@pytest.mark.parametrize("verifier", ["token", "coupled"])
def test_nothing_is_compiled_inside_a_request(kind, verifier, monkeypatch):
    target = load_part("target", backend="openvino")
    engine = Engine(target, drafter_of(kind, target), verifier, 5)
    compiled = []

    class Watched(compilation.CompiledGraph):
        def __init__(self, graph, *about):
            compiled.append(graph)
            super().__init__(graph, *about)

    monkeypatch.setattr(compilation, "CompiledGraph", Watched)
    for params in PARAMS:
        for prompt in ("1 + 1 =", [{"role": "user", "content": "How many?"}]):
            engine.generate(prompt, params)
        engine.generate(["a", "b c", "d e f"], params)
    assert compiled == []


def test_graphs_are_compiled_once():
    drafter = load_part("drafter", backend="openvino")
    drafter.warm_up()
    keys = [compilation.GraphKey(), compilation.GraphKey((), 5, True)]
    before = [drafter.backend.graphs(key) for key in keys]
    drafter.warm_up()
    assert before == [drafter.backend.graphs(key) for key in keys]

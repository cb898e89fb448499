"""16-bit weights that are widened before a pass, and not in it: whether that is done, in which graphs, same scores."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tiny
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.tiny_pair import tiny_pair_path
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS
from models.native.test_halves import FAMILIES, HALVES, saved

pytest.importorskip("openvino")

from foretoken.models.native import openvino_backend, widening
from foretoken.models.native.cache import Feed
from foretoken.models.native.compilation import GraphKey
from foretoken.models.native.widening import FEW, MOST, Widening

TEXT = [(7 * at) % 29 + 1 for at in range(60)]
SIZES = (1, 2, 4, 5, 6, 9, 13, 17, 24)


def tensors_in(graph) -> set[str]:
    """Types of the constants of a compiled graph."""
    nodes = graph._request.get_compiled_model().get_runtime_model().get_ordered_ops()
    kinds = [node.get_rt_info() for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const"]
    return {kind["outputPrecisions"].astype(str) for kind in kinds}


def native(source, **options):
    return load(source, dtype="float32", runner="native", backend="openvino", **options)


def passes(model) -> list[torch.Tensor]:
    """Logits of passes of one row over `SIZES` tokens after a prompt, and of one over several rows."""
    backend, found = model.backend, []
    cache = backend.open(6)
    backend.score(cache, [Feed(0, 0, TEXT[:20], 0, None)], [], ())
    for size in SIZES:
        feed = Feed(0, 20, TEXT[20 : 20 + size], 0, None)
        found.append(backend.score(cache, [feed], [(0, node) for node in range(size)], ())[0].clone())
    rows = [Feed(row, 0, TEXT[row : row + 3], 0, None) for row in range(6)]
    found.append(backend.score(cache, rows, [(row, 2) for row in range(6)], ())[0].clone())
    return found


@pytest.fixture
def gains(monkeypatch):
    """``gains(share)``: passes have to gain so much; -inf for any, inf for more than any does."""
    return lambda share: monkeypatch.setattr(widening, "_LEAST_GAIN", share)


def wide():
    """A model with a sum over more numbers than kernels add up at once."""
    return tiny.tiny_llama(32, intermediate_size=5120)


@pytest.mark.grid
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", [*FAMILIES, "wide"])
def test_scores_are_the_same_to_the_last_bit(name, half, tmp_path, gains):
    """Else an output would depend on which graphs there are by then."""
    gains(float("-inf"))
    folder, _ = saved({**MODELS, "wide": wide}[name](), tmp_path, HALVES[half])
    model = native(folder)
    before = passes(model)
    model.backend.narrow._widening.decide()
    several = passes(model)
    model.warm_up((), alone=True)
    for one, *others in zip(before, several, passes(model), strict=True):
        for other in others:
            assert torch.equal(one, other)


def test_outputs_with_a_seed_are_the_same_whatever_ran_before(gains, monkeypatch):
    gains(float("-inf"))
    model, outputs = native(tiny_pair_path() / "target"), []
    for tried in (False, True):
        if not tried:
            monkeypatch.setattr(Widening, "decide", lambda self: None)
        engine = Engine(model, "suffix")
        params = [SamplingParams(temperature=each, seed=3, max_new_tokens=40, ignore_eos=True) for each in (0.0, 0.8)]
        outputs.append([engine.generate("def add(a, b):\n", each).token_ids for each in params])
        outputs[-1] += [one.token_ids for one in engine.generate(["1 + 1 =", "Once upon"] * 3, params[0])]
        assert (model.backend.narrow._widening.graph is not None) == tried
        monkeypatch.undo()
        gains(float("-inf"))
        model.warm_up((), alone=True)
    assert outputs[0] == outputs[1]


def test_scores_are_the_same_over_as_many_tokens_as_it_is_used_for(gains):
    gains(float("-inf"))
    backend = native(tiny_pair_path() / "target").backend
    backend.narrow.decide()
    usual, widened = backend.graphs(GraphKey()), backend.narrow._widening.graph
    assert [backend.narrow.for_tokens(size) for size in (FEW, FEW + 1, MOST, MOST + 1)] == [
        None,
        widened,
        widened,
        None,
    ]
    for size in range(FEW + 1, MOST + 1):
        assert torch.equal(backend.try_out(usual, size), backend.try_out(widened, size))


def test_a_trial_that_fails_changes_nothing(tmp_path, gains, monkeypatch):
    gains(float("-inf"))
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    model = native(folder)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(widening, "seconds_of", fail)
    expected = native(folder)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    outputs = [Engine(one, "suffix").generate([1, 2, 3] * 4, params).token_ids for one in (model, expected)]
    assert outputs[0] == outputs[1]
    narrow = model.backend.narrow
    assert (narrow._widening.decided, narrow._widening.graph) == (True, None)
    assert not any(key.widened for key in model.backend.graphs._found)
    model.warm_up((), alone=True)
    assert narrow._passes


def test_nothing_is_tried_for_a_target_whose_hidden_states_are_read(tmp_path, monkeypatch):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    model, tried = native(folder), []
    monkeypatch.setattr(Widening, "decide", lambda self: tried.append(True))
    params = SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    for layers in ((1,), ()):
        engine = Engine(model, "suffix")
        monkeypatch.setattr(type(engine._loops.drafter), "hidden_layers", layers)
        engine.generate([1, 2], params)
        assert bool(tried) == (not layers)


def test_which_graphs_read_16_bits(tmp_path, gains):
    gains(float("-inf"))
    folder, _ = saved(MODELS["llama, every bias"](), tmp_path, torch.bfloat16)
    backend = native(folder).backend
    backend.narrow.prepare_passes()
    graphs, passes = backend.graphs, backend.narrow._passes
    assert all("bf16" in tensors_in(graphs(key)) for key in (GraphKey(), GraphKey(steps=2), GraphKey(layers=1)))
    assert all("bf16" in tensors_in(graph) for width, graph in passes.items() if width <= FEW)
    used = backend.narrow._widening.graph
    assert used is graphs(GraphKey(widened=True))  # scores are the same here
    narrow = [graph for width, graph in passes.items() if width > FEW]
    assert len(narrow) == 4
    memory = [tensor for graph in (used, *narrow) for tensor, _ in graph._weights._memory]
    # Biases stay as they were stored.
    assert {tensor.element_type.get_type_name() for tensor in memory if len(tensor.shape) > 1} == {"f32"}


def test_several_rows_use_the_graph_from_five_tokens_on(tmp_path, gains, monkeypatch):
    gains(float("-inf"))
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    backend = native(folder).backend
    backend.narrow._widening.decide()
    ran, call = [], type(backend._plain).run
    monkeypatch.setattr(type(backend._plain), "run", lambda graph, arrays: ran.append(graph) or call(graph, arrays))
    cache = backend.open(5)
    for rows in (4, 5):
        backend.score(cache, [Feed(row, 0, [1], 0, None) for row in range(rows)], [(0, 0)], ())
    assert ran == [backend._plain, backend.narrow._widening.graph]


def test_it_is_tried_beside_requests_once_passes_have_lost_as_much(tmp_path, gains):
    gains(float("-inf"))
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    backend = native(folder).backend
    narrow = backend.narrow
    feed = Feed(0, 0, [1, 2, 3], 0, None)
    for feeds, seconds in (([feed] * 2, 1e-9), ([feed, Feed(1, 0, [1], 0, None)], 1e9), ([feed] * 30, 1e9)):
        narrow.took(feeds, seconds)
        narrow.join()
        assert not narrow._widening.decided
    narrow.took([feed] * 2, 1e9)
    narrow.join()
    assert narrow._widening.decided
    assert not narrow._passes


def test_it_is_undone_where_nothing_is_gained(tmp_path, gains):
    gains(float("inf"))
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    model = native(folder)
    model.warm_up((), alone=True)
    backend = model.backend
    assert backend.narrow._widening.graph is None
    assert not any(key.widened for key in backend.graphs._found)
    assert backend._network._widened is None


@pytest.mark.parametrize(
    ("seconds", "equal", "used"), [((1.0, 0.9), True, True), ((1.0, 0.98), True, False), ((1.0, 0.5), False, False)]
)
def test_it_is_used_where_it_gains_and_changes_no_bit(seconds, equal, used, monkeypatch):
    now, dropped, forgotten, runs = [0.0], [], [], []
    monkeypatch.setattr(widening, "perf_counter", lambda: now[0])

    class Graphs:
        def __call__(self, key):
            return key

        def drop(self, key):
            dropped.append(key)

    class Model:
        def run(self, key, tokens):
            runs.append(tokens)
            now[0] += seconds[key.widened]
            return torch.zeros(tokens, 3) + (key.widened and not equal) * 1e-7

    model = Model()
    decision = Widening(Graphs(), model.run, lambda: forgotten.append(True))
    decision.decide()
    assert decision.decided
    assert (decision.graph == GraphKey(widened=True)) == used
    assert (bool(dropped), bool(forgotten)) == (not used, not used)
    count = len(runs)
    decision.decide()
    assert len(runs) == count


@pytest.mark.parametrize("case", ["float32 weights", "int8", "int4", "many weights"])
def test_who_never_tries(case, tmp_path, monkeypatch):
    narrow, wide = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    if case == "many weights":
        monkeypatch.setattr(openvino_backend, "MOST_BYTES", 1000)
    model = native(wide if case == "float32 weights" else narrow, quantize=case if case.startswith("int") else None)
    assert (model.backend.narrow is None) if case == "many weights" else (model.backend.narrow._widening is None)


def test_weights_are_read_once_and_go_with_the_model(tmp_path, gains):
    gains(float("-inf"))
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    model = native(folder)
    model.warm_up((), alone=True)
    weights = model.backend._network._widened
    assert weights.layer(0) is weights.layer(0)
    gone = weakref.ref(weights)
    gc.disable()
    try:
        del weights, model
        assert gone() is None
    finally:
        gc.enable()

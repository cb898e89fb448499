"""Graphs of fixed sizes: same results as those for any number of tokens, and when there are any."""

from __future__ import annotations

import functools

import pytest
import torch

import tiny
from foretoken.drafters import Cascade, Lookup
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.chain import Draws
from foretoken.models.processor import multiplies_tiles
from foretoken.models.tiny_pair import tiny_pair_path
from foretoken.models.widths import PassWidths
from foretoken.policy.policy import Policy
from foretoken.randomness import uniforms
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, longrope, plain

pytest.importorskip("openvino")

from foretoken.models.native import openvino_backend, openvino_network
from foretoken.models.native.cache import Feed
from foretoken.models.native.compilation import CompiledGraph, CompiledGraphs, threads_of
from foretoken.models.native.narrow import CHAIN_WIDTH, WIDTHS
from foretoken.models.native.paging import BLOCK

TEXT = [(7 * i) % 29 + 1 for i in range(200)]


def runs_narrow(model, *, chains=False):
    """The model, with graphs of fixed sizes for its passes, and for chains where a test needs them."""
    model.warm_up((), alone=True)
    for drawn in (False, True) if chains else ():
        model.warm_up_chains(drawn, alone=True)
    return model


@functools.cache
def usual():
    """A model without graphs of fixed sizes, which makes none however long its passes take."""
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    model.backend.narrow.took = lambda *_: None
    return model


@functools.cache
def fixed():
    """The same with all of them, which take much longer to compile than a test to run."""
    return runs_narrow(load(tiny.tiny_llama(), runner="native", backend="openvino"), chains=True)


@pytest.fixture
def run(monkeypatch):
    """Widths of the graphs that run, None for those that take any number of tokens."""
    widths, call = [], CompiledGraph.run

    def watched(graph, arrays):
        widths.append(graph.width)
        return call(graph, arrays)

    monkeypatch.setattr(CompiledGraph, "run", watched)
    return widths


def open_with(model, text, rows=1):
    """A cache of rows of the same text."""
    cache = model.open(rows)
    steps = torch.arange(len(text)).expand(rows, -1)
    model.forward(torch.tensor([text] * rows), steps - 1, torch.full((rows,), len(text)), cache, "none")
    cache.commit(steps, torch.full((rows,), len(text)))
    return cache


def scores(model, cache, tokens, parents=None, **options):
    """Of nodes after one row, or each of several: a chain if no parents are given."""
    size, rows = len(tokens), len(cache.rows)
    above = torch.arange(size) - 1 if parents is None else torch.tensor(parents)
    tokens = torch.tensor(tokens).expand(rows, -1)
    return model.forward(tokens, above.expand(rows, -1), torch.full((rows,), size), cache, **options)


@pytest.mark.grid
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_narrow_chains_are_the_same(draws, steps, run):
    made = []
    uniform = Draws(torch.ones(1), uniforms(torch.arange(1), torch.arange(steps).expand(1, steps), 5))
    for is_fixed in (False, True):
        model = fixed() if is_fixed else usual()
        cache = open_with(model, TEXT[: BLOCK - 3])
        chains = []
        run.clear()
        for new in ([4], [9, 3], [7], [5, 6, 8]):
            chain = model.chain([new], steps, cache, uniform if draws else None)
            chains.append(chain.tokens)
            if draws:
                chains.append(chain.probs)
            cache.commit(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        calls = len(run) // 4
        first = CHAIN_WIDTH if is_fixed else None
        read = [4] if is_fixed else []  # three tokens are too many for the first call, so two are read before
        assert run == [first] * (3 * calls) + read + [first] * calls
        made.append((chains, scores(model, cache, [5, 6]).logits, cache.lengths.tolist()))
    for one, other in zip(made[0][0], made[1][0], strict=True):
        assert one == other if isinstance(one, list) else torch.allclose(one, other, atol=1e-5)
    assert torch.allclose(made[0][1], made[1][1], atol=1e-5)
    assert made[0][2] == made[1][2]


def test_reproducible_draws_are_the_same_whatever_ran_before(run):
    """q of a graph of a fixed size is rounded otherwise, and a process makes it after some requests."""
    module = tiny.tiny_llama()
    plainly, model = (load(module, runner="native", backend="openvino", dtype="bfloat16") for _ in range(2))
    runs_narrow(model, chains=True)
    draws = Draws(torch.ones(1), uniforms(torch.arange(1), torch.arange(3).expand(1, 3), 5), reproducible=True)
    run.clear()
    first, second = (one.chain([[4]], 3, open_with(one, TEXT[:20]), draws) for one in (plainly, model))
    assert set(run) == {None}
    assert first.tokens == second.tokens
    assert torch.equal(first.probs, second.probs)


def test_seeded_requests_draw_so_that_they_can_be_repeated(monkeypatch):
    drawn = []
    target, drafter = tiny.tiny_llama(), load(tiny.tiny_llama(seed=1), runner="native", backend="openvino")
    chain = drafter.chain
    monkeypatch.setattr(drafter, "chain", lambda *args: drawn.append(args[3].reproducible) or chain(*args))
    engine = Engine(target, drafter, num_speculative_tokens=3)
    for seed in (7, None):
        engine.generate([[1, 2, 3]], SamplingParams(temperature=1.0, seed=seed, max_new_tokens=6))
    assert drawn[0] is True
    assert drawn[-1] is False


def test_a_chain_may_begin_with_the_first_token(run):
    expected, model = usual(), fixed()
    run.clear()
    assert model.chain([[5]], 3, model.open(1)).tokens == expected.chain([[5]], 3, expected.open(1)).tokens
    assert run == [CHAIN_WIDTH, None]


def test_rows_may_end_with_the_models_last_position():
    module, model = tiny.tiny_llama(), fixed()
    text = (TEXT * 20)[: model.max_length - 3]
    found = scores(model, open_with(model, text), [4, 5, 6]).logits[0]
    assert torch.allclose(found, plain(module, [*text, 4, 5, 6])[len(text) :], atol=1e-4)


def test_long_texts_have_their_own_frequencies(run):
    module = tiny.tiny_phi3(**longrope(16, 8))
    model = runs_narrow(load(module, runner="native", backend="openvino"))
    for size in (6, 24):
        cache = open_with(model, TEXT[:size])
        run.clear()
        found = scores(model, cache, [4, 5]).logits[0]
        assert run == [4]
        assert torch.allclose(found, plain(module, [*TEXT[:size], 4, 5])[size:], atol=1e-4)


def test_narrow_passes_take_trees(run):
    """Paths of each are scored as chains are, and what is accepted is kept."""
    module, model, text = tiny.tiny_llama(), fixed(), TEXT[: BLOCK - 2]
    cache = open_with(model, text)
    run.clear()
    for tokens, parents, kept, width in (
        ([4, 5, 6, 7, 8], [-1, 0, 0, 2, 1], [0, 2, 3], 6),
        ([9, 3], [-1, -1], [1], 4),
        ([2, 3, 4, 5, 6, 7, 8], [-1, 0, 1, 1, 1, 4, 0], [0, 1, 4, 5], 9),
        ([5, 6, 7], [-1, 0, 1], [0], 4),
    ):
        found = scores(model, cache, tokens, parents).logits[0]
        for node in range(len(tokens)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            expected = plain(module, [*text, *(tokens[one] for one in path)])[-1]
            assert torch.allclose(found[node], expected, atol=1e-4)
        assert run == [width]
        run.clear()
        cache.commit(torch.tensor([kept]), torch.tensor([len(kept)]))
        text = [*text, *(tokens[one] for one in kept)]


def test_several_rows_hidden_states_and_many_tokens_take_the_other_graph(run):
    model = fixed()
    alone, two = open_with(model, TEXT[:9]), open_with(model, TEXT[:9], rows=2)
    run.clear()
    scores(model, alone, [4], hidden_layers=[1])
    alone.commit(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    scores(model, alone, list(range(1, WIDTHS[-1] + 2)))
    scores(model, two, [4])
    assert run == [None] * 3


def test_an_engine_has_them_once_it_is_ready_for_many_requests(run):
    target, drafter = (load(tiny.tiny_llama(), runner="native", backend="openvino") for _ in range(2))
    engine = Engine(target, drafter, num_speculative_tokens=3)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    outputs = [engine.generate(TEXT[:20], params).token_ids for _ in range(2)]
    assert target.pass_widths(()).narrow == ()
    assert set(run) == {None}
    engine.warm_up()
    run.clear()
    outputs.append(engine.generate(TEXT[:20], params).token_ids)
    assert {4, CHAIN_WIDTH} <= set(run)
    assert outputs[0] == outputs[1] == outputs[2]
    run.clear()
    engine.warm_up()
    assert engine.generate(TEXT[:20], params).token_ids == outputs[0]


def test_they_are_made_beside_requests_once_passes_without_them_have_lost_as_much(run):
    """First those that leave no change, then those between; nothing changes in what is generated."""
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    narrow, feed = model.backend.narrow, [Feed(0, 0, [0] * 3, 0, None)]
    engine = Engine(model, "lookup", num_speculative_tokens=5)
    params = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
    expected = engine.generate([1, 2, 3, 4] * 4, params).token_ids
    assert set(run) == {None}
    narrow.took([Feed(0, 0, [0] * 30, 0, None)], 1e9)  # no pass of few tokens
    narrow.took(feed * 2, 1e9)  # no row by itself
    narrow.join()
    assert model.pass_widths(()).narrow == ()
    for seconds, widths in ((1e9, (1, 4, 17)), (1e9, (1, 4, 17))):
        narrow.took(feed, seconds)
        narrow.join()
        assert model.pass_widths(()).narrow == widths
    run.clear()
    assert engine.generate([1, 2, 3, 4] * 4, params).token_ids == expected
    assert {1, 17} <= set(run)
    narrow.took([Feed(0, 0, [0] * 7, 0, None)], 1e9)
    narrow.join()
    assert model.pass_widths(()).narrow == WIDTHS
    run.clear()
    assert engine.generate([1, 2, 3, 4] * 4, params).token_ids == expected
    assert {1, 6} <= set(run)


def test_decoding_goes_on_where_they_can_not_be_made(monkeypatch, run):
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(CompiledGraphs, "__call__", fail)
    for _ in range(2):
        model.backend.narrow.took([Feed(0, 0, [0], 0, None)], 1e9)
        model.backend.narrow.join()
    assert model.pass_widths(()).narrow == ()
    cache = open_with(model, TEXT[:9])
    assert scores(model, cache, [4, 5]).logits.isfinite().all()


def test_nothing_is_compiled_in_a_request_once_an_engine_is_ready(monkeypatch):
    target, drafter = (load(tiny.tiny_llama(), runner="native", backend="openvino") for _ in range(2))
    engine = Engine(target, drafter)
    engine.warm_up()
    made, prepare = [], CompiledGraphs.prepare
    monkeypatch.setattr(
        CompiledGraphs, "prepare", lambda self, keys: made.append(found := prepare(self, keys)) or found
    )
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=20, ignore_eos=True)
        engine.generate([TEXT[:20], TEXT[20:40]], params)
        engine.generate(TEXT[:20], params)
    assert not any(made)


def test_models_of_many_weights_have_none(monkeypatch):
    monkeypatch.setattr(openvino_backend, "MOST_BYTES", 1000)
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    assert model.backend.narrow is None
    assert load(tiny.tiny_llama(), runner="native", backend="openvino").exit_after(1).backend.narrow is None


def test_a_row_alone_has_narrow_passes_and_changes_between_their_graphs():
    widths = PassWidths(8)
    assert widths.plan(3, 0, alone=True) == (3, True)
    widths.narrow = (1, 4, 9)
    found = []
    for size, wanted in ((1, 0), (1, 0), (2, 0), (4, 0), (1, 4), (3, 6), (1, 1), (9, 2)):
        planned = widths.plan(size, wanted, alone=True)
        found.append((*planned, widths.narrow_for(size)))
    expected = [(1, True), (1, False), (4, True), (4, False), (4, False), (9, True), (1, True), (9, True)]
    assert found == [(width, changed, width) for width, changed in expected]
    assert widths.plan(9, 12, alone=True) == (9, False)  # none is as wide as that
    assert widths.narrow_for(9) == 9
    assert widths.plan(3, 9, alone=True) == (9, False)
    assert widths.narrow_for(10) == 0  # another pass than was planned
    assert widths.narrow_for(3) == 4
    assert widths.plan(10, 0, alone=True) == (10, True)
    assert widths.plan(3, 0) == (4, False)


def test_a_planned_width_is_for_the_next_pass_alone(run):
    model = fixed()
    alone, both = open_with(model, TEXT[:9]), model.open(2)
    widths = model.backend.pass_widths(())
    for cache, expected in ((alone, [9]), (alone, [1]), (both, [None]), (alone, [1])):
        if expected != [1]:
            assert widths.plan(1, 9, alone=True)[0] == 9
        run.clear()
        scores(model, cache, TEXT[:1])
        assert run == expected
        rows = len(cache.rows)
        cache.commit(torch.zeros((rows, 0), dtype=torch.int64), torch.zeros(rows, dtype=torch.int64))


def test_the_policy_plans_the_widths_of_a_row_that_has_narrow_passes(monkeypatch):
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    cascade = Cascade([Lookup()], costs=[0.0])
    told, choose = [], Policy.choose
    monkeypatch.setattr(Policy, "choose", lambda self, rows, *args: told.append(args[0]) or choose(self, rows, *args))
    engine = Engine(model, cascade)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    for is_narrow in (False, True):
        if is_narrow:
            runs_narrow(model)
        told.clear()
        engine.generate([1, 2, 3, 4] * 4, params)
        assert told
        assert None not in told
        if is_narrow:  # what is told first is the width of the last pass before there were any
            narrow = model.backend.pass_widths(()).narrow
            found = {last for last, _ in told[1:] if last <= narrow[-1]}
            assert found
            assert found <= set(narrow)
    told.clear()
    engine.generate([[1, 2, 3, 4] * 4] * 2, params)
    assert None not in told


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_form_for_one_operation_computes_the_same(make, monkeypatch):
    monkeypatch.setattr(openvino_network, "joins_mlp", lambda *_: True)
    module = make()
    model = load(module, runner="native", backend="openvino")
    cache = open_with(model, TEXT[:40], rows=2)
    new = TEXT[50:53]
    for found in scores(model, cache, new).logits:
        assert torch.allclose(found, plain(module, [*TEXT[:40], *new])[40:], atol=1e-4)


@pytest.mark.skipif(not multiplies_tiles(), reason="needs a processor with AMX")
@pytest.mark.parametrize(("limit", "threads"), [(64_000_000, 2), (64_000_000, 1), (1_000_000, 2)])
def test_small_models_have_one_operation_for_an_mlp(limit, threads, monkeypatch):
    monkeypatch.setattr(openvino_backend, "MOST_BYTES", limit)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model = load(tiny_pair_path() / "target", runner="native", backend="openvino", dtype="bfloat16")
    graph = model.backend._plain._request.get_compiled_model().get_runtime_model()
    kinds = [node.get_rt_info()["layerType"].astype(str) for node in graph.get_ordered_ops()]
    alone = threads_of(threads) == 1  # or there is one processor
    assert kinds.count("LLMMLP") == (model.num_layers if limit > model.weight_bytes and not alone else 0)
    assert scores(model, model.open(1), [5]).logits.isfinite().all()


@pytest.mark.skipif(not multiplies_tiles(), reason="needs a processor with AMX")
def test_with_amx_all_graphs_of_a_model_give_the_same_scores(run):
    """Else a seed would give another output once there are graphs of fixed sizes."""
    model = load(tiny_pair_path() / "target", runner="native", backend="openvino", dtype="bfloat16")
    found = []
    for _ in range(2):
        caches = [open_with(model, TEXT[:40]) for _ in range(2)]
        run.clear()
        found += [scores(model, caches[0], TEXT[50:51]).logits, scores(model, caches[1], TEXT[50:54]).logits]
        runs_narrow(model)
    assert run == [1, 4]
    assert all(torch.equal(one, other) for one, other in zip(found[:2], found[2:], strict=True))

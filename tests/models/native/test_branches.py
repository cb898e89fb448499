"""Graphs as branches of one: scores as by themselves, shared memory, and what happens where there can be none."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

import tiny
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.models.chain import Draws
from foretoken.randomness import uniforms
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, plain
from models.native.test_halves import saved
from models.native.test_narrow import open_with, scores

pytest.importorskip("openvino")

import openvino as ov

from foretoken.models.native import compilation, openvino_backend, paging
from foretoken.models.native.branching import Branched
from foretoken.models.native.cache import Feed
from foretoken.models.native.chaining import CHAIN_STEPS
from foretoken.models.native.compilation import Branch, CompiledGraph, CompiledGraphs, GraphKey, together
from foretoken.models.native.narrow import CHAIN_WIDTH, PROMPT_WIDTHS, WIDTHS
from foretoken.models.native.openvino_graph import MOST_PICKS
from foretoken.models.native.paging import BLOCK, FIRST_BLOCKS, BlockPool

TEXT = [(7 * i) % 29 + 1 for i in range(200)]


def native(source, **options):
    return load(source, runner="native", backend="openvino", **options)


def keys_of(widths=WIDTHS):
    return [GraphKey(width=width) for width in widths]


def is_branch(graph):
    return isinstance(graph, Branch)


@pytest.fixture
def by_itself(monkeypatch):
    """Switches branches off, for models that are loaded from then on."""

    def switch():
        monkeypatch.setattr(CompiledGraphs, "_as_branches", lambda *_: None)

    return switch


ANY = [(name, dtype) for dtype in ("float32", "bfloat16") for name in MODELS]


@pytest.fixture(scope="module", params=ANY, ids="-".join)
def any_model(request):
    """A model, natively and as it was: tests of it need the same branches, which are compiled for the first of them."""
    name, dtype = request.param
    module = MODELS[name]()
    return native(module, dtype=dtype), module


@pytest.mark.grid
def test_scores_are_those_of_graphs_by_themselves(any_model):
    """To the last bit, over histories: branches take turns at random, over chains and trees."""
    backend = any_model[0].backend
    backend.graphs.prepare(together(keys_of((*WIDTHS, *PROMPT_WIDTHS))))
    branches = {key.width: backend.graphs(key) for key in together(keys_of())}
    alone = {key.width: backend.graphs(key) for key in keys_of()}
    assert all(map(is_branch, branches.values()))
    assert not any(map(is_branch, alone.values()))
    numbers, at = random.Random(3), 0
    caches = [backend.open(1) for _ in range(2)]
    while at < 3 * BLOCK:
        width = numbers.choice(WIDTHS)
        tokens = [numbers.randrange(1, 30) for _ in range(width)]
        parents = [numbers.randrange(-1, node) for node in range(width)] if numbers.random() < 0.4 else None
        found = []
        for cache, graphs in zip(caches, (branches, alone), strict=True):
            arrays = backend._arrays(cache, [Feed(0, at, tokens, 0, parents)])
            found.append(graphs[width].run(arrays | {"picks": list(range(width))})[0])
        assert torch.equal(*found)
        at += width if parents is None else 0


@pytest.mark.grid
@pytest.mark.parametrize("drawn", [False, True])
def test_chains_are_those_of_graphs_by_themselves(drawn, by_itself):
    module, found = tiny.tiny_llama(), []
    for switched in (False, True):
        if switched:
            by_itself()
        model = native(module)
        model.warm_up_chains(drawn, alone=True)
        chains = [model.backend.narrow._chains[CHAIN_WIDTH, steps, drawn] for steps in CHAIN_STEPS]
        assert all(map(is_branch, chains)) != switched
        cache, drafted = model.open(1), []
        for turn, lag in enumerate((1, 2, 7, 1, 40, 16, 3, 18, 19, 2)):
            steps = 1 + turn % 7
            units = uniforms(torch.arange(1), torch.arange(steps).expand(1, steps), turn)
            draws = Draws(torch.ones(1), units) if drawn else None
            chain = model.chain([TEXT[turn : turn + lag]], steps, cache, draws)
            drafted += [chain.tokens, *([chain.probs] if drawn else [])]
            cache.commit(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        found.append(drafted)
    for one, other in zip(*found, strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)


@pytest.fixture
def widths(monkeypatch):
    """Of the graphs that run, None for those that take any number of tokens."""
    found, run = [], CompiledGraph.run
    monkeypatch.setattr(CompiledGraph, "run", lambda graph, *args: found.append(graph.width) or run(graph, *args))
    return found


def test_prompts_have_the_same_scores_in_graphs_of_their_own(any_model, widths):
    """To the last bit, the scores of the tokens after them included: which graphs there are depends on what ran."""
    backend, found = any_model[0].backend, []
    backend.narrow._forget()  # in whatever order tests run
    for prepared in (False, True):
        if prepared:
            backend.narrow.prepare_passes()
        widths.clear()
        scored, used = [], []
        for begin, size in ((0, 18), (0, 33), (5, 34), (40, 65), (0, 66), (40, 20)):
            cache = backend.open(1)
            if begin:
                backend.score(cache, [Feed(0, 0, TEXT[:begin], 0, None)], [], ())
            widths.clear()
            for picks in ([size - 1], list(range(size - MOST_PICKS, size))):
                given = [(0, node) for node in picks]
                scored.append(backend.score(cache, [Feed(0, begin, TEXT[-size:], 0, None)], given, ())[0])
            used += widths
            scored.append(backend.score(cache, [Feed(0, begin + size, [3, 4, 5], 0, None)], [(0, 2)], ())[0])
        assert used == [each for width in (33, 33, 65, 65, None, 33) for each in [width if prepared else None] * 2]
        found.append(scored)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("any_model", ANY[: len(MODELS)], ids="-".join, indirect=True)
def test_narrow_passes_give_the_models_scores(any_model, widths):
    model, module = any_model
    model.warm_up((), alone=True)
    text = TEXT[: BLOCK - 4]  # the widest pass and its padding begin another block
    cache = open_with(model, text)
    widths.clear()
    for size, width in ((1, 1), (2, 4), (4, 4), (5, 6), (7, 9), (1, 1)):
        new = TEXT[50 : 50 + size]
        found = scores(model, cache, new).logits[0]
        assert torch.allclose(found, plain(module, [*text, *new])[len(text) :], atol=1e-4)
        assert widths == [width]
        widths.clear()
        kept = size - size // 2
        cache.commit(torch.arange(kept)[None], torch.tensor([kept]))
        text = [*text, *new[:kept]]


def test_which_passes_over_prompts_have_graphs_of_their_own():
    backend = native(tiny.tiny_llama()).backend
    narrow, feed = backend.narrow, Feed(0, 0, [1] * 20, 0, None)
    assert narrow.for_pass([feed], 1) is None
    narrow.prepare_passes()
    assert narrow.for_pass([feed], 1).width == 33
    assert narrow.for_pass([feed], MOST_PICKS).width == 33
    assert narrow.for_pass([feed], MOST_PICKS + 1) is None
    assert narrow.for_pass([feed, feed], 2) is None
    assert narrow.for_pass([Feed(0, 0, [1] * 66, 0, None)], 1) is None


@pytest.mark.grid
@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4"}])
def test_prompts_have_none_where_padding_tells(options):
    backend = native(tiny.tiny_llama(), **options).backend
    backend.narrow.prepare_passes()
    assert set(backend.narrow._passes) == set(WIDTHS)
    assert backend.narrow.for_pass([Feed(0, 0, [1] * 20, 0, None)], 1) is None


def test_outputs_with_a_seed_are_the_same_before_there_are_any_and_after():
    target, drafter = native(tiny.tiny_llama(), dtype="bfloat16"), native(tiny.tiny_llama(seed=1), dtype="bfloat16")
    engine, outputs = Engine(target, drafter, num_speculative_tokens=3), []
    for turn in range(2):
        if turn:
            engine.warm_up()
        params = SamplingParams(temperature=0.8, seed=3, max_new_tokens=30, ignore_eos=True)
        outputs.append([engine.generate(TEXT[:size], params).token_ids for size in (15, 20, 40, 62, 90)])
    assert outputs[0] == outputs[1]


def test_keys_and_values_of_zeros_are_seen_to_be_written():
    """Those of a padding token are, whose embedding is of zeros in many models."""
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.get_input_embeddings().weight[0] = 0.0
    backend = native(module).backend
    backend.narrow.prepare_passes()
    assert all(map(is_branch, backend.narrow._passes.values()))


@pytest.mark.grid
@pytest.mark.parametrize("quantize", [None, "int8", "int4", "w8a8", "w4a8"])
def test_branches_share_weights(quantize):
    backend = native(tiny.tiny_llama(), dtype="bfloat16", quantize=quantize).backend

    def places(keys):
        """Where matrices lie, of each graph."""
        graphs = [backend.graphs(key) for key in keys]
        memory = [[array for tensor, array in graph._weights._memory if len(tensor.shape) > 1] for graph in graphs]
        return [{array.ctypes.data for array in arrays} for arrays in memory]

    first, *others = places(together(keys_of((1, 4, 17))))
    assert first
    assert all(other == first for other in others)
    first, other = places(keys_of((1, 4)))
    assert first != other  # what is joined of several matrices is made for each graph


def test_outputs_with_a_seed_are_the_same_with_and_without(by_itself, tmp_path):
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    outputs = []
    for switched in (False, True):
        if switched:
            by_itself()
        target, drafter = native(folder, dtype="bfloat16"), native(tiny.tiny_llama(), dtype="bfloat16")
        engine = Engine(target, drafter, num_speculative_tokens=3)
        engine.warm_up()
        assert is_branch(target.backend.narrow._passes[1]) != switched
        params = [SamplingParams(temperature=each, seed=3, max_new_tokens=40, ignore_eos=True) for each in (0.0, 0.8)]
        outputs.append([engine.generate(TEXT[: 9 + turn], each).token_ids for turn in range(3) for each in params])
    assert outputs[0] == outputs[1]


def test_blocks_beyond_what_was_set_aside_take_the_other_graph(monkeypatch):
    """A row takes more of them in the middle of its output; later on there are branches over the new memory."""
    monkeypatch.setattr(openvino_backend, "_ADDRESSED", 2 * FIRST_BLOCKS * BLOCK)
    module = tiny.tiny_llama(max_position_embeddings=128)
    target, plain = native(module), native(module)
    drafter = native(tiny.tiny_llama(seed=1, max_position_embeddings=128))
    engine, expected = Engine(target, drafter, num_speculative_tokens=3), Engine(plain, None)
    engine.warm_up()
    narrow, pools = target.backend.narrow, [model.backend.pool for model in (target, drafter)]
    asides = {pool: len(pool.memory()[0]) for pool in pools}
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    texts = [TEXT[at : at + 50] for at in range(5)]
    answers = [expected.generate(text, params).token_ids for text in texts]
    assert engine.generate(texts[0], params).token_ids == answers[0]
    assert all(map(is_branch, narrow._passes.values()))
    engine.release()
    kept = []
    for request, text in enumerate(texts[1:], start=1):
        for pool in pools if request == 1 else ():  # another row takes all blocks but three
            while len(pool.tensors[0]) < asides[pool] or pool.num_free > 3:
                kept.append(pool.take())
        assert engine.generate(text, params).token_ids == answers[request]
        if request == 1:
            assert all(pool.moves for pool in pools)
            assert target.pass_widths(()).narrow == ()
            assert not narrow._passes
        if request == 2:
            engine.warm_up()
            assert all(map(is_branch, narrow._passes.values()))
            assert not any(
                graph.moved for graph in (*narrow._passes.values(), *drafter.backend.narrow._chains.values())
            )


def test_a_pool_that_moves_between_two_looks_is_noticed():
    """Blocks are taken when a graph has been chosen already."""
    backend = native(tiny.tiny_llama()).backend
    backend.narrow.prepare_passes()
    expected = native(tiny.tiny_llama()).backend
    found = []
    for each in (backend, expected):
        cache = each.open(1)
        each.score(cache, [Feed(0, 0, TEXT[: 3 * BLOCK], 0, None)], [(0, 0)], ())
        take = each.pool.take

        def move(pool=each.pool, take=take):
            for room in pool._rooms:
                room._memory, old = room._mapped(len(room.tensor)), room.tensor
                room.tensor = room._view(len(old))
                room.tensor.copy_(old)
                old.zero_()  # else a graph that ran on there would find the same
            pool.tensors, pool.version, pool.moves = [room.tensor for room in pool._rooms], pool.version + 1, 1
            return take()

        each.pool.take = move
        found.append(each.score(cache, [Feed(0, 3 * BLOCK, [5, 6], 0, None)], [(0, 0), (0, 1)], ())[0])
    assert torch.allclose(*found, atol=1e-5)
    assert backend.narrow.for_pass([Feed(0, 40, [5], 0, None)], 1) is None


def move(pool):
    """Have a pool take blocks until it lies elsewhere; they are not given back."""
    before = pool.moves
    while pool.moves == before:
        pool.take()


def test_nothing_is_kept_of_chains_whose_pool_has_moved_and_they_are_made_again(monkeypatch):
    monkeypatch.setattr(openvino_backend, "_ADDRESSED", 2 * FIRST_BLOCKS * BLOCK)
    model = native(tiny.tiny_llama(max_position_embeddings=128))
    model.warm_up_chains(False, alone=True)
    narrow, pool = model.backend.narrow, model.backend.pool
    branches = narrow._chains[CHAIN_WIDTH, 1, False]._branches
    assert not any(isinstance(each, ov.Model | Branched) for each in vars(branches).values())
    old = weakref.ref(branches)
    del branches
    move(pool)
    cache = model.open(1)
    expected = native(tiny.tiny_llama(max_position_embeddings=128))
    assert model.chain([[5]], 1, cache).tokens == expected.chain([[5]], 1, expected.open(1)).tokens
    narrow.join()
    gc.collect()
    assert old() is None
    assert set(narrow._chains) == {
        *((CHAIN_WIDTH, steps, False) for steps in CHAIN_STEPS),
        (4, 1, False),
        (17, 1, False),
    }
    assert all(is_branch(graph) and not graph.moved for graph in narrow._chains.values())


def test_chains_that_can_not_be_made_again_are_not_tried_in_every_round(monkeypatch):
    monkeypatch.setattr(openvino_backend, "_ADDRESSED", 2 * FIRST_BLOCKS * BLOCK)
    model = native(tiny.tiny_llama(max_position_embeddings=128))
    model.warm_up_chains(False, alone=True)
    move(model.backend.pool)
    tried = []

    def fail(*_):
        tried.append(1)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(CompiledGraphs, "prepare", fail)
    for _ in range(3):
        assert len(model.chain([[5]], 2, model.open(1)).tokens[0]) == 2
        model.backend.narrow.join()
    assert len(tried) == 1


def test_graphs_whose_pool_has_moved_are_compiled_anew(monkeypatch):
    monkeypatch.setattr(openvino_backend, "_ADDRESSED", 2 * FIRST_BLOCKS * BLOCK)
    backend = native(tiny.tiny_llama(max_position_embeddings=128)).backend
    keys = together(keys_of((1, 4)))
    first = [backend.graphs(key) for key in keys]
    assert backend.graphs.prepare(keys) == []
    move(backend.pool)
    assert backend.graphs.prepare(keys) == keys
    assert not {*first} & {backend.graphs(key) for key in keys}
    assert not any(backend.graphs(key).moved for key in keys)


def test_graphs_that_are_added_in_two_threads_are_kept():
    backend = native(tiny.tiny_llama()).backend
    for _ in range(2):
        backend.narrow._passes = {}  # as the second thread found it
        backend.narrow.prepare_passes()
    assert backend.graphs.prepare(together(keys_of((*WIDTHS, *PROMPT_WIDTHS)))) == []


def test_graphs_whose_pool_moves_while_they_are_compiled_are_not_run(monkeypatch):
    """Blocks that were taken since lie beyond what they know: they would write to other memory."""
    monkeypatch.setattr(openvino_backend, "_ADDRESSED", 2 * FIRST_BLOCKS * BLOCK)
    backend, compiled = native(tiny.tiny_llama(max_position_embeddings=128)).backend, compilation._compile
    ran, run, made = [], Branch.run, []
    monkeypatch.setattr(Branch, "run", lambda self, arrays: ran.append(self.moved) or run(self, arrays))

    def compile_and_move(*args):
        if not made:
            made.append(move(backend.pool))
        return compiled(*args)

    monkeypatch.setattr(compilation, "_compile", compile_and_move)
    keys = together(keys_of((1, 4)))
    assert not any(is_branch(backend.graphs(key)) for key in keys)
    assert not ran
    backend.graphs.drop(keys)
    branches = [backend.graphs(key) for key in keys]
    assert all(map(is_branch, branches))
    ran.clear()
    backend.try_out(branches[0])
    move(backend.pool)
    backend.try_out(branches[0])
    assert ran == [False]


def test_a_token_without_an_embedding_is_no_reason_against_branches():
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.model.embed_tokens.weight[0] = 0.0  # what padding often has
    backend = native(module).backend
    assert all(is_branch(backend.graphs(key)) for key in together(keys_of((1, 4))))


def test_a_pool_moves_when_all_that_is_set_aside_is_in_use():
    pool = BlockPool(2, 1, 8, torch.float32, most=5 * FIRST_BLOCKS * BLOCK)
    aside = len(pool.memory()[0])
    for _ in range(aside):
        pool.take()
    assert (pool.moves, len(pool.tensors[0]), pool.num_free) == (0, aside, 0)
    pool.take()
    assert pool.moves == 1


def test_a_pool_without_memory_to_move_to_stays_as_it_is(monkeypatch):
    pool = BlockPool(2, 1, 8, torch.float32)
    while pool.num_free:
        pool.take()
    made, set_aside = [], paging._Room._set_aside

    def fail_third(*args):
        made.append(1)
        if len(made) == 3:
            raise OSError("no memory")
        return set_aside(*args)

    monkeypatch.setattr(paging._Room, "_set_aside", fail_third)
    before = [tensor.data_ptr() for tensor in pool.memory()]
    with pytest.raises(OSError, match="no memory"):
        pool.take()
    assert [tensor.data_ptr() for tensor in pool.memory()] == before
    assert (pool.moves, pool.version, len(pool.tensors[0])) == (0, 0, FIRST_BLOCKS)
    for tensor in pool.tensors:  # the next pass writes
        tensor[3] = 2.0
    pool.take()
    assert all(bool((tensor[3] == 2.0).all()) for tensor in pool.tensors)


def no_addresses(monkeypatch):
    monkeypatch.setattr(BlockPool, "sets_aside", property(lambda pool: False))


def copied_keys(monkeypatch):
    """What a runtime would do that copies constants."""
    memory = BlockPool.memory
    monkeypatch.setattr(BlockPool, "memory", lambda pool: [tensor.clone() for tensor in memory(pool)])


def refusal(monkeypatch):
    def fail(*_):
        raise RuntimeError("unsupported")

    monkeypatch.setattr(compilation, "branched", fail)


@pytest.mark.grid
@pytest.mark.parametrize("change", [no_addresses, copied_keys, refusal])
def test_each_graph_is_compiled_by_itself_where_branches_are_impossible(change, monkeypatch):
    change(monkeypatch)
    module = tiny.tiny_llama()
    model = native(module)
    keys = together(keys_of())
    model.backend.graphs(keys[0])
    assert model.backend.graphs.prepare(keys) == keys[1:]  # so that they are compiled in parallel
    model.warm_up((), alone=True)
    assert set(model.backend.narrow._passes) == set(WIDTHS)
    assert not any(map(is_branch, model.backend.narrow._passes.values()))
    params = SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True)
    outputs = [Engine(each, "lookup").generate(TEXT[:20], params).token_ids for each in (model, native(module))]
    assert outputs[0] == outputs[1]


def test_16_bit_weights_that_float32_is_computed_with_have_none(tmp_path):
    """The runtime would widen them when it compiles a branch, and read twice as many bytes in every pass."""
    folder, _ = saved(MODELS["llama"](), tmp_path, torch.bfloat16)
    for dtype, expected in (("float32", False), ("bfloat16", True)):
        backend = native(folder, dtype=dtype).backend
        backend.narrow.prepare_passes()
        assert all(is_branch(graph) == expected for graph in backend.narrow._passes.values())

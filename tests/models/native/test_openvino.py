"""What only the OpenVINO backend has: blocks that batches share, and chains of steps in one call."""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import tiny
from foretoken.drafters import Cascade, PromptLookup
from foretoken.engine import calibration
from foretoken.engine.engine import Engine
from foretoken.errors import ModelError
from foretoken.models import load
from foretoken.models.chain import Draws
from foretoken.models.feed import feed
from foretoken.randomness import uniforms
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, longrope, plain, skip_unless_usable

pytest.importorskip("openvino")

from foretoken.models.native import compilation
from foretoken.models.native.chaining import CHAIN_STEPS
from foretoken.models.native.compilation import CompiledGraph
from foretoken.models.native.paging import BLOCK, LEAST_CONTEXT, BlockPool, PagedStore, context_room
from foretoken.models.widths import PassWidths


def free(pool: BlockPool) -> int:
    return pool.num_free


def filled(texts: list[list[int]], model):
    """A cache of these texts."""
    cache = model.open(len(texts))
    width = max(map(len, texts))
    steps = torch.arange(width).expand(len(texts), width)
    tokens, counts = torch.zeros_like(steps).clone(), torch.tensor([len(text) for text in texts])
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    model.forward(tokens, steps - 1, counts, cache, "none")
    cache.commit(steps, counts)
    return cache


def texts_of(*lengths: int) -> list[list[int]]:
    return [[(7 * i + 3 * row) % 29 + 1 for i in range(length)] for row, length in enumerate(lengths)]


def next_logits(model, cache, tokens):
    size = len(tokens)
    minus = torch.full((size, 1), -1)
    return model.forward(torch.tensor(tokens)[:, None], minus, torch.ones(size, dtype=torch.int64), cache).logits[:, 0]


def test_blocks_are_shared_and_come_back():
    module = tiny.tiny_llama()
    model = load(module, runner="native", backend="openvino")
    pool = model.backend.pool
    everything = free(pool)
    first, second = texts_of(3 * BLOCK, 5, BLOCK + 1), texts_of(200)
    ours, theirs = filled(first, model), filled(second, model)
    assert pool.tensors[0].shape[0] - free(pool) == 1 + 3 + 1 + 2 + 7  # one is where padding goes
    for cache, texts in ((ours, first), (theirs, second)):
        found = next_logits(model, cache, [4] * len(texts))
        for row, text in enumerate(texts):
            assert torch.allclose(found[row], plain(module, [*text, 4])[-1], atol=1e-4)
    del ours, theirs, cache
    gc.collect()
    assert free(pool) == pool.tensors[0].shape[0] - 1 >= everything


def test_rows_that_split_don_t_share_what_they_write():
    module = tiny.tiny_llama()
    model = load(module, runner="native", backend="openvino")
    texts = texts_of(BLOCK + 3, 4)
    cache = filled(texts, model)
    tables = [list(table) for table in cache.store.tables]
    cache.select([1, 0, 0, -1])
    assert cache.store.tables[:2] == tables[::-1]  # only the lists have moved
    assert not set(cache.store.tables[1]) & set(cache.store.tables[2])
    texts = [texts[1], texts[0], list(texts[0]), []]
    one = torch.ones(4, dtype=torch.int64)
    for turn in range(3):
        tokens = [turn + row + 1 for row in range(4)]
        found = next_logits(model, cache, tokens)
        cache.commit(torch.zeros(4, 1, dtype=torch.int64), one)
        for row, token in enumerate(tokens):
            texts[row].append(token)
            assert torch.allclose(found[row], plain(module, texts[row])[-1], atol=1e-4)


def test_a_pool_that_grows_keeps_what_it_holds():
    module = tiny.tiny_llama(max_position_embeddings=2048)
    model = load(module, runner="native", backend="openvino")
    pool = model.backend.pool
    blocks = pool.tensors[0].shape[0]
    texts = texts_of(700, 20)
    cache = filled(texts, model)
    assert pool.tensors[0].shape[0] > blocks
    found = next_logits(model, cache, [5, 6])
    for row, token in enumerate((5, 6)):
        assert torch.allclose(found[row], plain(module, [*texts[row], token])[-1], atol=1e-4)


def test_store_moves_slots_across_blocks():
    pool = BlockPool(layers=1, groups=2, head_dim=4, dtype=torch.float32)
    store = PagedStore(pool, 1)
    table = store.reserve(0, 2 * BLOCK)
    pool.tensors[0][table[1], :, 3] = 7.0
    store.move([0], [BLOCK + 3], [BLOCK - 1])
    assert (pool.tensors[0][table[0], :, BLOCK - 1] == 7.0).all()


@pytest.mark.parametrize(("most", "moves"), [(0, True), (2000, False), (1 << 50, True)])
def test_pools_grow_where_they_are_as_far_as_addresses_were_set_aside(most, moves):
    """More addresses than there are leave the pool with what it needs."""
    pool = BlockPool(1, 2, 4, torch.float32, most)
    begin = pool.tensors[0].data_ptr()
    pool.tensors[0].fill_(3.0)
    size = len(pool.tensors[0])
    for _ in range(size + 1):
        pool.take()
    assert len(pool.tensors[0]) == size + size // 2
    assert (pool.tensors[0].data_ptr() != begin) == moves
    assert (pool.tensors[0][:size] == 3.0).all()
    assert not pool.tensors[0][size:].any()


@functools.cache
def chaining(name: str, quantize: str | None):
    """One model for chains of all lengths, which are compiled once."""
    return load(MODELS[name](), runner="native", backend="openvino", quantize=quantize)


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("name", ["llama", "smollm", "qwen3", "mistral, window", "phi3, part of each head rotated"])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_chains_are_the_steps_one_by_one(name, quantize, steps):
    model = chaining(name, quantize)
    texts = texts_of(BLOCK - 2, 9, 20, 5)
    chained, stepped = filled(texts, model), filled(texts, model)
    rows = [[4, 9, 3], [8], [7, 2], []]
    found = model.chain(rows, steps, chained).tokens
    feed(model, stepped, [row[:-1] for row in rows])
    ones = torch.tensor([1, 1, 1, 0])
    token, expected = torch.tensor([[row[-1] if row else 0] for row in rows]), []
    for step in range(steps):
        token = model.forward(token, torch.full((4, 1), step - 1), ones, stepped).logits.argmax(-1)
        expected.append(token)
    assert found == [*torch.cat(expected, dim=1)[:3].tolist(), []]
    accepted = [steps - 1, 0, min(1, steps - 1), 0]
    for cache, root in ((chained, 0), (stepped, 1)):  # the root is committed text, or the first node
        cache.commit(torch.arange(steps).expand(4, steps), torch.tensor(accepted) + torch.tensor([root] * 3 + [0]))
    assert chained.lengths.tolist() == stepped.lengths.tolist() == [BLOCK + steps, 10, 22 + accepted[2], 5]
    ours, theirs = (next_logits(model, cache, [1, 2, 3, 4]) for cache in (chained, stepped))
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drawn_chains_are_draws_from_the_very_distributions_they_name(dtype, steps):
    skip_unless_usable("openvino", dtype)
    model = load(tiny.tiny_llama().to(dtype), runner="native", backend="openvino")
    texts = texts_of(9, 20, 5)
    chained, stepped = filled(texts, model), filled(texts, model)
    rows = [[4, 9, 3], [8], []]
    uniform = uniforms(torch.arange(3), torch.arange(steps).expand(3, steps), 5)
    uniform[1, 0] = 1 - 2.0**-53  # the largest there is
    inverse = torch.tensor([1.0, 0.5, 1.0])
    found = model.chain(rows, steps, chained, Draws(inverse, uniform))
    units = found.probs.double() * 2**24
    assert (units == units.floor()).all()
    assert (units[:2].sum(-1) == 2**24).all()
    assert not units[2].any()
    expected = (units.cumsum(-1) <= (uniform * 2**24).floor()[..., None]).sum(-1)
    assert found.tokens == [*expected[:2].tolist(), []]
    feed(model, stepped, [row[:-1] for row in rows])
    ones = torch.tensor([1, 1, 0])
    token, drawn = (
        torch.tensor([[row[-1] if row else 0] for row in rows]),
        torch.tensor([*found.tokens[:2], [0] * steps]),
    )
    for step in range(steps):
        logits = model.forward(token, torch.full((3, 1), step - 1), ones, stepped).logits[:2, 0]
        expected = (logits.double() * inverse[:2, None]).softmax(-1)
        close = 1e-5 if dtype is torch.float32 else 0.02
        assert (expected - found.probs[:2, step]).abs().sum(-1).max() < close
        token = drawn[:, step : step + 1]
    chained.commit(torch.arange(steps).expand(3, steps), torch.tensor([steps - 1, 0, 0]))
    assert chained.lengths.tolist() == [11 + steps, 21, 5]


@pytest.mark.grid
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_drawn_chains_end_where_scores_are_no_numbers(broken):
    module = tiny.tiny_llama()
    good = load(module, runner="native", backend="openvino")
    draws = Draws(torch.ones(1), torch.full((1, 4), 0.5, dtype=torch.float64))
    (chain,) = good.chain([[3]], 4, filled(texts_of(4), good), draws).tokens
    assert chain[1] not in chain[:1]
    with torch.no_grad():
        module.model.embed_tokens.weight[chain[1]] = broken
    bad = load(module, runner="native", backend="openvino")
    chains = bad.chain([[3]], 4, filled(texts_of(4), bad), draws)
    assert chains.tokens == [chain[:2]]
    assert torch.equal(chains.probs.sum(-1), torch.ones(1, 4))  # also where there was nothing to draw from


def test_torch_takes_over_where_the_model_does_not_compile(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("Exception from somewhere:\nno kernel for this processor")

    monkeypatch.setattr(compilation, "CompiledGraph", fail)
    with pytest.warns(UserWarning, match="torch runs LlamaForCausalLM, .*no kernel for this processor"):
        assert load(tiny.tiny_llama(), runner="native").backend.name == "torch"
    with pytest.raises(ModelError, match=r"no kernel for this processor.*or use backend='torch'"):
        load(tiny.tiny_llama(), runner="native", backend="openvino")


def test_which_models_draft_chains_in_one_call():
    assert load(tiny.tiny_llama(), runner="native", backend="openvino").drafts_chains
    assert not load(tiny.tiny_llama(), runner="native", backend="torch").drafts_chains
    switching = load(tiny.tiny_phi3(**longrope(original=40, head_dim=8)), runner="native", backend="openvino")
    assert not switching.drafts_chains


@pytest.mark.parametrize("draws", [False, True])
def test_chains_after_long_texts_and_beside_rows_with_nodes(draws):
    model, steps = load(tiny.tiny_llama(max_position_embeddings=2048), runner="native", backend="openvino"), 4
    texts = texts_of(6, 9)
    chained, stepped = filled(texts, model), filled(texts, model)
    nothing, minus = torch.zeros((2, 0), dtype=torch.int64), torch.full((2, 1), -1)
    model.forward(torch.tensor([[3], [0]]), minus, torch.tensor([1, 0]), chained)
    new = [(7 * i) % 29 + 1 for i in range(1100)]
    draws_of = (
        Draws(torch.ones(2), uniforms(torch.arange(2), torch.arange(steps).expand(2, steps), 5)) if draws else None
    )
    both = model.chain([new[:700], new], steps, filled(texts, model), draws_of)
    found = model.chain([[], new], steps, chained, draws_of)
    assert both.tokens[1] == found.tokens[1]
    feed(model, stepped, [[], new[:-1]])
    expected = model.chain([[], new[-1:]], steps, stepped, draws_of)
    assert found.tokens == expected.tokens
    assert len(found.tokens[1]) == steps
    chained.commit(torch.arange(3).expand(2, 3), torch.tensor([1, 2]))
    assert chained.lengths.tolist() == [7, 9 + 1100 + 2]
    stepped.commit(nothing, torch.zeros(2, dtype=torch.int64))
    feed(model, stepped, [[3], found.tokens[1][:2]])
    assert torch.allclose(*(next_logits(model, cache, [5, 6]) for cache in (chained, stepped)), atol=1e-4)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends a signal to its own thread")
def test_signals_still_arrive_when_models_have_gone():
    program = (
        "import gc, signal, sys\n"
        "from foretoken.models.tiny_pair import load_part\n"
        "models = [load_part('drafter', backend='openvino') for _ in range(3)]\n"
        "for _ in range(3):\n"
        "    models.pop(0)\n"
        "    gc.collect()\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(7))\n"
        "signal.raise_signal(signal.SIGINT)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == 7


def test_chains_end_where_scores_are_no_numbers():
    module = tiny.tiny_llama()
    good = load(module, runner="native", backend="openvino")
    (chain,) = good.chain([[3]], 4, filled(texts_of(4), good)).tokens
    broken = chain[1]
    assert broken not in chain[:1]
    with torch.no_grad():
        module.model.embed_tokens.weight[broken] = torch.nan
    bad = load(module, runner="native", backend="openvino")
    assert not bad.backend.spec.tied  # or the broken token would spoil all scores
    assert bad.chain([[3]], 4, filled(texts_of(4), bad)).tokens == [chain[:2]]


@pytest.mark.parametrize("drafter", [None, "prompt-lookup"])
def test_the_first_round_reads_the_prompt_along(drafter, monkeypatch):
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    passes = []
    score = model.backend.score
    monkeypatch.setattr(
        model.backend, "score", lambda *args: passes.append([len(f.tokens) for f in args[1]]) or score(*args)
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    prompts = texts_of(7, 1, 30)
    for reuse in (True, False):
        engine = Engine(model, drafter, num_speculative_tokens=3, reuse_prefixes=reuse)  # "auto" would calibrate first
        passes.clear()
        assert len(engine.generate(prompts, params)) == 3
        assert passes == [[7, 1, 30]]


def test_rounds_of_calibration_are_as_wide_as_their_drafts(monkeypatch):
    """A plain pass behind a wide one would else be padded to it, and be measured as one."""
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    widths, measured, fit = model.pass_widths(()), [], PassWidths.fit

    def watched(self, size: int) -> int:
        measured.append((size, fit(self, size)))
        return measured[-1][1]

    monkeypatch.setattr(PassWidths, "fit", watched)
    monkeypatch.setattr(calibration, "SECONDS", 1000.0)
    cascade = Cascade([PromptLookup()])
    calibration.calibrate(model, cascade, Engine(model).verifier, sampled=False)
    assert cascade.measured
    assert {size for size, _ in measured} >= {1, 9, 33}
    assert all(size == width for size, width in measured if size in (1, 9, 33))
    assert widths.last == 33


def test_texts_that_others_copy_are_read_before_the_first_round(monkeypatch):
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    passes = []
    score = model.backend.score
    monkeypatch.setattr(
        model.backend, "score", lambda *args: passes.append([len(f.tokens) for f in args[1]]) or score(*args)
    )
    begins = [(5 * i) % 29 + 1 for i in range(40)]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    found = Engine(model, None).generate([[*begins, 3], [*begins, 4]], params)
    alone = [Engine(model, None).generate([*begins, token], params) for token in (3, 4)]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert passes[0] == [40]  # the first text but its last token
    assert sum(map(sum, passes)) - 2 * 41 < 41 + 5  # the second one is not read from its beginning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_all_through_is_close_to_the_model(dtype):
    skip_unless_usable("openvino", dtype)
    module = tiny.tiny_llama().to(dtype)
    exact, rounded = load(module, runner="native", backend="openvino"), load(module, runner="native", quantize="w8a8")
    assert rounded.quantize == "w8a8"
    texts = texts_of(9, 20)
    ours, theirs = (next_logits(model, filled(texts, model), [3, 4]).float() for model in (rounded, exact))
    assert 0 < (ours - theirs).abs().max() < 0.1 * theirs.abs().max()
    with pytest.raises(ModelError, match=r"w8a8, which OpenVINO alone does .*use 'int8'"):
        load(module, runner="native", backend="torch", quantize="w8a8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_drafters_are_rounded_unless_told_otherwise(dtype, tmp_path, monkeypatch):
    skip_unless_usable("openvino", dtype)
    from foretoken.models.native import loader

    tiny.tiny_llama().to(dtype).save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "multiplies_int8", lambda: True)
    target = load(tmp_path)
    assert Engine(target, str(tmp_path)).drafter.model.quantize is None
    monkeypatch.setattr(loader, "_LEAST_ROUNDED", 0)
    assert Engine(target, str(tmp_path)).drafter.model.quantize == "w8a8"
    assert Engine(target, str(tmp_path), quantize=None).drafter.model.quantize is None
    assert load(tmp_path).quantize is None
    if dtype is torch.float32:  # where eight bits are no faster
        monkeypatch.setattr(loader, "multiplies_int8", lambda: False)
        assert Engine(target, str(tmp_path)).drafter.model.quantize is None


def test_automatic_rounding_does_not_outlive_openvinos_refusal(tmp_path, monkeypatch):
    skip_unless_usable("openvino", torch.float32)
    from foretoken.models.native import loader, openvino_backend

    def fail(*about):
        raise RuntimeError("no kernel for this processor")

    tiny.tiny_llama().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "multiplies_int8", lambda: True)
    monkeypatch.setattr(loader, "_LEAST_ROUNDED", 0)
    monkeypatch.setattr(openvino_backend.OpenVinoBackend, "__init__", fail)
    with pytest.warns(UserWarning, match="no kernel for this processor"):
        model = load(tmp_path, quantize="auto", eager=False)
    assert (model.backend.name, model.quantize) == ("torch", None)


def test_torch_works_alone_where_openvino_has_threads():
    from foretoken.models.threads import one_thread

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1 or sys.platform != "linux"
        with one_thread(False):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.grid
@pytest.mark.parametrize("texts", [(5,), (5, 9), (BLOCK,)])
def test_padding_leaves_no_trace(texts, monkeypatch):
    module = tiny.tiny_llama()
    made = []
    for pads in (False, True):
        model = load(module, runner="native", backend="openvino")
        model.pass_widths().least = 4 if pads else 1
        cache = filled(texts_of(*texts), model)
        rows = [[3, 4], [5]][: len(texts)]
        found = [next_logits(model, cache, [7] * len(texts))]
        cache.commit(torch.zeros((len(texts), 1), dtype=torch.int64), torch.ones(len(texts), dtype=torch.int64))
        chains = model.chain(rows, 4, cache).tokens
        cache.commit(torch.arange(3).expand(len(texts), 3), torch.full((len(texts),), 2))
        found.append(next_logits(model, cache, [8] * len(texts)))
        made.append((found, chains, cache.lengths.tolist(), cache.store.tables))
    (plain, chain, lengths, tables), (padded, padded_chain, padded_lengths, padded_tables) = made
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(plain, padded, strict=True))
    assert (chain, lengths) == (padded_chain, padded_lengths)
    assert [len(table) for table in tables] == [len(table) for table in padded_tables]


def test_passes_keep_their_width_until_that_costs_more_than_another():
    widths = PassWidths(8)
    assert [widths.fit(size) for size in (3, 6, 4, 5, 6, 2, 1, 1)] == [3, 6, 6, 6, 6, 6, 2, 2]
    assert [widths.fit(size) for size in (100, 95, 1, 1)] == [100, 100, 1, 1]


def test_the_width_of_the_next_pass_is_told_without_a_change():
    widths, last = PassWidths(8), 0
    for size in (3, 6, 4, 5, 6, 2, 1, 1, 9, 100, 95, 1, 1):
        for other in (1, 7, 50):
            widths.peek(other)
        assert (widths.peek(size), widths.last) == (widths.fit(size), last)
        last = widths.last
    torch_model = load(tiny.tiny_llama(), runner="native", backend="torch")
    assert torch_model.pass_widths() is None  # no padding


def test_a_pass_is_as_wide_as_it_is_held_and_the_next_one_as_it_comes():
    widths = PassWidths(8, least=2)
    assert widths.fit(1) == 2
    widths.hold(40)  # more than the patience
    assert (widths.peek(3), widths.fit(3), widths.last) == (40, 40, 40)
    assert [widths.fit(size) for size in (39, 35, 3)] == [40, 40, 3]  # padded while patience lasts
    widths.hold(5)
    assert widths.fit(3) == 5
    widths.hold(5)
    assert [widths.fit(size) for size in (7, 6)] == [7, 7]  # too narrow for the tokens, and forgotten
    assert widths.plan(3, 9) == (9, True)
    assert widths.fit(3) == 9
    assert widths.plan(3, 0) == (9, False)  # padded as it comes
    assert widths.plan(1, 1) == (1, True)  # it takes as long as any up to the narrowest
    assert widths.fit(1) == 2


@pytest.mark.parametrize("width", [6, BLOCK, 3 * BLOCK + 1])
def test_held_passes_give_the_same_scores(width):
    """Padding may need more slots than one block has."""
    module, found = tiny.tiny_llama(), []
    for hold in (0, width):
        model = load(module, runner="native", backend="openvino")
        cache = filled(texts_of(6, 9), model)
        model.pass_widths().hold(hold)
        found.append(next_logits(model, cache, [7, 8]))
        assert model.pass_widths().last == (hold or 15)
        cache.commit(torch.zeros((2, 1), dtype=torch.int64), torch.ones(2, dtype=torch.int64))
        found[-1] = torch.cat([found[-1], next_logits(model, cache, [5, 4])])
    assert torch.allclose(*found, atol=1e-5)


@pytest.mark.parametrize("draws", [False, True])
def test_texts_that_are_read_again_for_width_give_the_same_chains(draws, monkeypatch):
    module, steps, made = tiny.tiny_llama(), 3, []
    uniform = Draws(torch.ones(2), uniforms(torch.arange(2), torch.arange(steps).expand(2, steps), 5))
    for patience in (0, 16):
        model = load(module, runner="native", backend="openvino")
        model.backend.graphs.options = replace(model.backend.graphs.options, patience=patience)
        sizes, run = [], CompiledGraph.run

        def watch(request, arrays, run=run, sizes=sizes):
            sizes.append(len(arrays["tokens"]))
            return run(request, arrays)

        cache = filled(texts_of(2, BLOCK), model)
        chains = []
        with monkeypatch.context() as patch:
            patch.setattr(CompiledGraph, "run", watch)
            for rows in ([[4, 9, 3], [8]], [[7], [2, 5]], [[6], [1]], [[], [3]]):
                chains.append(model.chain(rows, steps, cache, uniform if draws else None).tokens)
                cache.commit(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        made.append((chains, next_logits(model, cache, [5, 6]), cache.lengths.tolist()))
        assert sizes == ([4, 4, 4, 4] if patience else [4, 3, 2, 1])
    assert made[0][0] == made[1][0]
    assert torch.allclose(made[0][1], made[1][1], atol=1e-5)
    assert made[0][2] == made[1][2]


def test_early_exits_leave_the_models_text_alone(monkeypatch):
    model = load(tiny.tiny_llama(), runner="native", backend="openvino")
    cache, early = filled(texts_of(20), model), model.exit_after(1)
    next_logits(model, cache, [5])
    cache.commit(torch.zeros((1, 1), dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    sizes, run = [], CompiledGraph.run
    monkeypatch.setattr(
        CompiledGraph, "run", lambda self, arrays: sizes.append(len(arrays["tokens"])) or run(self, arrays)
    )
    for row in ([3, 4, 7], [3], [3, 4]):
        assert len(early.chain([row], 2, cache).tokens[0]) == 2
    assert sizes == [3, 1, 2]


def test_trees_of_few_nodes_are_padded_too():
    module = tiny.tiny_llama()
    outcomes = []
    for pads in (False, True):
        model = load(module, runner="native", backend="openvino")
        model.pass_widths().least = 4 if pads else 1
        cache = filled(texts_of(6), model)
        tree = torch.tensor([[3, 4]]), torch.tensor([[-1, -1]]), torch.tensor([2])
        outcomes.append(model.forward(*tree, cache).logits)
    assert torch.allclose(*outcomes, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entries_move_in_every_layer_also_after_the_pool_has_grown(dtype):
    pool = BlockPool(2, 3, 4, dtype)
    store = PagedStore(pool, 3)
    rows, sources, targets = [0, 0, 1, 2, 2], [5, 40, 33, 600, 601], [4, 5, 31, 599, 600]
    for slots in (700, 2000):  # more than the pool begins with
        for row in range(3):
            store.reserve(row, slots)
        for tensor in pool.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(slots)))
        wanted = [tensor.clone() for tensor in pool.tensors]
        for old, new in zip(wanted, pool.tensors, strict=True):
            for row, source, target in zip(rows, sources, targets, strict=True):
                table = store.tables[row]
                read = new[table[source // BLOCK], :, source % BLOCK]
                old[table[target // BLOCK], :, target % BLOCK] = read
        store.move(rows, sources, targets)
        assert all(torch.equal(one, other) for one, other in zip(wanted, pool.tensors, strict=True))


def test_entries_that_move_while_another_thread_lets_the_pool_grow(monkeypatch):
    pool = BlockPool(2, 3, 4, torch.float32)
    store = PagedStore(pool, 1)
    block = store.reserve(0, BLOCK)[0]
    for number, tensor in enumerate(pool.tensors):
        tensor[block, :, 7] = 1.0 + number
    store.move([0], [7], [5])
    mover = threading.Thread(target=store.move, args=([0], [7], [2]), daemon=True)
    grow = pool._rooms[-1].grow

    def grow_meanwhile(size):
        """By now the other tensors have been copied: a move in the old ones would be lost."""
        mover.start()
        mover.join(0.2)
        grow(size)

    monkeypatch.setattr(pool._rooms[-1], "grow", grow_meanwhile)
    for _ in range(pool.num_free + 1):
        pool.take()
    mover.join(60)
    assert not mover.is_alive()
    assert all((tensor[block, :, 2] == 1.0 + number).all() for number, tensor in enumerate(pool.tensors))


@pytest.mark.parametrize(("slots", "room"), [(1, 1024), (1024, 1024), (1025, 2048), (5000, 8192)])
def test_attention_makes_room_for_few_different_lengths(slots, room):
    assert context_room(slots) == room


def test_longer_sequences_need_no_new_kernels(monkeypatch):
    """The runtime makes some for every number that it is told: what passes and chains tell it stays the same."""
    model, told = load(tiny.tiny_llama(), runner="native", backend="openvino"), set()
    run = CompiledGraph.run
    monkeypatch.setattr(
        CompiledGraph, "run", lambda self, arrays: told.add(int(arrays["max_context_len"])) or run(self, arrays)
    )
    cache = filled(texts_of(20), model)
    one = torch.ones(1, dtype=torch.int64)
    for _ in range(3 * BLOCK):
        next_logits(model, cache, [7])
        cache.commit(torch.zeros((1, 1), dtype=torch.int64), one)
    model.chain([[7]], 5, cache)
    assert told == {LEAST_CONTEXT}


def test_chains_are_run_once_before_a_request_needs_them(monkeypatch):
    model, ran = load(tiny.tiny_llama(), runner="native", backend="openvino"), []
    backend = type(model.backend)
    chain = backend.chain

    def recorded(self, cache, rows, steps, draws):
        ran.append((steps, draws is not None))
        return chain(self, cache, rows, steps, draws)

    monkeypatch.setattr(backend, "chain", recorded)
    for _ in range(2):
        for drawn in (False, True):
            model.warm_up_chains(drawn)
    assert sorted(ran) == [(steps, drawn) for steps in sorted(CHAIN_STEPS) for drawn in (False, True)]

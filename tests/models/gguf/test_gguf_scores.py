"""Scores of GGUF files against the transformers models that they were made of."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from itertools import pairwise

import gguf as reader
import pytest
import torch
import transformers as tf

from foretoken.errors import OutOfMemory
from foretoken.models.chain import Draws
from foretoken.models.gguf import Options
from foretoken.models.gguf import load as load_file
from models.gguf.gguf_files import rounded
from models.native.checkpoints import longrope
from models.reference import walk
from tiny import _llama_like, build, tiny_gemma2, tiny_gpt2, tiny_lfm2, tiny_llama, tiny_mamba, tiny_phi3, tiny_qwen3


def tiny_qwen2(vocab_size=32, seed=0, **fields):
    return build(tf.Qwen2ForCausalLM, tf.Qwen2Config(**_llama_like(vocab_size, fields)), seed)


ROLLING_BACK = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "gemma2": lambda: tiny_gemma2(query_pre_attn_scalar=8),
}
TOLERANCE = {"gpt2": 5e-3, "gemma2": 5e-3}
"""llama.cpp looks GELU up in a table of float16 numbers."""


@pytest.mark.parametrize("kind", ROLLING_BACK)
def test_a_walk_over_trees_commits_and_copies_scores_as_transformers(load, kind):
    model = load(kind, ROLLING_BACK[kind])
    assert max(walk(model, size, seed, rounds=6) for size, seed in ((1, 0), (3, 1))) < TOLERANCE.get(kind, 1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"])
def test_scores_of_rounded_files_are_those_of_their_rounded_weights(kind, files):
    """llama.cpp rounds what rounded weights are multiplied with, too: its scores are near, and nearer than others."""
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "tie_word_embeddings": True}
    plain, path = files(f"rounded {kind}", lambda: tiny_llama(64, **fields), kinds=lambda _: kind)
    module = copy.deepcopy(plain)
    for weight in module.parameters():
        if weight.dim() == 2:
            number = reader.GGMLQuantizationType[kind]
            data = reader.quants.dequantize(rounded(weight.detach().numpy(), kind), number)
            weight.data = torch.from_numpy(data)
    tokens = torch.tensor([[3 + i * 7 % 50 for i in range(24)]])
    steps = torch.arange(24)[None]
    model = load_file(path, kind, Options())
    found = model.forward(tokens, steps - 1, torch.tensor([24]), model.open(1)).logits[0]
    with torch.inference_mode():
        near, far = ((each(tokens).logits[0] - found).square().mean().sqrt() for each in (module, plain))
    assert near < far / 3
    assert near < found.std() / 20


class HalfGelu(torch.nn.Module):
    """GELU as ggml's table has it: of inputs rounded to float16, rounded to float16, and exact from 10 on."""

    def forward(self, x):
        rounded = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x.abs() < 10, rounded, x.clamp(min=0))


@pytest.mark.parametrize(("kind", "tolerance"), [("gemma2", 1e-4), ("gpt2", 5e-4)])
def test_the_table_of_gelu_is_all_that_differs(load, kind, tolerance):
    """An input at the border of two entries, which sums round to one or the other, moves scores by some 1e-4."""
    model = load(kind, ROLLING_BACK[kind])
    module = model.module = copy.deepcopy(model.module)
    for layer in module.transformer.h if kind == "gpt2" else module.model.layers:
        setattr(layer.mlp, "act" if kind == "gpt2" else "act_fn", HalfGelu())
    assert max(walk(model, 2, seed, rounds=4) for seed in range(2)) < tolerance


def _scores(model, cache, rows):
    """Those of the last tokens, fed in one pass behind what the cache has."""
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    counts = torch.tensor([len(row) for row in rows])
    parents = (torch.arange(width) - 1)[None].expand(len(rows), -1)
    found = model.forward(tokens, parents, counts, cache, keep="last").logits
    cache.commit(torch.arange(width)[None].expand(len(rows), -1), counts)
    return found[:, 0]


@pytest.mark.parametrize(("n_ctx", "long"), [(2048, True), (1100, False), (600, False)])
def test_a_context_that_grows_keeps_its_rotary_frequencies(load, n_ctx, long):
    """llama.cpp chooses them by the room of a context; one for all rows begins with 1,024 tokens, and grows."""
    fields = longrope(original=1100, head_dim=8, longest=2048)
    model = load("phi3", lambda: tiny_phi3(**fields), n_ctx=n_ctx)
    assert model.max_length == {2048: 2048, 1100: 1024 - 257, 600: 600}[n_ctx]
    cache, length = model.open(3), 1500 if long else 580
    texts = [[(7 * place + place // 5 + row) % 31 for place in range(length - 20 * row)] for row in range(3)]
    parts = [0, 200, 300, 1150, 1400, length] if long else [0, 400, 500, length]
    for begin, end in pairwise(parts):
        scores = _scores(model, cache, [text[begin:end] for text in texts])
    with torch.inference_mode():
        for text, found in zip(texts, scores, strict=True):
            assert (model.module(torch.tensor([text])).logits[0, -1] - found).abs().max() < 1e-3


def test_contexts_of_a_model_with_two_sets_of_frequencies_are_used_again(load):
    model = load("phi3", lambda: tiny_phi3(**longrope(original=1100, head_dim=8, longest=2048)), n_ctx=2048)
    for _ in range(2):
        cache = model.open(1)
        _scores(model, cache, [[1, 2, 3]])
        del cache
        assert [context.cells for context in model.pool._spare] == [1280]


def test_without_the_length_for_short_frequencies_it_is_the_files_context(files):
    """As llama.cpp has it: then no context may have more room."""
    fields = longrope(original=1100, head_dim=8, longest=2048)
    path = files("phi3 without", lambda: tiny_phi3(**fields), without=("phi3.rope.scaling.original_context_length",))[1]
    model = load_file(path, "phi3", Options())
    assert (model.max_length, model.pool.rows, model.pool.options.most_cells) == (2048 - 257, 1, 2048)


def test_states_that_are_never_cut_have_no_window(load):
    model = load("lfm2", lambda: tiny_lfm2(block_auto_adjust_ff_dim=False))
    assert (model.pool.rolls_back, model.pool.window) == (False, 0)
    assert load("gemma2", ROLLING_BACK["gemma2"]).pool.window == 4


def test_a_row_that_shares_less_than_a_windows_tokens_is_computed_again(load):
    """Layers with a window give the cells of what is behind every window to other rows, which a copy may need."""
    model = load("gemma2 32", lambda: tiny_gemma2(query_pre_attn_scalar=8, sliding_window=32))
    text = [(7 * place + place // 5) % 31 for place in range(500)]
    cache = model.open(2)
    _scores(model, cache, [text[:100], text[:300]])
    cache.select([1])  # the first row leaves its cells to the other one, whose own come next
    for begin in range(300, 480, 20):
        _scores(model, cache, [text[begin : begin + 20]])
    cache.select([0, 0], [150, 40])
    scores = _scores(model, cache, [text[150:160], text[40:60]])
    with torch.inference_mode():
        for length, found in zip((160, 60), scores, strict=True):
            assert (model.module(torch.tensor([text[:length]])).logits[0, -1] - found).abs().max() < 5e-3


@pytest.mark.parametrize(("rows", "sequences"), [(1, 2), (2, 3), (2, 5), (63, 64)])
def test_few_sequences_and_rows_of_a_context_give_the_same_scores(load, rows, sequences):
    model = load("llama", tiny_llama, rows=rows, sequences=sequences)
    assert max(walk(model, 3, seed, rounds=6) for seed in range(4)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "make"), [("mamba", tiny_mamba), ("lfm2", lambda: tiny_lfm2(block_auto_adjust_ff_dim=False))]
)
def test_a_state_that_can_not_be_rolled_back_is_computed_again(kind, make, load):
    model = load(kind, make)
    assert not model.pool.rolls_back
    assert max(walk(model, size, seed) for size, seed in ((1, 0), (3, 1))) < 1e-4


@pytest.mark.parametrize(("kind", "make"), [("llama", tiny_llama), ("mamba", tiny_mamba)])
def test_rows_that_are_cut_to_nothing_begin_anew(kind, make, load):
    model = load(kind, make)
    cache = model.open(2)
    steps = torch.arange(3).expand(2, 3)
    model.forward(torch.tensor([[3, 4, 5], [6, 7, 8]]), steps - 1, torch.tensor([3, 3]), cache)
    cache.commit(steps, torch.tensor([0, 3]))
    cache.select([0, 1, 1], [None, 0, 2])
    assert cache.lengths.tolist() == [0, 0, 2]
    found = model.forward(torch.full((3, 1), 9), torch.full((3, 1), -1), torch.tensor([1, 1, 1]), cache).logits[:, 0]
    for row, text in enumerate(([9], [9], [6, 7, 9])):
        expected = model.module(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        assert torch.allclose(found[row], expected, atol=1e-4)


def test_a_context_grows_with_its_rows(load):
    model = load("llama", tiny_llama)
    model.pool.options = replace(model.pool.options, cells=1)
    cache = model.open(2)
    tokens = torch.arange(400).remainder(29).add(3).expand(2, 400)
    steps = torch.arange(200).expand(2, 200)
    model.forward(tokens[:, :200], steps - 1, torch.tensor([100, 200]), cache, "none")
    cache.commit(steps, torch.tensor([100, 200]))
    before = cache.shards[0].context.cells
    found = model.forward(tokens[:, 200:], steps - 1, torch.tensor([200, 200]), cache).logits
    assert cache.shards[0].context.cells > before
    for row, start in ((0, 100), (1, 200)):
        text = [*tokens[row, :start].tolist(), *tokens[row, 200:].tolist()]
        expected = model.module(input_ids=torch.tensor([text])).logits[0, -200:]
        assert torch.allclose(found[row], expected, atol=1e-4)


def test_tentative_nodes_survive_a_growing_context(load):
    model = load("llama", tiny_llama)
    model.pool.options = replace(model.pool.options, cells=1)
    cache = model.open(1)
    model.forward(torch.tensor([[3, 4, 5]]), torch.tensor([[-1, -1, 1]]), torch.tensor([3]), cache)
    many = 300
    tokens = torch.arange(many).remainder(29).add(3)[None]
    parents = torch.tensor([[2, *range(3, 2 + many)]])  # below the branch
    found = model.forward(tokens, parents, torch.tensor([many]), cache, "last").logits[0, 0]
    expected = model.module(input_ids=torch.cat((torch.tensor([[4, 5]]), tokens), 1)).logits[0, -1]
    assert torch.allclose(found, expected, atol=1e-4)
    assert cache.shards[0].context.cells > 256


def test_a_context_gets_more_sequences_where_a_tree_or_rows_need_them(load):
    model = load("llama", tiny_llama)
    cache = model.open(1)
    prompt = torch.tensor([[3, 4, 5]])
    model.forward(prompt, torch.tensor([[-1, 0, 1]]), torch.tensor([3]), cache, "none")
    cache.commit(torch.arange(3)[None], torch.tensor([3]))
    first = cache.shards[0].context.sequences
    model.forward(torch.tensor([[6, 7, 8]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3]), cache)  # a branch
    assert cache.shards[0].context.sequences == first
    tokens = torch.arange(10, 10 + first)[None]
    found = model.forward(tokens, torch.full_like(tokens, 2), torch.tensor([first]), cache).logits[0]
    assert cache.shards[0].context.sequences > first
    for node, token in enumerate(tokens[0].tolist()):
        expected = model.module(input_ids=torch.tensor([[3, 4, 5, 6, 8, token]])).logits[0, -1]
        assert torch.allclose(found[node], expected, atol=1e-4)
    cache.commit(torch.tensor([[0, 2]]), torch.tensor([2]))
    before = cache.shards[0].context.sequences
    count = before + 1
    cache.select([0] * count, [1 + i % 5 for i in range(count)])
    assert cache.shards[0].context.sequences > before
    found = model.forward(torch.full((count, 1), 9), torch.full((count, 1), -1), torch.ones(count).long(), cache)
    for row in range(count):
        text = [3, 4, 5, 6, 8][: 1 + row % 5]
        expected = model.module(input_ids=torch.tensor([[*text, 9]])).logits[0, -1]
        assert torch.allclose(found.logits[row, 0], expected, atol=1e-4)


def test_passes_are_split_where_they_are_longer_than_a_context_takes(load):
    model = load("llama", tiny_llama)
    model.pool.options = replace(model.pool.options, tokens=7, outputs=3)
    model.pool.sequences = 64
    assert max(walk(model, 3, seed, rounds=4) for seed in range(2)) < 1e-4


def test_a_pass_that_failed_leaves_nothing_in_the_next_one(load, monkeypatch):
    model = load("llama", tiny_llama)
    cache = model.open(1)
    one, tree = torch.tensor([[3]]), (torch.tensor([[4, 5, 6]]), torch.tensor([[-1, -1, 0]]), torch.tensor([3]))
    model.forward(one, one - 4, torch.tensor([1]), cache)
    cache.commit(one - 3, torch.tensor([1]))
    with monkeypatch.context() as patch:
        patch.setattr(cache.shards[0].context._library, "llama_decode", lambda *_: 1)
        with pytest.raises(OutOfMemory, match="no room for 3 more"):
            model.forward(*tree, cache)
    cache.commit(one, torch.tensor([0]))
    found = model.forward(*tree, cache).logits[0]
    for node, text in enumerate(([3, 4], [3, 5], [3, 4, 6])):
        expected = model.module(input_ids=torch.tensor([text])).logits[0, -1]
        assert torch.allclose(found[node], expected, atol=1e-4)


def scores_of_steps(model, tokens, cache):
    """Logits ``[1, V]`` after each token of a run."""
    found, left = [], list(tokens[1:])

    def choose(logits):
        found.append(logits[0].clone())
        return left.pop(0) if left else None

    model.decode_row(tokens[0], len(tokens) + 3, cache, choose)
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("seed", range(3))
def test_a_row_by_itself_has_the_scores_that_it_has_beside_others(load, kind, seed):
    """Single steps of one row take a shorter way: among branches, commits of a part, and contexts that grow.

    So do several in a run, with nothing but the choice of tokens in between.
    """
    model = load(kind, {**ROLLING_BACK, "mamba": tiny_mamba}[kind])
    model.pool.options = replace(model.pool.options, cells=1)
    alone, pair = model.open(1), model.open(2)
    chance, above, steps, run = random.Random(seed), [], 0, 0
    limit = model.pool.positions or 400
    while True:
        room = limit - int(alone.lengths[0]) - len(above)
        if above and (chance.random() < 0.2 or room < 1):
            node, path = max(chance.randrange(-1, len(above)) for _ in range(2)), []
            while node >= 0:
                node, path = above[node], [node, *path]
            alone.commit(torch.tensor([path], dtype=torch.int64), torch.tensor([len(path)]))
            pair.commit(torch.tensor([path] * 2, dtype=torch.int64), torch.tensor([len(path), 0]))
            above = []
            if chance.random() < 0.3:
                alone.defer_prefill([later := [chance.randrange(3, model.vocab_size)] * chance.randint(0, 3)])
                pair.defer_prefill([later, []])
            continue
        if room < 1:
            break
        count = 1 if chance.random() < 0.8 else min(chance.randint(1, 12), room)
        nodes, tokens = len(above), [chance.randrange(3, model.vocab_size) for _ in range(count)]
        above += [
            nodes - 1 if chance.random() < 0.85 else chance.randint(-1, nodes - 1),
            *range(nodes, nodes + count - 1),
        ]
        if nodes == 0 and chance.random() < 0.5:
            above, run = list(range(-1, count - 1)), run + count
            found = list(scores_of_steps(model, tokens, alone))
            for step, token in enumerate(tokens):
                new, parents = torch.tensor([[token], [0]]), torch.tensor([[step - 1], [-1]])
                beside = model.forward(new, parents, torch.tensor([1, 0]), pair).logits[0]
                assert torch.equal(found[step], beside)
            continue
        new, parents = torch.tensor([tokens]), torch.tensor([above[nodes:]])
        found = model.forward(new, parents, torch.tensor([count]), alone).logits[0]
        beside = model.forward(new.expand(2, -1), parents.expand(2, -1), torch.tensor([count, 0]), pair).logits[0]
        assert torch.equal(found, beside)
        steps += count == 1
    assert steps > 50
    assert run > 20


@pytest.mark.parametrize(("kind", "length", "room"), [("llama", 300, 1), ("gpt2", 258, 1), ("gpt2", 258, 300)])
def test_single_steps_go_on_where_a_context_is_full_and_end_with_the_table_of_positions(load, kind, length, room):
    model = load(kind, ROLLING_BACK[kind])
    model.pool.options = replace(model.pool.options, cells=room)
    cache = model.open(1)
    tokens = torch.arange(length).remainder(29)[None] + 3
    cells = set()
    for step in range(length):
        found = model.forward(tokens[:, step : step + 1], torch.tensor([[step - 1]]), torch.tensor([1]), cache).logits
        cells.add(cache.shards[0].context.cells)
    if kind == "gpt2":
        assert model.pool.positions == 256
        assert not found.any()
    else:
        assert cells == {256, 512}
        expected = model.module(input_ids=tokens).logits[0, -1]
        assert torch.allclose(found[0, 0], expected, atol=1e-4)


@pytest.mark.parametrize(("parent", "text"), [(1, [3, 4, 5]), (0, [3, 5])])
def test_a_step_after_one_that_failed_is_computed_with_it(load, monkeypatch, parent, text):
    model = load("llama", tiny_llama)
    cache = model.open(1)
    one = torch.tensor([1])
    model.forward(torch.tensor([[3]]), torch.tensor([[-1]]), one, cache)
    with monkeypatch.context() as patch:
        patch.setattr(cache.shards[0].context._library, "llama_decode", lambda *_: 1)
        with pytest.raises(OutOfMemory, match="no room for 1 more"):
            model.forward(torch.tensor([[4]]), torch.tensor([[0]]), one, cache)
    found = model.forward(torch.tensor([[5]]), torch.tensor([[parent]]), one, cache).logits[0, 0]
    assert torch.allclose(found, model.module(input_ids=torch.tensor([text])).logits[0, -1], atol=1e-4)


def test_a_run_of_steps_that_fails_leaves_what_was_computed(load, monkeypatch):
    model = load("llama", tiny_llama)
    cache = model.open(1)
    scores_of_steps(model, [3], cache)
    cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    decode, calls = cache.shards[0].context._library.llama_decode, []
    with monkeypatch.context() as patch:
        patch.setattr(
            cache.shards[0].context._library,
            "llama_decode",
            lambda *arguments: 1 if len(calls) == 2 else calls.append(1) or decode(*arguments),
        )
        with pytest.raises(OutOfMemory, match="no room for 1 more"):
            scores_of_steps(model, [4, 5, 6, 7], cache)
    found = model.forward(torch.tensor([[8]]), torch.tensor([[2]]), torch.tensor([1]), cache).logits[0, 0]
    assert torch.allclose(found, model.module(input_ids=torch.tensor([[3, 4, 5, 6, 8]])).logits[0, -1], atol=1e-4)

    def interrupt(_):
        raise KeyboardInterrupt

    cache.commit(torch.tensor([[0, 1, 2, 3]]), torch.tensor([4]))
    with pytest.raises(KeyboardInterrupt):
        model.decode_row(9, 5, cache, interrupt)
    found = model.forward(torch.tensor([[4]]), torch.tensor([[0]]), torch.tensor([1]), cache).logits[0, 0]
    text = torch.tensor([[3, 4, 5, 6, 8, 9, 4]])
    assert torch.allclose(found, model.module(input_ids=text).logits[0, -1], atol=1e-4)


def test_chains_are_the_steps_one_by_one(load):
    model = load("llama", tiny_llama, rows=2, sequences=4)
    texts = [[3, 4, 5], [], [7]]
    cache = model.open(3)
    chains = model.chain(texts, 4, cache).tokens
    assert chains[1] == []
    for text, chain in ((texts[0], chains[0]), (texts[2], chains[2])):
        for step in range(4):
            logits = model.module(input_ids=torch.tensor([text + chain[:step]])).logits[0, -1]
            assert chain[step] == int(logits.argmax())
    cache.commit(torch.arange(4).expand(3, 4), torch.tensor([2, 0, 3]))
    assert cache.lengths.tolist() == [5, 0, 4]
    more = model.forward(torch.tensor([[9], [9], [9]]), torch.full((3, 1), -1), torch.tensor([1, 0, 1]), cache).logits
    for row, text in ((0, texts[0] + chains[0][:2] + [9]), (2, texts[2] + chains[2][:3] + [9])):
        expected = model.module(input_ids=torch.tensor([text])).logits[0, -1]
        assert torch.allclose(more[row, 0], expected, atol=1e-4)


def test_drawn_chains_are_drawn_from_the_distributions_that_they_name(load):
    model = load("llama", tiny_llama)
    generator = torch.Generator().manual_seed(3)
    draws = Draws(torch.tensor([1.0, 0.5]), torch.rand(2, 5, generator=generator, dtype=torch.float64))
    chains = model.chain([[3], [4, 5]], 5, model.open(2), draws)
    assert torch.equal(chains.probs.double().sum(-1), torch.ones(2, 5).double())
    for row, text in enumerate(([3], [4, 5])):
        for step, token in enumerate(chains.tokens[row]):
            logits = model.module(input_ids=torch.tensor([text + chains.tokens[row][:step]])).logits[0, -1]
            expected = torch.softmax(logits.double() * draws.inverse_temperatures[row], -1)
            assert torch.allclose(chains.probs[row, step].double(), expected, atol=1e-5)
            below = chains.probs[row, step].double().cumsum(0)
            assert below[token] > draws.uniforms[row, step] >= below[token] - chains.probs[row, step, token] - 2**-24


def test_chains_end_where_scores_are_no_numbers(files, load):
    def broken():
        module = tiny_llama(seed=5)
        module.model.embed_tokens.weight[9] = float("nan")
        return module

    model = load("broken", broken)
    draws = Draws(torch.ones(1), torch.full((1, 3), 0.5, dtype=torch.float64))
    for given in (None, draws):
        chains = model.chain([[9]], 3, model.open(1), given)
        assert chains.tokens == [[]]
    assert torch.equal(chains.probs.sum(-1), torch.ones(1, 3))

"""The engine on GGUF files: outputs, mixed pairs, memory and many calls."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from distributions import g_test
from foretoken import Engine, SamplingParams
from foretoken.drafters.draft_model import DraftModel
from foretoken.errors import ForetokenError, OutOfMemory, ParameterError
from foretoken.limits import Limits
from foretoken.models.tiny_pair import head_path
from foretoken.models.wrapping import wrap
from grid import (
    BATCH_SIZE,
    DRAWS,
    ERROR_LEVEL,
    OPTIONS,
    PROMPT,
    QUICK_DRAWS,
    VERIFIERS,
    draw,
    pairwise,
    target_distribution,
)
from grid import model as module_of
from tiny import tiny_gpt2, tiny_lfm2, tiny_llama, tiny_mamba

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
PROMPTS = [PROMPT, [5, 6], [1, 2, 3, 1, 2]]
CASES = [
    ("none", "token", "plain"),
    ("draft-model", "token", "temperature"),
    ("draft-model", "block", "top_p"),
    ("recycling", "traversal", "penalties"),
    ("cascade", "coupled", "plain"),
]
DRAFTERS = ("none", "draft-model", "lookup", "suffix", "recycling", "lookahead", "cascade")
FULL = pairwise(list(product(DRAFTERS, VERIFIERS, OPTIONS)))


@pytest.fixture
def engine(load):
    """``engine(drafter, verifier, batch_size)`` over the grid's Llama target, as a file."""

    def make(drafter, verifier="auto", batch_size=32, k=3, **options):
        target = load("grid target", lambda: module_of("llama", 1), **options)
        small = load("grid drafter", lambda: module_of("llama", 2), **options)
        drafters = {"draft-model": small, "cascade": ["prompt-lookup", small], "none": None}
        return Engine(target, drafters.get(drafter, drafter), verifier, k, max_batch_size=batch_size)

    return make


def check(engine, case, tests, draws):
    drafter, verifier, option = case
    samples = draw(engine(drafter, verifier, BATCH_SIZE), option, draws, 7_000_003)
    assert g_test(samples, target_distribution("llama", drafter, option)) > ERROR_LEVEL / tests
    assert draw(engine(drafter, verifier, 1), option, 20, 7_000_003) == samples[:20]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_have_the_targets_distribution(case, engine):
    check(engine, case, len(CASES), QUICK_DRAWS // 5)


@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids="-".join)
def test_the_grids_outputs_have_the_targets_distribution(case, engine):
    check(engine, case, len(FULL), DRAWS)


@pytest.mark.parametrize("drafter", ["draft-model", "lookup", "suffix", "auto"])
def test_greedy_outputs_are_those_of_transformers_over_many_calls(drafter, engine):
    expected = [one.token_ids for one in Engine(wrap(module_of("llama", 1)), None).generate(PROMPTS, GREEDY)]
    ours = engine(drafter, k="auto" if drafter == "auto" else 3)
    for _ in range(3):
        assert [one.token_ids for one in ours.generate(PROMPTS, GREEDY)] == expected
        assert ours.generate(PROMPTS[1], GREEDY).token_ids == expected[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["none", "static"])
def test_a_drafter_with_a_table_of_positions_ends_with_it_in_one_row_alone(tree, temperature, engine, load):
    small = load("short gpt2", lambda: tiny_gpt2(8, seed=2, n_positions=12))
    target = engine("none").target
    params = SamplingParams(temperature=temperature, max_new_tokens=12, ignore_eos=True, seed=3)
    drafted = Engine(target, DraftModel(small, tree=tree), "coupled", 4).generate(PROMPTS, params)
    plain = Engine(target, None, "coupled").generate(PROMPTS, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(one.stats.drafted for one in drafted)


@pytest.mark.parametrize("drafter", [None, "lookup", "recycling"])
def test_a_table_of_positions_is_used_to_its_end_and_not_beyond(drafter, load):
    target = load("short gpt2", lambda: tiny_gpt2(8, seed=2, n_positions=12))
    params = SamplingParams(temperature=0.0, max_new_tokens=50, ignore_eos=True)
    completions = Engine(target, drafter, num_speculative_tokens=5).generate([[3, 4, 5], [3] * 11], params)
    assert [len(one.token_ids) for one in completions] == [9, 1]
    assert completions[0].token_ids == Engine(target, None).generate([3, 4, 5], params).token_ids


def test_what_can_not_be_rolled_back_extends_no_other_draft_and_shares_no_prefixes(engine, load):
    assert DraftModel(engine("none").target).extends
    state = load("mamba", tiny_mamba)
    assert not state.shares_prefixes
    assert not DraftModel(state).extends


@pytest.mark.parametrize("told", [None, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba"])
def test_plain_rounds_of_several_passes_give_the_tokens_of_rounds_of_one(kind, temperature, told, engine, load):
    """And their log-probabilities, though each pass overwrites the scores of the last one."""
    other = {"gpt2": tiny_gpt2, "mamba": tiny_mamba}.get(kind)
    target = engine("none").target if other is None else load(f"plain {kind}", other)
    params = SamplingParams(temperature=temperature, max_new_tokens=40, ignore_eos=True, seed=3, logprobs=told)
    one, many = (Engine(target, None, limits=Limits(plain_passes=passes)) for passes in (1, 8))
    for _ in range(2):
        expected = [found.token_ids for found in one.generate(PROMPTS, params)]
        assert [found.token_ids for found in many.generate(PROMPTS, params)] == expected
        alone = many.generate(PROMPTS[1], params)
        assert alone.token_ids == expected[1]
        assert alone.logprobs == one.generate(PROMPTS[1], params).logprobs
        assert (alone.logprobs is None) == (told is None)
    rounds = sum(1 for _ in many.stream(PROMPTS[0], params))
    assert rounds == 40 if kind == "mamba" else rounds < 10  # a state that can't be rolled back is committed each time


def test_more_rows_than_a_context_takes_give_the_same_outputs(engine):
    expected = [one.token_ids for one in engine("draft-model").generate(PROMPTS * 3, GREEDY)]
    few = engine("draft-model", rows=2, sequences=3)
    assert [one.token_ids for one in few.generate(PROMPTS * 3, GREEDY)] == expected


@pytest.mark.parametrize("ours_is_target", [True, False])
def test_a_file_and_a_transformers_model_draft_for_each_other(ours_is_target, load):
    tokenizer = byte_tokenizer()
    file = load("chatting", lambda: tiny_llama(vocab_size=264), tokenizer)
    other = wrap(tiny_llama(vocab_size=264, seed=1), tokenizer)
    target, drafter = (file, other) if ours_is_target else (other, file)
    plain = Engine(target, None).generate("the other", GREEDY)
    drafted = Engine(target, drafter, num_speculative_tokens=3).generate("the other", GREEDY)
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text


def test_chats_end_at_the_files_end_token(load):
    file = load("chatting", lambda: tiny_llama(vocab_size=264), byte_tokenizer())
    params = SamplingParams(max_new_tokens=4, logit_bias={258: 100.0})
    completion = Engine(file, None).generate([{"role": "user", "content": "the"}], params)
    assert (completion.finish_reason, completion.text) == ("stop", "")


def test_a_limit_of_memory_is_kept(engine):
    target = engine("none").target
    # A context begins with room for 1,024 tokens, however short the request is.
    with pytest.raises(OutOfMemory, match=r"raise cache_memory to at least .*iB, which the shortest request needs"):
        Engine(target, None, cache_memory=target.cache_bytes([1]) - 1).generate(PROMPTS[0], GREEDY)


@pytest.mark.parametrize(
    ("kind", "make"), [("mamba", tiny_mamba), ("lfm2", lambda: tiny_lfm2(block_auto_adjust_ff_dim=False))]
)
def test_states_that_can_not_be_rolled_back_are_memory_too(kind, make, load):
    target = load(kind, make)
    cache = target.open(1)
    target.forward(torch.tensor([[5]]), torch.tensor([[-1]]), torch.tensor([1]), cache)
    cache.commit(torch.tensor([[0]]), torch.tensor([1]))
    saved = len(cache.shards[0].context.save(cache.rows[0].sequence))
    assert 0 < saved - target.cell_bytes - target.state_bytes < 128  # besides, what the state is of
    assert (target.cell_bytes > 0) == (kind == "lfm2")
    for rows, sequences in ((1, 8), (4, 8), (5, 16), (8, 16), (9, 24)):
        cells = 1024 * -(-rows // 8)
        assert target.cache_bytes([1] * rows) == target.cell_bytes * cells + target.state_bytes * sequences
    with pytest.raises(OutOfMemory, match=r"raise cache_memory to at least"):
        Engine(target, None, cache_memory=target.cache_bytes([1]) - 1).generate(PROMPTS[0], GREEDY)


def test_drafters_on_the_targets_layers_are_refused(engine):
    target = engine("none").target
    with pytest.raises(ParameterError, match="can't be left early"):
        Engine(target, "early-exit")
    with pytest.raises(ForetokenError, match="hidden states"):
        Engine(target, head_path())


def test_contexts_are_used_again_and_freed_with_the_model(load):
    model = load("grid target", lambda: module_of("llama", 1))
    first = model.open(1)
    engine = Engine(model, None)
    engine.generate(PROMPTS[0], GREEDY)
    del first, engine
    gc.collect()
    kept = model.pool.take(10, 2)
    assert kept.alive
    model.pool.give_back(kept)
    assert model.pool.take(10, 2) is kept
    kept.close()
    assert not kept.alive
    model.pool.give_back(kept)  # at the end of a process a context may be freed before its cache
    assert model.pool.take(10, 2) is not kept


def test_a_further_token_costs_what_its_products_take_beside_reading_the_weights(load):
    target = load("grid target", lambda: module_of("llama", 1))
    assert target.position_share == pytest.approx(0.5 / 4, rel=0.05)  # float32
    engine = Engine(target, "lookup")
    assert engine.policy.fixed_costs.target(2) == pytest.approx(1.0 + target.position_share)

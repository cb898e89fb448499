"""Sampling: equal to transformers' logits processors, row by row and node by node."""

import copy
import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken import Engine
from foretoken.draft import Draft, no_draft
from foretoken.errors import ParameterError
from foretoken.integrations.processors import ProcessorSampler
from foretoken.limits import Limits, use_limits
from foretoken.randomness import gumbel, seed_tensor
from foretoken.sampling import Sampler, SamplingParams, check_finite, draw, draw_rows
from foretoken.sampling.params import DEFAULT_MAX_NEW_TOKENS
from foretoken.sampling.vocabulary import RowBest, RowDraws, argmax, best_tokens, topk
from foretoken.sequence import Sequence
from tiny import tiny_llama

EOS = (2,)


def reference(logits, tokens, prompt_length, params):
    """The distribution of one token by transformers' processors, in their order, in float64: ``[V]`` for ``[V]``."""
    scores = logits.to(torch.float64)[None]
    ids = torch.tensor([tokens])
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()})(ids, scores)
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(tokens[prompt_length:], dtype=torch.int64), minlength=len(logits))
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.min_new_tokens:
        ends = sorted({*EOS, *params.stop_token_ids})
        scores = MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, ends)(ids, scores)
    if params.greedy:
        return torch.nn.functional.one_hot(scores[0].argmax(), len(logits)).double()
    if params.temperature != 1.0:
        scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0.0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores.softmax(-1)[0]


def tree(parents, tokens):
    """One row's draft tree; None is the empty draft."""
    return Draft(
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([parents], dtype=torch.int64),
        torch.tensor([len(tokens)]),
    )


def path(draft, row, node):
    tokens = []
    while node > 0:
        tokens.append(int(draft.tokens[row, node - 1]))
        node = int(draft.parents[row, node - 1])
    return tokens[::-1]


def assert_equal_to_reference(logits, sequences, draft, nodes=None, tolerance=1e-6):
    params = [s.params for s in sequences]
    sampler = Sampler(params, [s.seed for s in sequences], vocab_size=logits.shape[-1], eos_token_ids=EOS)
    before = logits.clone()
    probs = sampler.probabilities(logits, sequences, draft, nodes)
    assert torch.equal(logits, before)
    assert probs.dtype == torch.float32
    assert probs.shape == logits.shape
    for b, sequence in enumerate(sequences):
        for m in range(logits.shape[1]):
            node = m if nodes is None else int(nodes[b, m])
            tokens = sequence.tokens + path(draft, b, node)
            expected = reference(logits[b, m], tokens, sequence.prompt_length, sequence.params)
            # Torch's float32 softmax is itself off by some 5e-6 relative on tens of thousands of entries.
            relative = 1e-5 if logits.shape[-1] > 10_000 else 0
            torch.testing.assert_close(probs[b, m].double(), expected, rtol=relative, atol=tolerance)
            assert bool(((probs[b, m] > 0) == (expected > 0)).all() or expected[expected > 0].min() < 1e-30)


def sequence_of(params, length=9, prompt_length=5, vocab_size=8, seed=0):
    tokens = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sequence(tokens, prompt_length, params, seed)


def random_logits(*shape, seed=0, scale=3.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 10**6},
    {"top_k": -1},
    {"top_k": None},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -1.5, "presence_penalty": -0.5},
    {"logit_bias": {0: 2.5, 7: -4.0}},
    {"logit_bias": {3: -math.inf}},
    {"min_new_tokens": 6},
    {"min_new_tokens": 5, "stop_token_ids": (1, 4), "ignore_eos": True},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
]


@pytest.mark.parametrize("size", [8, 150, 40_000])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equal_to_transformers(options, size):
    sequence = sequence_of(SamplingParams(**options), vocab_size=min(size, 100))
    draft = Draft.chain(torch.tensor([[3, 3]]))
    for scale in (0.3, 4.0):
        assert_equal_to_reference(random_logits(1, 3, size, scale=scale), [sequence], draft)


def params_strategy(vocab_size):
    token = st.integers(0, vocab_size - 1)
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.3]),
        top_k=st.sampled_from([0, 0, 1, 3, 64, 200]),
        top_p=st.sampled_from([1.0, 1.0, 0.31, 0.77, 0.953]),
        min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4]),
        repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.7]),
        frequency_penalty=st.sampled_from([0.0, -0.4, 0.9]),
        logit_bias=st.none() | st.dictionaries(token, st.sampled_from([-3.0, 1.5]), max_size=3),
        min_new_tokens=st.sampled_from([0, 3, 7]),
        stop_token_ids=st.lists(token, max_size=2),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_random_combinations_in_one_batch(data):
    size = data.draw(st.sampled_from([9, 90, 1200]))
    batch_size = data.draw(st.integers(1, 4))
    sequences = [
        sequence_of(
            data.draw(params_strategy(size)),
            length=data.draw(st.integers(1, 12)) + 1,
            prompt_length=data.draw(st.integers(1, 2)),
            vocab_size=size,
            seed=b,
        )
        for b in range(batch_size)
    ]
    nodes_below = data.draw(st.integers(0, 5))
    parents = [[data.draw(st.integers(0, i)) for i in range(nodes_below)] for _ in range(batch_size)]
    tokens = [[data.draw(st.integers(0, size - 1)) for _ in range(nodes_below)] for _ in range(batch_size)]
    draft = Draft(
        torch.tensor(tokens, dtype=torch.int64).view(batch_size, nodes_below),
        torch.tensor(parents, dtype=torch.int64).view(batch_size, nodes_below),
        torch.full((batch_size,), nodes_below),
    )
    logits = random_logits(batch_size, nodes_below + 1, size, seed=data.draw(st.integers(0, 10**6)))
    assert_equal_to_reference(logits, sequences, draft)


PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.6,
    "logit_bias": {1: 0.5},
    "min_new_tokens": 6,
    "stop_token_ids": (5,),
}


def test_penalties_follow_each_nodes_path():
    """A chain with a token twice; a tree; and some of its nodes out of order."""
    plain, penalised = SamplingParams(), SamplingParams(**PENALTIES)
    sequences = [sequence_of(penalised, 7, 4), sequence_of(plain), sequence_of(penalised, 12, 3, seed=4)]
    tokens = torch.tensor([[3, 6, 3, 0, 6], [1, 2, 3, 4, 5], [7, 7, 7, 1, 0]])
    chains = Draft.chain(tokens, torch.tensor([5, 5, 3]))
    assert_equal_to_reference(random_logits(3, 6, 8), sequences, chains)
    parents = torch.tensor([[0, 0, 1, 1, 3], [0, 1, 1, 0, 4], [0, 1, 2, 0, 4]])
    trees = Draft(tokens, parents, torch.tensor([5, 5, 5]))
    assert_equal_to_reference(random_logits(3, 6, 8), sequences, trees)
    nodes = torch.tensor([[5, 0], [2, 2], [3, 1]])
    assert_equal_to_reference(random_logits(3, 2, 8), sequences, trees, nodes)
    assert_equal_to_reference(random_logits(3, 1, 8), sequences, Draft.empty(3))


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=8),
    drafted=st.lists(st.integers(0, 9), min_size=3, max_size=3),
)
def test_penalties_follow_a_sequence_through_its_history(prompt, steps, drafted):
    """Tokens come, are taken back, and others come in their place; what is known of it is kept from call to call."""
    prompt = [*prompt, 3]
    params = SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.6)
    sequence, other = (Sequence([*prompt], len(prompt), params, seed) for seed in (1, 2))
    for back, tokens in steps:
        del sequence.tokens[max(len(sequence.tokens) - back, len(prompt)) :]
        sequence.tokens += tokens
        draft = Draft.chain(torch.tensor([drafted, drafted[::-1]]))
        assert_equal_to_reference(random_logits(2, 4, 10), [sequence, other], draft)


def test_rows_of_a_batch_equal_rows_alone():
    """Bit for bit, with every mixture of parameters, also after `select`."""
    size = 3000
    options = [*OPTIONS, {"top_p": 0.5}, {"top_p": 0.99, "temperature": 0.3}, {"temperature": 0.9, "top_k": 33}]
    sequences = [sequence_of(SamplingParams(**o), 6 + i % 5, 4, vocab_size=100, seed=i) for i, o in enumerate(options)]
    logits = random_logits(len(options), 3, size)
    logits[::2] *= 0.1  # flat rows too: those take another code path through top-p
    draft = Draft.chain(torch.randint(100, (len(options), 2), generator=torch.Generator().manual_seed(1)))
    sampler = Sampler([s.params for s in sequences], [s.seed for s in sequences], vocab_size=size, eos_token_ids=EOS)
    probs = sampler.probabilities(logits, sequences, draft)
    picks = sampler.picks(logits, sequences, draft)
    modes = sampler.picks(logits, sequences, draft, noise=False)
    for row, sequence in enumerate(sequences):
        alone = sampler.select([row])
        own = Draft.chain(draft.tokens[row : row + 1])
        arguments = logits[row : row + 1], [sequence], own
        assert torch.equal(alone.probabilities(*arguments), probs[row : row + 1])
        assert torch.equal(alone.picks(*arguments), picks[row : row + 1])
        assert torch.equal(alone.picks(*arguments, noise=False), modes[row : row + 1])
        assert torch.equal(alone.scores(*arguments).argmax(-1), modes[row : row + 1])
    assert (probs.gather(-1, picks[..., None]) > 0).all()


def test_picks_are_argmax_of_log_probability_plus_noise():
    size = 200
    for options in ({}, {"temperature": 0.7}, {"top_k": 12}, {"top_p": 0.8}, {"top_p": 0.999}, {"min_p": 0.1}):
        params = SamplingParams(**options)
        sequences = [sequence_of(params, 6, seed=i) for i in range(20)]
        sampler = Sampler([params] * 20, list(range(20)), vocab_size=size)
        logits = random_logits(20, 4, size)
        parents = torch.tensor([0, 0, 1]).expand(20, 3)
        draft = Draft(torch.zeros(20, 3, dtype=torch.int64), parents, torch.full((20,), 3))
        nodes = torch.tensor([0, 3, 1, 2]).expand(20, 4)
        positions = 6 + torch.tensor([0, 2, 1, 1]).expand(20, 4)
        noise = gumbel(seed_tensor(list(range(20))), positions, size)
        expected = (sampler.probabilities(logits, sequences, draft, nodes).log() + noise).argmax(-1)
        assert torch.equal(sampler.picks(logits, sequences, draft, nodes), expected)
        assert torch.equal(sampler.positions(sequences), torch.full((20,), 6))


def test_picks_are_greedy_without_noise_and_at_temperature_0():
    logits = random_logits(2, 1, 3000)
    sequences = [sequence_of(SamplingParams(temperature=t)) for t in (0.0, 1.0)]
    sampler = Sampler([s.params for s in sequences], [1, 2], vocab_size=3000)
    assert not sampler.all_greedy
    assert sampler.select([0]).all_greedy
    assert torch.equal(sampler.picks(logits, sequences, Draft.empty(2), noise=False), logits.argmax(-1))
    assert sampler.picks(logits, sequences, Draft.empty(2))[0, 0] == logits[0, 0].argmax()


@pytest.mark.parametrize("size", [8, 5000])
def test_greedy_takes_the_lowest_id_of_equal_ones(size):
    logits = torch.zeros(1, 1, size)
    logits[..., [size // 2, size // 2 + 1, size - 1]] = 1.0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sequence = sequence_of(SamplingParams(temperature=0))
        sampler = Sampler([sequence.params], [0], vocab_size=size)
        assert sampler.picks(logits.to(dtype), [sequence], Draft.empty(1)).item() == size // 2
        probs = sampler.probabilities(logits.to(dtype), [sequence], Draft.empty(1))
        assert probs[0, 0, size // 2] == 1.0
        assert probs.sum() == 1.0


def probs_of(logits, **options):
    sequence = sequence_of(SamplingParams(**options))
    sampler = Sampler([sequence.params], [0], vocab_size=logits.shape[-1])
    return sampler.probabilities(logits[None, None], [sequence], Draft.empty(1))[0, 0]


@pytest.mark.parametrize("size", [10, 100, 30_000])
def test_ties(size):
    """top-k keeps all that tie with the k-th; top-p takes equal ones by rising id, and one at least."""
    flat = torch.zeros(size)
    assert (probs_of(flat, top_k=3) > 0).all()
    assert (probs_of(flat, top_p=0.5) > 0).nonzero().squeeze(-1).tolist() == list(range(size // 2))
    assert (probs_of(flat, top_p=1e-9) > 0).nonzero().tolist() == [[0]]
    few = torch.full((size,), -5.0)
    few[[1, 4, 6, 9]] = 10.0
    assert (probs_of(few, top_k=2) > 0).nonzero().squeeze(-1).tolist() == [1, 4, 6, 9]
    assert (probs_of(few, top_p=0.4) > 0).nonzero().squeeze(-1).tolist() == [1, 4]
    assert (probs_of(few, top_p=0.7, top_k=2) > 0).nonzero().squeeze(-1).tolist() == [1, 4, 6]


@pytest.mark.parametrize("size", [8, 40, 3_000])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 6}, {"top_p": 0.9}])
def test_the_first_of_the_best_do_not_depend_on_how_many_are_wanted(size, options):
    """16-bit scores tie often, and `count` depends on the other rows of a batch."""
    params = SamplingParams(**options)
    sequence, draft = sequence_of(params), Draft.empty(1)
    sampler = Sampler([params], [0], vocab_size=size)
    for seed in range(40):
        logits = (2 * random_logits(1, 1, size, seed=seed)).round() / 2
        tokens, shares = sampler.best(logits, [sequence], draft, count=8)
        assert int(tokens[0, 0, 0]) == int(argmax(logits)[0, 0])
        for count in range(1, 8):
            fewer, known = sampler.best(logits, [sequence], draft, count=count)
            used = known[0, 0] > -torch.inf
            assert torch.equal(fewer[0, 0][used], tokens[0, 0, :count][used])
            assert torch.equal(known[0, 0], shares[0, 0, :count])


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}])
def test_zeros_where_all_tokens_with_a_score_are_banned(options):
    """As for a drafter whose vocabulary has three of the tokens; other rows are not affected."""
    banned = SamplingParams(logit_bias=dict.fromkeys(range(3), -math.inf), **options)
    params = [banned, SamplingParams(**options)]
    sequences, logits = [sequence_of(one) for one in params], random_logits(2, 1, 3)
    sampler = Sampler(params, [0, 1], vocab_size=8)
    probs = sampler.probabilities(logits, sequences, Draft.empty(2))
    assert probs[0].tolist() == [[0.0] * 3]
    assert torch.equal(probs[1:], sampler.select([1]).probabilities(logits[1:], sequences[1:], Draft.empty(1)))
    assert not (sampler.best(logits, sequences, Draft.empty(2), count=2)[1][0] > -torch.inf).any()


def test_top_p_window_and_histogram_agree():
    """Coarse scores with many ties: both code paths of top-p keep the tokens that a stable sort gives."""
    generator = torch.Generator().manual_seed(0)
    for top_p in (0.2, 0.6, 0.9, 0.97):
        logits = (torch.randn(700, generator=generator) * 6).round() / 2
        sort = torch.sort(logits, descending=True, stable=True)
        weights = sort.values.double().softmax(-1)
        keep = sort.indices[weights.cumsum(-1) - weights < top_p]
        expected = torch.zeros(700, dtype=torch.bool)
        expected[keep] = True
        for window in (8, 64, 512):
            with use_limits(Limits(window=window)):
                assert torch.equal(probs_of(logits, top_p=top_p) > 0, expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-6, 1e6, 1e38, 1e300])
@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extreme_temperatures(temperature, options, scale):
    for size in (20, 3000):
        logits = random_logits(size, scale=scale)
        logits[::3] = -math.inf
        probs = probs_of(logits, temperature=temperature, **options)
        assert probs.isfinite().all()
        assert probs.sum() == pytest.approx(1.0, abs=1e-5)
        assert (probs[::3] == 0).all()
        if temperature < 1:
            assert probs[logits.argmax()] == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"repetition_penalty": 1.3}, {"min_p": 0.05}], ids=str)
def test_half_precision_logits(dtype, options):
    sequence = sequence_of(SamplingParams(**options))
    assert_equal_to_reference(random_logits(1, 1, 500).to(dtype), [sequence], Draft.empty(1))


def test_few_possible_tokens():
    """-inf nearly everywhere, as after a grammar or a ban."""
    for size in (20, 30_007):
        logits = torch.full((size,), -math.inf)
        logits[[3, size - 1]] = torch.tensor([1.0, 2.0])
        for options in ({}, {"top_k": 7}, {"top_k": 50}, {"top_p": 0.999}, {"top_p": 0.99, "top_k": 9}, {"min_p": 0.1}):
            torch.testing.assert_close(probs_of(logits, **options), logits.softmax(-1))


def test_other_vocabulary_sizes():
    """A drafter's vocabulary may be padded less: parameters of ids beyond it are ignored, and the noise is shared."""
    params = SamplingParams(**{**PENALTIES, "logit_bias": {3: 2.0, 9: 1.0}, "stop_token_ids": (1, 9)})
    sequence = Sequence([0, 9, 4, 9, 3], 2, params, 5)
    sampler = Sampler([params], [5], vocab_size=10, eos_token_ids=(8,))
    draft = Draft.chain(torch.tensor([[4, 9]]))
    narrow = random_logits(1, 3, 7)
    wide = torch.cat([narrow, torch.full((1, 3, 5), -math.inf)], dim=-1)
    torch.testing.assert_close(
        sampler.probabilities(wide, [sequence], draft)[..., :7], sampler.probabilities(narrow, [sequence], draft)
    )
    assert torch.equal(sampler.picks(wide, [sequence], draft), sampler.picks(narrow, [sequence], draft))


def test_sequences_are_not_needed_without_penalties():
    sampler = Sampler([SamplingParams(top_k=3)], [0], vocab_size=20)
    assert sampler.probabilities(random_logits(1, 2, 20), None, None).shape == (1, 2, 20)
    greedy = Sampler([SamplingParams(temperature=0)], [0], vocab_size=20)
    assert greedy.picks(random_logits(1, 2, 20), None, None).shape == (1, 2)


def test_check_finite():
    logits = torch.zeros(6, 2, 50)
    logits[1, 1, 7] = math.nan
    logits[2, 0, 3] = math.inf
    logits[3, 1] = -math.inf
    logits[4, 1, 1:] = -math.inf
    assert check_finite(logits).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("size", [1, 50, 256, 3000, 8192, 40_001])
def test_argmax_and_topk(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(3, 2, size, generator=generator)
    assert torch.equal(argmax(x), x.argmax(-1))
    coarse = (x * 2).round()
    assert torch.equal(argmax(coarse), coarse.argmax(-1))
    for k in {1, min(5, size), min(64, size), min(500, size)}:
        for y in (x, coarse):
            values, ids = topk(y, k)
            assert torch.equal(values, y.topk(k).values)
            assert torch.equal(y.gather(-1, ids), values)
            assert all(len(set(row.tolist())) == k for row in ids.view(-1, k))


@pytest.mark.parametrize("size", [5, 256, 257, 1000, 5000])
def test_draw_inverts_the_distribution(size, monkeypatch):
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(size, generator=generator)
    weights[torch.rand(size, generator=generator) < 0.6] = 0
    weights[0] = weights[-1] = 0
    weights[size // 2] = 1.0
    for total in (1.0, 0.999999, 1.000001, 7.0):
        probs = (weights / weights.sum() * total).to(torch.float32)
        ends = probs.double().cumsum(-1) / probs.double().sum()
        possible = (probs > 0).nonzero().squeeze(-1)
        edges = ends[possible][::7][:-1]
        u = torch.cat([torch.linspace(0, 1, 501, dtype=torch.float64)[:-1], edges, edges - 1e-13])
        u = torch.cat([u[u >= 0], torch.tensor([0.0, 1 - 2**-53, 1 - 1e-16], dtype=torch.float64)])
        drawn = draw(probs.expand(len(u), size), u)
        assert (probs[drawn] > 0).all()
        assert (ends[drawn] >= u - 1e-14).all()
        assert ((ends - probs.double() / probs.double().sum())[drawn] <= u + 1e-14).all()
        assert drawn[u == 0].unique().tolist() == [int(possible[0])]
        assert drawn[-2:].tolist() == [int(possible[-1])] * 2
        with use_limits(Limits(scalar_rows=len(u))):  # the same row by row
            assert torch.equal(draw(probs.expand(len(u), size), u), drawn)
        with monkeypatch.context() as patch:  # the same with torch's calls, as on a GPU
            patch.setattr("foretoken.sampling.vocabulary._is_plain", lambda _: False)
            assert torch.equal(draw(probs.expand(len(u), size), u), drawn)


def test_draw_shapes_and_one_hot_distributions():
    probs = torch.nn.functional.one_hot(torch.tensor([[0, 3], [299, 256]]), 300).float()
    for u in (0.0, 0.5, 1 - 2**-53):
        assert draw(probs, torch.full((2, 2), u, dtype=torch.float64)).tolist() == [[0, 3], [299, 256]]
    assert draw(probs[0, 0], torch.tensor(0.3)).item() == 0
    assert draw(probs[:0], torch.zeros(0, 2)).shape == (0, 2)


def test_draw_does_not_depend_on_neighbours():
    generator = torch.Generator().manual_seed(3)
    probs = torch.randn(30, 4000, generator=generator).softmax(-1)
    u = torch.rand(30, generator=generator, dtype=torch.float64)
    together = draw(probs, u)
    assert together.tolist() == [int(draw(probs[i : i + 1], u[i : i + 1])) for i in range(30)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", None),
        ("min_p", -0.1),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1.5: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: 1e39}),
        ("repetition_penalty", 1e-300),
        ("stop_token_ids", b"12"),
        ("stop_token_ids", {1: 2}),
        ("stop_token_ids", torch.tensor(1)),
        ("stop", torch.tensor(1)),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", False),
        ("max_new_tokens", 0),
        ("max_new_tokens", None),
        ("min_new_tokens", -1),
        ("min_new_tokens", 1000),
        ("stop_token_ids", 3),
        ("stop_token_ids", "12"),
        ("stop_token_ids", (-1,)),
        ("stop", 3),
        ("stop", ("a", "")),
        ("stop", ("a", 1)),
        ("ignore_eos", 1),
        ("logprobs", -1),
    ],
)
def test_bad_parameters(name, value):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value)


def test_parameters_are_normalised():
    params = SamplingParams(temperature=1, top_k=-1, stop="end", stop_token_ids=[3, 4], logit_bias={}, seed=2**64 - 1)
    assert params.temperature == 1.0
    assert params.top_k == 0
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias is None
    assert hash(params) == hash(dataclasses.replace(params))
    assert SamplingParams(top_k=None) == SamplingParams()
    assert SamplingParams(temperature=0).greedy
    bias = {1: 2.0}
    kept = SamplingParams(logit_bias=bias)
    bias[1] = 9.0
    assert kept.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SamplingParams(0.5), "takes its values by name"),
        (lambda: SamplingParams(temprature=0.5), "temprature.*temperature"),
        (lambda: SamplingParams(max_length=5), "max_length"),
        (lambda: SamplingParams(max_tokens=5, max_new_tokens=6), "max_new_tokens is 6 and max_tokens is 5"),
        (lambda: SamplingParams(max_tokens=0), "max_tokens is 0"),
        (
            lambda: SamplingParams(max_tokens=DEFAULT_MAX_NEW_TOKENS - 1, max_new_tokens=DEFAULT_MAX_NEW_TOKENS),
            "two names",
        ),
    ],
)
def test_wrong_arguments_are_named(make, named):
    with pytest.raises(ParameterError, match=named):
        make()


def test_max_tokens_is_another_name():
    params = SamplingParams(max_tokens=5)
    assert params == SamplingParams(max_new_tokens=5) == SamplingParams(max_tokens=5, max_new_tokens=5)
    assert dataclasses.replace(params, seed=3).max_new_tokens == 5
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params


@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_and_a_penalty_do_not_overflow_together(verifier, temperature):
    """Each is within its limits, and their product is not within float32's."""
    engine = Engine(tiny_llama(vocab_size=8, seed=1), tiny_llama(vocab_size=8, seed=2), verifier, 3)
    common = {"temperature": temperature, "seed": 1, "max_new_tokens": 8, "ignore_eos": True}
    up = SamplingParams(repetition_penalty=1e-10, logit_bias={5: 1e30}, **common)
    assert engine.generate([5, 2], up).token_ids == [5] * 8
    down = SamplingParams(repetition_penalty=1e10, logit_bias={one: -1e30 for one in range(8) if one != 3}, **common)
    assert engine.generate(list(range(8)), down).token_ids == [3] * 8
    assert engine.generate([3, 3], dataclasses.replace(down, logit_bias={3: -1e30, 0: -math.inf})).error is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_where_one_temperature_is_all_that_applies_scores_of_no_use_are_told_by_any_probability(
    dtype, temperature, value
):
    """Plain rounds of several passes look at the first one alone (`Sampler.scales_alone`)."""
    params = SamplingParams(temperature=temperature)
    sampler = Sampler([params] * 2, [5, 6], vocab_size=300)
    assert sampler.scales_alone
    sequences = [Sequence([1, 2], 2, params, seed) for seed in (5, 6)]
    for at in [slice(None)] if value == "-inf" else [0, 7, 299, slice(None)]:
        logits = torch.randn(2, 1, 300).to(dtype)
        logits[1, :, at] = float(value)
        probs = sampler.probabilities(logits, sequences, Draft.empty(2))
        assert probs[0].isfinite().all()
        assert probs[1].isnan().all()


@pytest.mark.parametrize(
    "params",
    [
        [SamplingParams(temperature=0)],
        [SamplingParams(temperature=1), SamplingParams(temperature=0)],
        [SamplingParams(temperature=1), SamplingParams(temperature=0.5)],
        [SamplingParams(top_k=3)],
        [SamplingParams(top_p=0.5)],
        [SamplingParams(min_p=0.5)],
        [SamplingParams(logit_bias={1: 2.0})],
        [SamplingParams(min_new_tokens=1)],
        [SamplingParams(frequency_penalty=0.1)],
    ],
)
def test_more_than_one_temperature_applies(params):
    assert not Sampler(params, range(len(params)), vocab_size=300, eos_token_ids=EOS).scales_alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [257, 300, 512, 1000, 4096])
def test_one_row_draws_what_many_draw(size, dtype):
    """However few rows are drawn one by one, each gets the same token: sums of blocks are the same to the bit."""
    made = torch.Generator().manual_seed(size)
    probs = (3 * torch.randn(40, size, generator=made, dtype=dtype)).softmax(-1)
    probs[::5, :200] = 0
    probs[1::5, 256:] = 0
    uniforms = [0.0, 1 - 2.0**-53, *torch.rand(38, generator=made, dtype=torch.float64).tolist()]
    found = []
    for rows in (1, 40):
        with use_limits(Limits(scalar_rows=rows)):
            found.append(draw_rows(probs, uniforms))
    assert found[0] == found[1]
    assert (probs[range(40), found[0]] > 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("size", [9, 256, 257, 512, 1000, 4096])
def test_rows_one_after_another_draw_what_rows_at_once_draw(size, temperature):
    """Their memory is used again: nothing of a row is left in the next one."""
    made = torch.Generator().manual_seed(size)
    sampler = Sampler([SamplingParams(temperature=temperature)], [1], vocab_size=size)
    logits = 5 * torch.randn(60, 1, 1, size, generator=made)
    logits[::5, ..., : size // 2] = -torch.inf
    logits[1::5, ..., size // 2 + 1 :] = -torch.inf
    uniforms = [0.0, 1 - 2.0**-53, *torch.rand(58, generator=made, dtype=torch.float64).tolist()]
    before, draws, nothing = logits.clone(), RowDraws(size), no_draft(1, "cpu")
    for row, u in zip(logits, uniforms, strict=True):
        expected = draw_rows(sampler.probabilities(row, [], nothing), [u])
        assert [draws.draw(sampler.scaled(row), u)] == expected
        assert row[0, 0, expected[0]] > -torch.inf
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [9, 1000])
@pytest.mark.parametrize(("at", "value"), [(0, "nan"), (-1, "nan"), (0, "inf"), (-1, "inf"), (slice(None), "-inf")])
def test_a_row_whose_scores_are_of_no_use_draws_nothing_and_the_next_one_does(size, at, value):
    draws, logits = RowDraws(size), torch.zeros(1, 1, size)
    bad = logits.clone()
    bad[..., at] = float(value)
    assert check_finite(bad).tolist() == [True]
    assert [draws.draw(each, 0.5) for each in (bad, logits, bad)] == [
        None,
        draw_rows(logits.softmax(-1), [0.5])[0],
        None,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 9, 4096])
def test_the_best_tokens_of_rows_one_after_another_are_those_of_rows_at_once(size, dtype):
    """Rows may be the same memory with other scores; ties go to the first; scores of no use give nothing."""
    made, row = torch.Generator().manual_seed(size), RowBest()
    memory = torch.zeros(1, 1, size, dtype=dtype)
    for turn in range(60):
        scores = torch.randint(-3, 4, (1, 1, size), generator=made).to(dtype)
        if turn % 3 == 0:
            scores[..., turn % size] = float(("nan", "inf", "-inf")[turn // 3 % 3])
        if turn % 10 == 9:
            scores[:] = -torch.inf
        memory.copy_(scores)
        best = best_tokens(scores)
        assert [row.best(logits) for logits in (memory, memory, scores)] == 3 * [None if best is None else best[0]]
    with torch.inference_mode():
        assert row.best(torch.ones(1, 1, size, dtype=dtype)) == 0


def test_what_a_temperature_of_one_leaves_as_it_is():
    def sampler(**options):
        return Sampler([SamplingParams(**options)] * 2, [1, 2], vocab_size=9)

    logits = torch.randn(2, 1, 9)
    assert sampler().leaves_scores
    assert sampler().scaled(logits) is logits
    for options in ({"temperature": 0.9}, {"temperature": 0.0}, {"top_k": 3}, {"presence_penalty": 0.5}):
        assert not sampler(**options).leaves_scores
    mixed = Sampler([SamplingParams(), SamplingParams(temperature=2.0)], [1, 2], vocab_size=9)
    assert not mixed.leaves_scores
    assert not ProcessorSampler([SamplingParams()], [1], {}, alters=False, vocab_size=9, device="cpu").leaves_scores


def test_what_processors_do_is_more_than_a_temperature():
    sampler = ProcessorSampler([SamplingParams()], [1], {}, alters=False, vocab_size=9, device="cpu")
    assert not sampler.scales_alone

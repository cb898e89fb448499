"""Outputs are the same to the last bit with drafts and without, alone and in batches, where a target rounds alike."""

from __future__ import annotations

from functools import cache

import pytest

import tiny
from alike import skip_unless_alike
from foretoken import Engine, SamplingParams, load, tiny_pair_path
from foretoken.drafters.prediction import Prediction
from foretoken.limits import Limits
from foretoken.models.native import NativeModel
from foretoken.models.widths import MOST_ALIKE, SHORT_PROMPT

TARGET, DRAFTER = tiny_pair_path() / "target", str(tiny_pair_path() / "drafter")
DRAFTERS = {"auto": "auto", "draft model": DRAFTER, "both": f"auto,{DRAFTER}"}
MAX_DRAFT = 16
LENGTHS = (1, 12, SHORT_PROMPT - 1, SHORT_PROMPT, SHORT_PROMPT + 1, 60, 100)
"""Tokens of prompts on both sides of short ones, of which drafts are scored along."""


def prompts_of(seed, lengths=LENGTHS):
    return [[1 + (seed + 7 * at * (1 + at % 3)) % 600 for at in range(length)] for length in lengths]


def greedy(tokens=40, **options):
    return SamplingParams(max_new_tokens=tokens, temperature=0.0, logprobs=1, ignore_eos=True, **options)


def bits(completion):
    return completion.token_ids, [(each.token_id, each.logprob, each.top) for each in completion.logprobs]


def history_of(engine):
    """Over requests from which engines learn and copy prefixes, before graphs of fixed widths are made and after."""
    found = []
    for seed in range(3):
        for prompt in prompts_of(seed):
            first = engine.generate(prompt, greedy())
            # A conversation goes on: the beginning is copied.
            second = engine.generate([*prompt, *first.token_ids, 5, 6, 7], greedy(20))
            found += [bits(first), bits(second)]
        if seed == 1:
            engine.warm_up()
    return found


@cache
def plain_history(dtype):
    """Decoded once for all drafters."""
    return history_of(Engine(skip_unless_alike(TARGET, dtype), "none"))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_bit_of_a_greedy_output(drafter, dtype):
    """How much is drafted depends on the clock; see the next test for fixed numbers."""
    target = skip_unless_alike(TARGET, dtype)
    for found, expected in zip(history_of(Engine(target, DRAFTERS[drafter])), plain_history(dtype), strict=True):
        assert found == expected


@cache
def plain_outputs(dtype):
    """Decoded once for all numbers of drafts."""
    plain = Engine(skip_unless_alike(TARGET, dtype), "none")
    return [bits(plain.generate(prompt, greedy())) for prompt in prompts_of(3)]


@pytest.mark.grid
@pytest.mark.parametrize("k", [1, 4, 16])
def test_no_fixed_number_of_drafts_changes_a_bit(k):
    dtype = "bfloat16" if load(TARGET).dtype.itemsize == 2 else "float32"
    target = skip_unless_alike(TARGET, dtype)
    model, both = (Engine(target, drafter, num_speculative_tokens=k) for drafter in (DRAFTER, f"lookup,{DRAFTER}"))
    drafted = 0
    for prompt, expected in zip(prompts_of(3), plain_outputs(dtype), strict=True):
        found = model.generate(prompt, greedy())
        assert bits(found) == expected
        assert bits(both.generate(prompt, greedy())) == expected
        drafted += found.stats.drafted
    assert drafted > 0


def test_a_prediction_changes_no_bit(monkeypatch):
    """The policy copies as much of it as it may, which is more than it asks of any other drafter."""
    target = skip_unless_alike(TARGET, "bfloat16")
    asked, propose = [], Prediction.propose
    monkeypatch.setattr(
        Prediction, "propose", lambda self, batch, limits: asked.extend(limits) or propose(self, batch, limits)
    )
    plain, speculative = Engine(target, "none"), Engine(target)
    for prompt in prompts_of(4):
        expected = plain.generate(prompt, greedy(100))
        found = speculative.generate(prompt, greedy(100), prediction=expected.token_ids)
        assert bits(found) == bits(expected)
    assert max(asked) == MOST_ALIKE - 1


@pytest.mark.grid
@pytest.mark.parametrize("drafter", ["none", "both"])
def test_other_rows_change_no_bit(drafter):
    """Rows of a batch, which join and leave at different times."""
    target = skip_unless_alike(TARGET, "float32")
    engine = Engine(target, DRAFTERS.get(drafter, drafter), max_batch_size=5)  # the longer prompts share prefixes
    prompts = [*prompts_of(7), *prompts_of(8)]
    wanted = [greedy(10 + 7 * at % 40) for at in range(len(prompts))]
    alone = [bits(engine.generate(prompt, params)) for prompt, params in zip(prompts, wanted, strict=True)]
    assert [bits(each) for each in engine.generate(prompts, wanted)] == alone


def test_shared_noise_gives_the_plain_output_in_bfloat16_too():
    target = skip_unless_alike(TARGET, "bfloat16")
    plain = Engine(target, "none", "coupled")
    speculative = Engine(target, DRAFTER, "coupled", num_speculative_tokens=4)
    drafted = 0
    for seed, prompt in enumerate(prompts_of(9)):
        params = SamplingParams(max_new_tokens=40, temperature=0.9, seed=seed, logprobs=1, ignore_eos=True)
        found = speculative.generate(prompt, params)
        assert bits(found) == bits(plain.generate(prompt, params))
        drafted += found.stats.drafted
    assert drafted > 0


def test_up_to_the_limit():
    target, limits = skip_unless_alike(TARGET, "bfloat16"), Limits(alike_tokens=100)
    plain = Engine(target, "none", limits=limits)
    speculative = Engine(target, DRAFTER, num_speculative_tokens=4, limits=limits)
    differ = 0
    for seed in range(4):
        for length in (20, 40):
            prompt = prompts_of(seed, [length])[0]
            expected, found = (engine.generate(prompt, greedy(80)) for engine in (plain, speculative))
            within = 100 - MAX_DRAFT - length  # a pass that ends beyond the limit is not alike from its beginning
            tokens, logprobs = bits(expected)
            assert bits(found)[1][:within] == logprobs[:within]
            assert bits(found)[0][:within] == tokens[:within]
            differ += bits(found)[1] != logprobs
    assert differ  # beyond, bits do differ: else this would show nothing


@pytest.mark.parametrize(
    ("length", "limit", "drafts"),
    [(SHORT_PROMPT, 256, True), (SHORT_PROMPT + 1, 256, False), (60, 60, False), (60, 59, True)],
)
def test_nothing_is_drafted_beside_a_longer_prompt_that_is_to_be_alike(length, limit, drafts, monkeypatch):
    target = skip_unless_alike(tiny.tiny_llama(), "float32")
    counts, forward = [], NativeModel.forward
    monkeypatch.setattr(
        NativeModel,
        "forward",
        lambda self, *args, **options: counts.append(args[2].tolist()) or forward(self, *args, **options),
    )
    engine = Engine(target, "lookup", num_speculative_tokens=3, limits=Limits(alike_tokens=limit))
    engine.generate([1 + at % 4 for at in range(length)], SamplingParams(max_new_tokens=8, temperature=0.0))
    assert counts[0] == [4 if drafts else 1]
    assert [4] in counts[1:]


@pytest.mark.grid
@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("drafter", ["ngram-storage", "recycling"])
@pytest.mark.parametrize("temperature", [0.5, 0.05])
def test_a_seed_gives_one_output_beside_rows_that_draft_in_the_round_of_its_prompt(temperature, drafter):
    """Nothing is drafted there beside the longer prompt: that is no reason to draft less for it later."""
    target, drafted = skip_unless_alike(tiny.tiny_llama(vocab_size=8, seed=1), "float32"), 0
    short = [[1 + at % 5 for at in range(length)] for length in (5, 12, 20)]
    beside = SamplingParams(max_new_tokens=20, temperature=0.0)
    for seed in range(8):
        prompt = [1 + (seed + at % 5) % 7 for at in range(60)]
        params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=seed)
        alone = Engine(target, drafter).generate(prompt, params)
        found = Engine(target, drafter).generate([prompt, *short], [params, *[beside] * len(short)])[0]
        assert found.token_ids == alone.token_ids
        assert found.stats.drafted_by_position == alone.stats.drafted_by_position
        drafted += alone.stats.drafted
    assert drafted > 0


def test_automatic_drafts_of_small_targets_that_round_alike_do_not_branch():
    native = skip_unless_alike(tiny.tiny_llama(), "float32")
    assert native.prefers_chains
    assert not Engine(native, "auto").drafter.trees
    assert Engine(native, "lookup").drafter.trees  # who names it gets its trees
    others = load(tiny.tiny_llama(), runner="hf"), load(tiny.tiny_llama(), runner="native", backend="torch")
    for other in (*others, load(tiny.tiny_llama(), runner="native", backend="openvino", quantize="int8")):
        assert not other.prefers_chains
        assert not other.rounds_alike
        assert Engine(other, "auto").drafter.trees

"""Early exit: the distribution of the first layers, and that drafting leaves no trace in the target's KV cache."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch

from distributions import g_test, joint_distribution
from foretoken.drafters import Cascade, EarlyExit, PromptLookup, get
from foretoken.drafters.cascade_costs import Assumed
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.limits import Limits
from foretoken.models import load
from foretoken.models.feed import feed
from foretoken.models.native.loader import openvino_refusal
from foretoken.models.wrapping import SlowModelWarning
from foretoken.sampling import SamplingParams
from tiny import (
    DEVICE,
    tiny_bloom,
    tiny_falcon,
    tiny_gemma2,
    tiny_gemma3,
    tiny_gpt2,
    tiny_gpt_neox,
    tiny_llama,
    tiny_mamba,
    tiny_mistral,
    tiny_opt,
    tiny_phi3,
    tiny_qwen3,
    tiny_t5,
)

RUNNERS = {
    "hf": {"runner": "hf"},
    "torch": {"runner": "native", "backend": "torch"},
    "openvino": {"runner": "native", "backend": "openvino"},
}
HF_ONLY = {
    "gpt2": lambda: tiny_gpt2(seed=1, n_layer=3),
    "neox": lambda: tiny_gpt_neox(seed=1, num_hidden_layers=3),
    "opt": lambda: tiny_opt(seed=1, num_hidden_layers=3),
    "falcon": lambda: tiny_falcon(seed=1, num_hidden_layers=3),
    "gemma2": lambda: tiny_gemma2(seed=1, num_hidden_layers=3),
    "gemma3": lambda: tiny_gemma3(
        seed=1, num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}
PROMPTS = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 7], [9] * 40 + [3, 1], [8], [2, 4] * 9]


def skip_unless_usable(runner: str) -> None:
    reason = openvino_refusal(torch.float32, DEVICE)
    if runner == "openvino" and reason is not None:
        pytest.skip(reason)


def target(runner: str, make=tiny_llama, **fields):
    """A model of four layers; tests share those of no other fields."""
    skip_unless_usable(runner)
    return loaded(runner, make, **fields) if fields else shared(runner, make)


@cache
def shared(runner: str, make):
    return loaded(runner, make)


def loaded(runner: str, make, **fields):
    return load(make(seed=1, **{"num_hidden_layers": 4, **fields}), **RUNNERS[runner])


def truncated(module, layers: int):
    """The same model built anew with its first layers alone."""
    config = copy.deepcopy(module.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    small = type(module)(config).eval().to(DEVICE)
    state = module.state_dict()
    small.load_state_dict({name: state[name] for name in small.state_dict()})
    return small


def check_logits(model, module, layers: int) -> None:
    """Logits of the early model over the whole model's cache, at a chain and after it, against the truncated one's."""
    texts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
    cache = model.open(2)
    feed(model, cache, texts)
    early = model.exit_after(layers)
    tail = [11, 12, 13]
    ones = torch.ones(2, dtype=torch.int64)
    found = []
    with torch.inference_mode():
        for step, token in enumerate(tail):
            nodes = torch.full((2, 1), token)
            found.append(early.forward(nodes, torch.full((2, 1), step - 1), ones, cache).logits)
        small = truncated(module, layers)
        for row, text in enumerate(texts):
            expected = small(input_ids=torch.tensor([text + tail], device=DEVICE)).logits[0, -3:]
            actual = torch.cat(found, dim=1)[row]
            torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)
        # What was drafted is forgotten, and the model scores as if it had not been.
        cache.commit(torch.zeros((2, 0), dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
        logits = model.forward(torch.full((2, 1), 11), torch.full((2, 1), -1), ones, cache).logits
        for row, text in enumerate(texts):
            expected = module(input_ids=torch.tensor([[*text, 11]], device=DEVICE)).logits[0, -1]
            torch.testing.assert_close(logits[row, 0], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("runner", RUNNERS)
def test_logits_are_those_of_a_truncated_model(runner, layers):
    check_logits(target(runner), tiny_llama(seed=1, num_hidden_layers=4), layers)


@pytest.mark.parametrize("kind", HF_ONLY)
def test_logits_of_other_architectures(kind):
    check_logits(load(HF_ONLY[kind]()), HF_ONLY[kind](), 2)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, tiny_mistral])
@pytest.mark.parametrize("runner", RUNNERS)
def test_greedy_texts_are_the_targets(runner, make):
    """Rows of different lengths, two at a time, so that they leave and join."""
    model = target(runner, make)
    params = [SamplingParams(temperature=0.0, max_new_tokens=length) for length in (25, 9, 17, 36, 12)]
    plain = Engine(model, None, max_batch_size=2).generate(PROMPTS, params)
    engine = Engine(model, "early-exit:2", num_speculative_tokens=4, max_batch_size=2)
    found = engine.generate(PROMPTS, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    stats = [one.stats for one in found]
    assert sum(one.accepted for one in stats) > 0
    assert sum(one.rounds for one in stats) < sum(one.rounds for one in (plain_one.stats for plain_one in plain))


@pytest.mark.grid
@pytest.mark.parametrize("tree", ["static", "dynamic"])
@pytest.mark.parametrize("runner", RUNNERS)
def test_trees(runner, tree):
    model = target(runner)
    engine = Engine(model, EarlyExit(model, 3, tree), "traversal", 8, max_batch_size=2)
    plain = Engine(model, None, max_batch_size=2)
    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    trees, chains = engine.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    assert [one.token_ids for one in trees] == [one.token_ids for one in chains]
    assert max(one.stats.mean_acceptance_length for one in trees) > 1.5


@pytest.mark.grid
@pytest.mark.parametrize("runner", RUNNERS)
def test_drawn_trees_keep_the_targets_distribution(runner):
    """So many draws find a deviation of 0.13 in total variation with probability 0.99."""
    module = tiny_llama(vocab_size=8, seed=1, num_hidden_layers=3)
    skip_unless_usable(runner)
    model = load(module, **RUNNERS[runner])
    engine = Engine(model, EarlyExit(model, 2, "static"), "traversal", 6, max_batch_size=500)
    params = [SamplingParams(seed=seed, max_new_tokens=4, ignore_eos=True) for seed in range(1_500)]
    samples = [one.token_ids[:3] for one in engine.generate([PROMPTS[0][:5]] * len(params), params)]
    assert g_test(samples, joint_distribution(module, PROMPTS[0][:5], SamplingParams(), 3)) > 0.01 / len(RUNNERS)


@pytest.mark.grid
@pytest.mark.parametrize("runner", ["hf", "torch", "openvino"])
def test_texts_that_grow_beyond_the_short_frequencies(runner):
    """Drafting across the length from which on a text is read with other frequencies, which takes reading it anew."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.1 * place for place in range(4)],
        "long_factor": [2.0 + 0.5 * place for place in range(4)],
        "original_max_position_embeddings": 16,
    }
    fields = {"original_max_position_embeddings": 16, "rope_parameters": rope}
    model = target(runner, tiny_phi3, **fields)
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    prompts = [[1, 2, 3], list(range(1, 13)), [4] * 20]
    plain = Engine(model, None).generate(prompts, params)
    found = Engine(model, "early-exit:3", num_speculative_tokens=4).generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


@pytest.mark.parametrize("runner", RUNNERS)
def test_drafts_beside_rows_that_are_still_reading(runner):
    """A long prompt joins later and is read a chunk a round: the cache has rows then that draft nothing."""
    model = target(runner)
    long = [(7 * place + place // 5) % 31 for place in range(200)]
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    plain = [Engine(model, None).generate(prompt, params).token_ids for prompt in ([3, 1, 4], long, [2, 7])]
    engine = Engine(model, EarlyExit(model, 2), num_speculative_tokens=3, limits=Limits(prefill_tokens=64))
    engine.submit([5, 6], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
    requests = [engine.submit([3, 1, 4], params)]
    for _ in range(3):
        engine.step()
    requests += [engine.submit(prompt, params) for prompt in (long, [2, 7])]
    while engine.busy:
        engine.step()
    assert [request.completion.token_ids for request in requests] == plain


@pytest.mark.grid
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_seed_gives_one_text_alone_and_in_a_batch(runner):
    model = target(runner)
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=20) for seed in range(5)]
    engine = Engine(model, EarlyExit(model, 3), num_speculative_tokens=4)
    together = [one.token_ids for one in engine.generate(PROMPTS, params)]
    alone = [engine.generate(prompt, one).token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
    assert together == alone


def test_all_but_the_last_layer_draft_better_than_the_first(monkeypatch):
    """Layers that add little: what they leave out is what costs acceptance."""
    module = tiny_llama(seed=1, num_hidden_layers=4)
    for layer in module.model.layers[1:]:
        layer.self_attn.o_proj.weight.mul_(0.02)
        layer.mlp.down_proj.weight.mul_(0.02)
    model = load(module, runner="hf")
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    stats = Engine(model, "early-exit", num_speculative_tokens=4).generate([1, 2, 3], params).stats
    assert stats.accepted / stats.drafted > 0.9


def test_a_third_of_the_layers_by_default():
    assert EarlyExit(load(tiny_llama(num_hidden_layers=2))).layers == 1
    assert EarlyExit(load(tiny_llama(num_hidden_layers=6))).layers == 2
    assert get("early-exit:5", load(tiny_llama(num_hidden_layers=6))).layers == 5


def test_in_a_cascade():
    model = load(tiny_llama(seed=1, num_hidden_layers=3), runner="hf")
    params = SamplingParams(temperature=0.0, max_new_tokens=40)
    plain = Engine(model, None).generate(PROMPTS, params)
    for drafter in ("prompt-lookup,early-exit", Cascade([PromptLookup(), EarlyExit(model, 2)])):
        found = Engine(model, drafter, num_speculative_tokens=4).generate(PROMPTS, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_no_cache_is_added():
    model = load(tiny_llama(seed=1, num_hidden_layers=4), runner="hf")
    need = model.cache_bytes([64 + 257])
    Engine(model, "early-exit", cache_memory=need).generate([1] * 32, SamplingParams(max_new_tokens=32))


def test_what_can_not_be_left_early_is_named():
    for module, message in (
        (tiny_t5(seed=1), "Seq2SeqModel.* can't be left early"),
        (tiny_llama(num_hidden_layers=1), "has one layer"),
    ):
        with pytest.raises(ParameterError, match=message):
            Engine(module, "early-exit")
    for make in (tiny_mamba, tiny_bloom):
        with pytest.warns(SlowModelWarning), pytest.raises(ParameterError, match="can't be left early"):
            Engine(make(seed=1), "early-exit")
    module = tiny_llama(num_hidden_layers=3)
    module.model.layers[0].forward = module.model.layers[0].forward
    with pytest.raises(ParameterError, match="its parts have been wrapped"):
        Engine(load(module, runner="hf"), "early-exit")


def test_wrong_numbers_and_other_targets_are_named():
    model = load(tiny_llama(num_hidden_layers=3))
    for wrong, message in (
        ("early-exit:3", "layers is 3.*at most 2"),
        ("early-exit:0", "layers is 0"),
        ("early-exit:x", "layers is 'x'"),
        ("early-exit:", "early-exit:LAYERS"),
    ):
        with pytest.raises(ParameterError, match=message):
            Engine(model, wrong)
    with pytest.raises(ParameterError, match="is made of the target"):
        get("early-exit")
    with pytest.raises(ParameterError, match="the target is another model"):
        Engine(load(tiny_llama(num_hidden_layers=3)), EarlyExit(model))


@pytest.mark.parametrize("runner", ["hf", "torch"])
def test_costs_are_assumed_by_the_layers_that_are_run(runner):
    target = load(tiny_llama(seed=1, num_hidden_layers=10), **RUNNERS[runner])
    few, most = (Assumed.of([EarlyExit(target, n)], None, target, together=False).steps[0] for n in (2, 9))
    assert 0.1 < few < 0.5 < most < 1.0  # the output layer is run, too

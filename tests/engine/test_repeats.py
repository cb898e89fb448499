"""A seed gives one output, whatever an engine was asked for before."""

from __future__ import annotations

from random import Random

import pytest
import torch

from foretoken import Engine, SamplingParams, load, tiny_pair_path
from foretoken.drafters.draft_model import DraftModel
from foretoken.limits import Limits
from foretoken.models.chain import Draws
from foretoken.models.feed import feed, prompt_part
from foretoken.models.processor import multiplies_tiles
from foretoken.models.widths import WIDE, own_widths

_SHORT = "Where wrong is"
_LONG = (
    "The art of reading is the art of adopting the pace that the author has set. Some books are fast and some are "
    "slow, but no book can be understood if it is taken at the wrong speed."
)
_SEEDS = (1, 2, 3, 4, 5)


def _seeded(seed):
    return SamplingParams(max_new_tokens=40, temperature=0.8, seed=seed)


def _target(quantize):
    """The shipped target, on processors that round alike from `WIDE` tokens on; others give no such promise.

    Those with AMX do: there it would be a fault.
    """
    target = load(tiny_pair_path() / "target", quantize=quantize)
    _skip_unless_alike(target)
    return target


def _skip_unless_alike(target):
    tokens = [1 + (7 * at) % 500 for at in range(48)]
    found = []
    for last in (48, WIDE, WIDE + 1, 17):
        cache = target.open(1)
        if last < len(tokens):
            feed(target, cache, [tokens[:-last]])
        found.append(feed(target, cache, [tokens[-last:]], keep="last"))
    alike = all(torch.equal(found[0], each) for each in found)
    if multiplies_tiles():
        assert alike
    elif not alike:
        pytest.skip("on this processor passes are rounded otherwise by how wide they are")


def _other(engine, random):
    """Requests without a seed, which leave a KV cache of other tokens, and passes of other widths, behind."""
    prompt = random.choice([_SHORT, _LONG[20:], _LONG + " " + _SHORT])[: random.randrange(8, 200)]
    params = SamplingParams(max_new_tokens=random.randrange(3, 24), temperature=random.choice([0.0, 0.8]))
    engine.generate([prompt] * random.choice([1, 1, 3]), params)


def _engine(drafter, quantize):
    target, own = _target(quantize), tiny_pair_path() / "drafter"
    if drafter == "draft-model of 16 bits":
        return Engine(target, DraftModel(load(own, quantize=None)))
    if drafter == "trees of a draft-model":
        return Engine(target, DraftModel(own, tree="static"))
    return Engine(target, drafter.replace("draft-model", str(own)))


@pytest.fixture
def threads(request):
    """Threads of both models: kernels of attention differ by it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.grid
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("drafter", "quantize", "threads"),
    [
        ("none", None, 2),
        ("none", "int8", 1),
        ("draft-model", None, 1),
        ("draft-model of 16 bits", None, 2),
        ("auto,draft-model", "int8", 2),
        ("trees of a draft-model", "int8", 1),
        ("early-exit", None, 1),
        ("early-exit", "int8", 2),
    ],
    indirect=["threads"],
)
def test_a_seed_gives_one_output_whatever_was_asked_for_before(drafter, quantize):
    """Passes of other widths are rounded otherwise, and so are copied prefixes."""
    engine, random = _engine(drafter, quantize), Random(1)
    asked = [(prompt, seed) for prompt in (_SHORT, _LONG) for seed in _SEEDS]
    found = {}
    for prompt, seed in asked:
        _other(engine, random)
        found[prompt, seed] = engine.generate(prompt, _seeded(seed)).token_ids
    for prompt, seed in reversed(asked):  # the long prompt is there now
        assert engine.generate(prompt, _seeded(seed)).token_ids == found[prompt, seed]


@pytest.mark.grid
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("quantize", "threads"), [(None, 2), ("int8", 1)], indirect=["threads"])
def test_a_batch_of_seeds_gives_one_output_whatever_was_asked_for_before(quantize):
    engine, random = _engine("draft-model", quantize), Random(2)
    found = []
    for _ in range(3):
        batch = engine.generate([_SHORT, _LONG[:60], _LONG[80:150]], [_seeded(seed) for seed in _SEEDS[:3]])
        found.append([completion.token_ids for completion in batch])
        _other(engine, random)
    assert found[0] == found[1] == found[2]


@pytest.mark.grid
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_prompt_of_several_passes_gives_one_output_whether_it_was_copied(quantize):
    engine, random = Engine(_target(quantize), "none", limits=Limits(prefill_tokens=20)), Random(3)
    for size in (41, 42, 44, 60, 61, 62):  # of the last pass one token would be left, or a few
        prompt = [random.randrange(1, 500) for _ in range(size)]
        found = [engine.generate(prompt, _seeded(seed)) for seed in (1, 1)]
        assert [each.stats.cached for each in found] == [0, size - WIDE]
        assert found[0].token_ids == found[1].token_ids


def test_a_long_prompt_of_early_layers_gives_one_output_whether_it_was_copied():
    """They need all of it before their draft: 128 tokens a pass where weights are rounded."""
    engine, random = _engine("early-exit", "w8a8"), Random(4)
    for size in (130, 131, 132):
        prompt = [random.randrange(1, 500) for _ in range(size)]
        for seed in _SEEDS:
            engine.generate(prompt[::-1], SamplingParams(max_new_tokens=2))
            found = [engine.generate(prompt, _seeded(seed)) for _ in range(2)]
            assert [each.stats.cached for each in found] == [0, size - WIDE]
            assert found[0].token_ids == found[1].token_ids


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_chains_of_a_seed_do_not_begin_earlier(quantize):
    """Those of others do, where the chain before was wider: keys and values are then computed once more."""
    model, random = load(tiny_pair_path() / "drafter", quantize=quantize), Random(5)
    _skip_unless_alike(model)
    tokens = [random.randrange(1, 500) for _ in range(60)]

    def drafted(before):
        cache, other, probs = model.open(1), model.open(1), []
        for begin in (0, *range(20, 60, 8)):
            new = tokens[begin : begin + (20 if begin == 0 else 8)]
            draws = Draws(torch.ones(1), torch.full((1, 3), 0.5, dtype=torch.float64), reproducible=True)
            model.chain([[7] * before], 3, other, draws)
            forget(other)
            for part in [new] if begin == 0 else [new[:2], *([token] for token in new[2:])]:
                with own_widths(1):
                    probs.append(model.chain([part], 3, cache, draws).probs)
                forget(cache)
        return torch.cat(probs)

    def forget(cache):
        cache.commit(torch.zeros((1, 0), dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    assert torch.equal(drafted(12), drafted(1))


@pytest.mark.parametrize(
    ("missing", "most", "expected"),
    [
        (10, 20, 10),
        (20, 20, 20),
        (21, 20, 13),
        (27, 20, 19),
        (28, 20, 20),
        (100, 20, 20),
        (9, 8, 8),
        (9, 9, 9),
        (10, 9, 2),
    ],
)
def test_the_last_part_of_a_prompt_is_wide_where_it_can_be(missing, most, expected):
    assert prompt_part(missing, most) == expected


def test_what_a_seed_copies_was_computed_of_prompts():
    """Of its own prompt all but the last `WIDE` tokens, and nothing of an output, which others copy."""
    engine = Engine(tiny_pair_path() / "target", "none")
    prompt = [1 + (7 * at) % 500 for at in range(60)]
    first = engine.generate(prompt, _seeded(1))
    copied = len(prompt) - WIDE
    assert engine.generate(prompt, _seeded(1)).stats.cached == copied
    longer = [*prompt, *first.token_ids, 5, 6, 7]
    assert engine.generate(longer, _seeded(2)).stats.cached == copied
    engine.generate(prompt, _seeded(1))
    assert engine.generate(longer, SamplingParams(max_new_tokens=2)).stats.cached > len(prompt)
    # What that one copied was decoded: of what it computed of its own prompt, nothing comes before that.
    assert engine.generate(longer, _seeded(2)).stats.cached == copied
    assert engine.generate(longer, _seeded(2)).stats.cached == len(longer) - WIDE

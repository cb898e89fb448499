"""What calls of drafters take that draft certain numbers of tokens."""

from __future__ import annotations

from math import exp

import pytest

from foretoken import Engine, SamplingParams, tiny_pair_path
from foretoken.models.native.chaining import CHAIN_STEPS, steps_of_call
from foretoken.policy.acceptance import Kind
from foretoken.policy.calls import DrafterCosts, call_parts
from foretoken.policy.costs import Costs
from foretoken.policy.lines import Drift, Line
from foretoken.policy.policy import Policy
from foretoken.policy.request import LENGTHS, Row

SIZES = (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [(0, []), (1, [1]), (3, [3]), (4, [5]), (5, [5]), (6, [5, 1]), (9, [5, 5]), (12, [5, 5, 2]), (16, [5, 5, 5, 1])],
)
def test_a_draft_is_made_up_of_calls(tokens, parts):
    assert call_parts(tokens, SIZES) == parts
    assert sum(parts) >= tokens
    assert call_parts(tokens, ()) == [tokens]


def test_a_draft_takes_what_its_calls_take():
    """Less a share of the smallest one for each further call."""
    costs = DrafterCosts(Line(1.0, 0.5), sizes=SIZES)
    assert costs.up_to(8) == pytest.approx([0.0, 1.5, 2.0, 2.5, 3.5, 3.5, 4.475, 4.975, 5.475])
    assert [costs.seconds(tokens) for tokens in range(9)] == pytest.approx(costs.up_to(8))
    any_number = DrafterCosts(Line(1.0, 0.5))
    assert any_number.up_to(4) == pytest.approx([0.0, 1.5, 2.0, 2.5, 3.0])


def test_a_small_call_that_seems_dear_makes_no_draft_take_less_than_its_largest_call():
    """Five tokens that take a fortieth of what was believed leave the smallest call as dear as it was."""
    costs = Costs(Line(1.0, 0.1), [DrafterCosts(Line(0.375, 0.1), sizes=SIZES)])
    for _ in range(20):
        for tokens in (5, 10):
            costs.record(1 + tokens, 1.0, [(0, tokens, 1, 0, 0.02)])
    drafter = costs.drafters[0]
    for tokens in range(1, 17):
        assert drafter.seconds(tokens) >= max(map(drafter.call, call_parts(tokens, SIZES))) > 0.0


def test_what_several_calls_took_is_learnt_of_each():
    """Also of lengths of which none was drafted: calls of 5 and of 1 take what they are taken to."""
    costs, true = (DrafterCosts(Line(*line), sizes=SIZES) for line in ((1.0, 0.5), (0.2, 0.3)))
    drift = Drift()
    for tokens in (6, 16) * 60:
        costs.record(tokens, true.seconds(tokens), drift)
    found = {tokens: costs.seconds(tokens) * exp(drift.value) for tokens in (5, 6, 10, 16)}
    assert found == pytest.approx({tokens: true.seconds(tokens) for tokens in found}, rel=0.12)


def pace(tokens, rate):
    """Tokens in a plain pass's time, where each draft token is right that often."""
    emitted = sum(rate**depth for depth in range(tokens + 1))
    return emitted / (1.0 + 0.04 * tokens + DrafterCosts(Line(0.3, 0.15), sizes=SIZES).seconds(tokens))


def choice(rate, sizes):
    """The length that a row by itself gets of a policy that measured calls of 1, 3 and 5 tokens."""
    costs = Costs(Line(0.96, 0.04), [DrafterCosts(Line(0.3, 0.15))])
    policy = Policy([Kind((rate,))], [False], costs, Costs.by_bytes(1.0, [0.1]))
    policy.drafts_in([sizes])
    calls = [[(size, 0.3 + 0.15 * size) for size in (1, 3, 5)]]
    costs.measure([(size, 0.96 + 0.04 * size) for size in (1, 2, 4, 6, 9, 33)], calls)
    row = Row(policy.open(sampled=True, copied=False), 200, [0])
    policy.choose([row])
    return row.chosen.tokens


@pytest.mark.parametrize("rate", [0.6, 0.7, 0.8, 0.85, 0.9, 0.94])
def test_the_length_that_pays_most_is_chosen_by_what_its_calls_take(rate):
    best = max(pace(tokens, rate) for tokens in (0, *LENGTHS))
    assert pace(choice(rate, SIZES), rate) > 0.99 * best


def test_without_the_sizes_of_calls_a_length_is_chosen_that_pays_less():
    rates = [0.6, 0.7, 0.8, 0.85, 0.9, 0.94]
    assert min(pace(choice(rate, ()), rate) / pace(choice(rate, SIZES), rate) for rate in rates) < 0.97


def test_the_parts_are_the_calls_that_the_native_runner_makes():
    for tokens in range(1, 40):
        made, left = [], tokens
        while left > 0:
            made.append(steps_of_call(left))
            left -= made[-1]
        assert call_parts(tokens, CHAIN_STEPS[::-1]) == made


@pytest.mark.grid
@pytest.mark.parametrize(("options", "sizes"), [({}, SIZES), ({"temperature": 0.0}, SIZES), ({"top_p": 0.9}, ())])
def test_an_engine_prices_its_draft_model_by_how_it_drafts(options, sizes):
    """With a part of the distribution alone, tokens are drawn one by one."""
    pair = tiny_pair_path()
    engine = Engine(pair / "target", str(pair / "drafter"))
    for _ in range(2):
        engine.generate("Once upon a time", SamplingParams(max_new_tokens=12, **{"temperature": 1.0, **options}))
        (costs,) = engine.policy.costs.drafters
        assert costs.sizes == sizes
        engine.generate("Once upon a time", SamplingParams(max_new_tokens=12, top_k=3))


def test_a_seeded_row_is_priced_by_its_own_calls_whatever_is_beside_it():
    """A neighbour with top-p drafts token by token, and so do all rows that share its costs."""
    found = set()
    for sizes, beside in ((SIZES, [()]), (SIZES, [SIZES]), ((), [SIZES])):
        costs, fixed = (Costs(Line(0.96, 0.04), [DrafterCosts(Line(0.3, 0.15))]) for _ in range(2))
        policy = Policy([Kind((0.9,))], [False], costs, fixed)
        seeded, shared = (policy.open(sampled=True, reproducible=own, copied=False) for own in (True, False))
        policy.drafts_in(beside)
        rows = [Row(seeded, 200, [0], calls=[sizes]), Row(shared, 200, [0], calls=beside)]
        policy.choose(rows)
        assert (fixed.drafters[0].sizes, costs.drafters[0].sizes) == (sizes, beside[0])
        found.add((sizes, rows[0].chosen.tokens))
    assert len(found) == 2  # one choice for each way to draft

"""Outputs are the same to the last bit wherever a prompt's passes begin and end, where a target rounds alike."""

from __future__ import annotations

from functools import cache

import pytest

from alike import TEXT, alike_folder
from exactness.test_alike import DRAFTER, TARGET, bits, greedy, prompts_of
from foretoken import Engine, Grammar, SamplingParams
from foretoken.limits import Limits
from foretoken.models.native.cache import Feed
from foretoken.models.native.sequences import stands_alone
from foretoken.models.widths import SHORT_PROMPT

LENGTHS = (1, 2, 3, 12, SHORT_PROMPT - 1, SHORT_PROMPT, SHORT_PROMPT + 1, 60)


def alone_of(target, prompt, params):
    return bits(Engine(target, "none").generate(prompt, params))


@cache
def prompt_alone(length):
    return alone_of(alike_folder(TARGET, "float32"), prompts_of(3, [length])[0], greedy(12))


@pytest.mark.parametrize("length", [5, 10, 20, SHORT_PROMPT - 1, SHORT_PROMPT, SHORT_PROMPT + 1, SHORT_PROMPT + 2])
@pytest.mark.parametrize("further", [1, 2, 3, 10])
def test_copied_prefixes_of_prompts_change_no_bit(length, further):
    """Those that others wait for are computed before the round's pass, and those of requests that left are there."""
    target, limits = alike_folder(TARGET, "float32"), Limits(shortest_shared_prefix=4)
    (prompt,) = prompts_of(3, [length])
    longer = prompt + prompts_of(11, [further])[0]
    expected = [prompt_alone(length), alone_of(target, longer, greedy(12))]
    together = Engine(target, "none", max_batch_size=2, limits=limits).generate([prompt, longer], greedy(12))
    assert [bits(each) for each in together] == expected
    engine = Engine(target, "none", limits=limits)
    engine.generate(prompt, greedy(1))
    assert bits(engine.generate(longer, greedy(12))) == expected[1]
    again = Engine(target, "auto", num_speculative_tokens=4, limits=limits)
    for _ in range(2):  # the second time all but the root is copied
        found = again.generate(longer, greedy(12))
        assert bits(found) == expected[1]
    assert found.stats.cached == len(longer) - 1


@pytest.mark.grid
@pytest.mark.parametrize("drafter", ["auto", f"auto,{DRAFTER}"])
def test_tokens_that_grammars_force_change_no_bit(drafter):
    target = alike_folder(TARGET, "float32")
    grammar = Grammar.regex("(alpha beta gamma delta epsilon zeta eta theta iota kappa [0-9]+){3}")
    params = SamplingParams(max_new_tokens=60, temperature=0.0, logprobs=1, grammar=grammar)
    drafted = 0
    for prompt in prompts_of(5, LENGTHS):
        found = Engine(target, drafter).generate(prompt, params)
        assert bits(found) == alone_of(target, prompt, params)
        drafted += found.stats.rounds < len(found.token_ids)
    assert drafted


def test_layers_that_draft_change_no_bit():
    """They have the whole target compute what they lack, but no ends of prompts beside which nothing is drafted."""
    target = alike_folder(TARGET, "float32")
    prompts = prompts_of(5, LENGTHS)
    expected = [alone_of(target, prompt, greedy(20)) for prompt in prompts]
    engine = Engine(target, "early-exit", num_speculative_tokens=3, max_batch_size=len(prompts))
    assert [bits(engine.generate(prompt, greedy(20))) for prompt in prompts] == expected
    engine = Engine(target, "early-exit", num_speculative_tokens=3, max_batch_size=len(prompts))
    assert [bits(each) for each in engine.generate(prompts, greedy(20))] == expected


def test_the_beginnings_of_short_prompts_are_sequences_by_themselves():
    def fed(start, size):
        return stands_alone(Feed(0, start, TEXT[:size], 0, None), None, alike=True, single=False)

    assert all([fed(0, 5), fed(0, SHORT_PROMPT - 1), fed(8, SHORT_PROMPT - 9)])
    assert not any([fed(0, SHORT_PROMPT), fed(SHORT_PROMPT, 1)])

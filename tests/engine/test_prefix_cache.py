"""Prefixes that requests share: whose KV cache is copied, and that everybody gets there."""

from __future__ import annotations

import itertools

import pytest

from foretoken.engine.engine import Engine
from foretoken.engine.prefix_cache import PrefixCache
from foretoken.engine.prompts import make_sequence
from foretoken.engine.row import Row
from foretoken.models import LanguageModel, load
from foretoken.models.feed import feed
from foretoken.sampling import SamplingParams
from foretoken.verify import get
from tiny import tiny_llama

GREEDY = SamplingParams(temperature=0, max_new_tokens=8, logprobs=0)
S = [1 + (5 * i) % 29 for i in range(60)]
O = [1 + (7 * i) % 31 for i in range(80)]  # noqa: E741
MOST_ROUNDS = 400


@pytest.fixture(scope="module", params=["hf", "native"])
def target(request) -> LanguageModel:
    return load(tiny_llama(seed=1), runner=request.param)


def check(engine, prompts):
    """Every prompt of a call gets what it gets alone, within a bounded number of rounds."""
    requests = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(MOST_ROUNDS):
        engine.step()
    assert not engine.busy
    for prompt, request in zip(prompts, requests, strict=True):
        alone = Engine(engine.target, None, "coupled", reuse_prefixes=False).generate(prompt, GREEDY)
        completion = request.completion
        assert completion.token_ids == alone.token_ids
        assert [one.logprob for one in completion.logprobs] == pytest.approx(
            [one.logprob for one in alone.logprobs], abs=1e-4
        )


def test_requests_after_a_call_copy_from_the_right_row(target):
    engine = Engine(target, None)
    engine.generate([3] * 40, GREEDY)
    check(engine, [[*S, 1], [*O, 2], [*S, 3]])


def test_statistics_tell_how_much_was_copied(target):
    """Of a request that was there before, of one that is being decoded, and of one that comes at the same time."""
    engine = Engine(target, None)

    def cached(*prompts):
        return [one.stats.cached for one in engine.generate(list(prompts), GREEDY)]

    assert cached([3] * 40) == [0]
    assert cached([*S, 1], [*O, 2], [*S, 3], S[:20]) == [0, 0, len(S), 0]
    assert cached([*S, 3]) == [len(S)]  # all but the last one, whose scores are wanted
    forgetful = Engine(target, None, reuse_prefixes=False)
    assert [forgetful.generate([*S, 3], GREEDY).stats.cached for _ in range(2)] == [0, 0]


def test_requests_after_a_call_do_not_wait_for_themselves(target):
    engine = Engine(target, None)
    engine.generate([3] * 40, GREEDY)
    check(engine, [[*S, 1], [*S, 3]])


@pytest.mark.parametrize(("documents", "rows"), [(2, 4), (30, 5)])
def test_questions_about_documents(target, documents, rows):
    engine = Engine(target, None, max_batch_size=rows)
    texts = [[1 + (7 * i * i + d) % 31 for i in range(34 + d % 7)] for d in range(documents)]
    check(engine, [[*texts[number // 2 % documents], 1 + number % 30] for number in range(2 * max(documents, rows))])


def _rows(target, prompts):
    return [Row(make_sequence(target, prompt, GREEDY), target, verifier=get("token")) for prompt in prompts]


@pytest.mark.grid
def test_nobody_waits_for_a_later_one_whatever_the_prompts(target):
    # Prompts that share prefixes of several lengths with several others, in every order.
    pool = [S[:9], S[:17], [*S[:12], 1, 2, 3], [*S[:12], 1, 2, 4], [*S[:6], 9, 9]]
    for held in ([], [S[:15]], [S[:8], [*S[:12], 1, 2, 5]]):
        for prompts in itertools.permutations(pool):
            prefixes = PrefixCache(target, shares=True, min_shared_prefix=4)
            if held:  # rows that have left, partly cached
                left = _rows(target, held)
                prefixes.join(left)
                feed(target, prefixes.cache, [row.sequence.tokens[:7] for row in left])
                for row in left:
                    row.cancel()
                prefixes.remove_finished()
            rows = _rows(target, prompts)
            prefixes.join(rows)
            for _ in range(len(rows)):  # each time, whoever does not wait computes the rest of the prompt
                prefixes.copy()
                lengths = prefixes.cache.lengths.tolist()
                missing = [row.sequence.tokens[have:-1] for row, have in zip(rows, lengths, strict=True)]
                feed(
                    target,
                    prefixes.cache,
                    [[] if waits else one for one, waits in zip(missing, prefixes.waiting(), strict=True)],
                )
            assert prefixes.cache.lengths.tolist() == [len(prompt) - 1 for prompt in prompts]


def test_a_failed_request_is_copied_from_by_nobody(target):
    prefixes = PrefixCache(target, shares=True)
    (bad,) = _rows(target, [S])
    prefixes.join([bad])
    feed(target, prefixes.cache, [S[:-1]])
    bad.fail(ValueError("no numbers"))
    prefixes.remove_finished()
    prefixes.join(_rows(target, [S]))
    assert prefixes.cache.lengths.tolist() == [0]


def test_a_request_that_left_gives_what_it_had_cached(target):
    prefixes = PrefixCache(target, shares=True)
    (cancelled,) = _rows(target, [S])
    prefixes.join([cancelled])
    feed(target, prefixes.cache, [S[:40]])
    cancelled.cancel()
    prefixes.remove_finished()
    first, second = _rows(target, [[*S, 1], [*S, 2]])
    prefixes.join([first, second])
    # The first copies the 40; the second waits for the 60 that the first will have.
    assert prefixes.cache.lengths.tolist() == [40, 0]
    assert prefixes.waiting() == [False, True]
    assert prefixes.awaited() == [True, False]
    assert [one.stats.cached for one in (first, second)] == [40, 0]
    feed(target, prefixes.cache, [[*S, 1][40:-1], []])
    prefixes.copy()
    assert [one.stats.cached for one in (first, second)] == [40, 60]
    prefixes.recompute([second])
    assert prefixes.cache.lengths.tolist() == [60, 0]
    assert [one.stats.cached for one in (first, second)] == [40, 0]


def test_what_was_kept_goes_where_nothing_is_to_be_kept_any_more():
    prompt, params = [1 + place % 30 for place in range(100)], SamplingParams(temperature=0.0, max_new_tokens=4)
    engine = Engine(load(tiny_llama(seed=1)), None)
    engine.generate(prompt, params)
    assert engine.generate(prompt, params).stats.cached > 0
    engine.reuse_prefixes = False
    assert engine.generate(prompt, params).stats.cached == 0
    engine.reuse_prefixes = True
    assert engine.generate(prompt, params).stats.cached == 0
    assert engine.generate(prompt, params).stats.cached > 0

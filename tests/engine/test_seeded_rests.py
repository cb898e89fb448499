"""Rounds in which seeded requests rest: they depend on nothing but the request's own rounds."""

from __future__ import annotations

import pytest

from foretoken import Engine, SamplingParams, load
from foretoken.policy.request import Request
from tiny import assume_cpus, tiny_llama

PROMPT = [1, 2, 3, 1, 2, 4, 1, 2]


@pytest.fixture(scope="module")
def target():
    return load(tiny_llama(seed=1))


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(4))
def test_an_output_is_the_same_whatever_happens_between_its_rounds(target, seed, monkeypatch):
    assume_cpus(monkeypatch)
    rested = []
    rest_alone = Request.rest_alone
    monkeypatch.setattr(Request, "rest_alone", lambda self: (rested.append(self.rounds), rest_alone(self)))
    params = SamplingParams(seed=seed, max_new_tokens=90)
    expected = Engine(target, "lookup").generate(PROMPT, params).token_ids
    assert rested  # copies of a random model's output are seldom right
    alone = list(rested)
    rested.clear()
    engine = Engine(target, "lookup")
    request, number = engine.submit(PROMPT, params), 0
    while engine.busy:
        engine.step()
        number += 1
        if number % 5 == 1:
            engine.generate([5, 6, 5, 6], SamplingParams(temperature=0, max_new_tokens=7))
    assert request.completion.token_ids == expected
    assert rested == alone
    rested.clear()
    others = [SamplingParams(max_new_tokens=30), SamplingParams(temperature=0, max_new_tokens=50)]
    batch = Engine(target, "lookup").generate([PROMPT, [3, 4], PROMPT], [others[0], params, others[1]])
    beside = Engine(target, "lookup").generate([PROMPT, PROMPT], [params, others[1]])
    assert beside[0].token_ids == expected
    assert len(batch) == 3

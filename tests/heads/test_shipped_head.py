"""The head that comes with the package."""

from __future__ import annotations

import pytest

from foretoken import Engine, SamplingParams
from foretoken.drafters import Eagle3
from foretoken.errors import ParameterError
from foretoken.models.tiny_pair import load_part
from tiny import tiny_llama

QUESTION = [{"role": "user", "content": "A shop sells 4 boxes of 6 eggs. How many eggs does it sell?"}]


def test_it_drafts_for_the_shipped_target():
    target = load_part("target")
    engine, plain = Engine(target, "eagle3", "token", 5), Engine(target, None)
    assert isinstance(engine.drafter, Eagle3)
    params = SamplingParams(temperature=0, max_new_tokens=80, ignore_eos=True)
    found = engine.generate(QUESTION, params)
    assert found.token_ids == plain.generate(QUESTION, params).token_ids
    assert found.stats.mean_acceptance_length > 2.5
    assert Engine(target, "eagle3", tree="static").verifier.name == "traversal"
    assert len(Engine(target, "prompt-lookup,eagle3").drafter.drafters) == 2


def test_other_targets_need_one_of_their_own():
    with pytest.raises(ParameterError, match="eagle3:"):
        Engine(tiny_llama(), "eagle3")

"""How one request speculates: its drafter, draft length and trees, beside others with the engine's."""

from __future__ import annotations

import pytest

from foretoken.drafters import Cascade, DraftModel, Lookup
from foretoken.engine.engine import Engine
from foretoken.errors import ParameterError
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)


class Counted(Lookup):
    """Counts the tokens that it may draft."""

    name = "counted"

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.branched = 0

    def propose(self, batch, limits):
        self.asked.append(list(limits))
        draft = super().propose(batch, limits)
        self.branched += not draft.is_chain
        return draft


def run(engine: Engine, *options: dict) -> list:
    requests = [engine.submit(PROMPT, GREEDY, **one) for one in options]
    while engine.busy:
        engine.step()
    return [request.completion for request in requests]


def plain() -> list[int]:
    return Engine(load(tiny_llama(seed=1)), None).generate(PROMPT, GREEDY).token_ids


@pytest.mark.parametrize("k", [4, "auto"])
def test_a_request_may_leave_the_drafter_out(k):
    engine = Engine(load(tiny_llama(seed=1)), Counted(), num_speculative_tokens=k)
    for _ in range(2):  # on one engine, in both orders
        found = run(engine, {"drafter": "none"}, {}, {"drafter": "counted"}, {"drafter": "auto"})
        assert [one.token_ids for one in found] == [plain()] * 4
        assert found[0].stats.drafted == 0
        assert all(one.stats.drafted > 0 for one in found[1:])


@pytest.mark.parametrize("k", [4, "auto"])
def test_a_request_may_take_one_drafter_of_a_cascade(k):
    target = load(tiny_llama(seed=1))
    counted = Counted()
    cascade = Cascade([counted, DraftModel(load(tiny_llama(seed=1)))], costs=[0.0, 0.05])
    engine = Engine(target, cascade, num_speculative_tokens=k)
    (found,) = run(engine, {"drafter": "draft-model"})
    assert found.token_ids == plain()
    assert not any(map(any, counted.asked))
    assert found.stats.accepted > 0
    (found,) = run(engine, {"drafter": "counted"})
    assert found.token_ids == plain()
    assert any(map(any, counted.asked))


def test_none_leaves_the_prediction():
    engine = Engine(load(tiny_llama(seed=1)), Lookup(), num_speculative_tokens=6)
    (found,) = run(engine, {"drafter": "none", "prediction": plain()})
    assert found.token_ids == plain()
    assert found.stats.drafted == found.stats.drafted_prediction > 10


def test_a_request_may_have_chains():
    drafter = Counted()
    engine = Engine(load(tiny_llama(seed=1)), drafter, num_speculative_tokens=8)
    assert engine.verifier.trees
    assert run(engine, {"tree": "none"})[0].token_ids == plain()
    assert drafter.branched == 0
    assert run(engine, {"tree": "auto"}, {"tree": "none"})[1].token_ids == plain()
    assert drafter.branched > 0


def test_an_engines_own_trees_may_be_named():
    engine = Engine(load(tiny_llama(seed=1)), tiny_llama(seed=2), num_speculative_tokens=8, tree="static")
    assert run(engine, {"tree": "static"})[0].token_ids == plain()
    with pytest.raises(ParameterError, match="tree is 'dynamic'"):
        engine.submit(PROMPT, GREEDY, tree="dynamic")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drafter": "suffix"}, "drafter is 'suffix': a request may choose among the engine's, 'none', 'auto'"),
        ({"drafter": 3}, "drafter is 3"),
        ({"tree": "static"}, "tree is 'static'"),
        ({"tree": ["none"]}, "tree is"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"drafters": "none"}, "drafters"),
    ],
)
def test_what_the_engine_does_not_have_is_named(options, named):
    engine = Engine(load(tiny_llama(seed=1)), Lookup())
    with pytest.raises(ParameterError, match=named):
        engine.submit(PROMPT, GREEDY, **options)
    assert not engine.busy

"""Candidates on tiny models."""

from __future__ import annotations

import pytest

import tiny
from foretoken import Engine, load
from foretoken.errors import ModelError
from foretoken.tune import Candidate, Meter
from foretoken.tune.candidates import PLAIN
from foretoken.tune.plan import Turn
from foretoken.workloads import Item, Prompt


def turn(number=0, temperature=0.0):
    return Turn(0, number, Prompt(Item("one", "kind", ""), (5, 6, 7)), temperature)


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny.tiny_llama(seed=1).save_pretrained(folder / "same")
    tiny.tiny_llama(seed=1, vocab_size=40).save_pretrained(folder / "foreign")
    meter = Meter(load(tiny.tiny_llama(seed=1)), 30, {"runner": "hf"})
    meter.folder = folder
    return meter


@pytest.fixture
def asked(monkeypatch):
    """Sampling parameters of the outputs that are made."""
    found, generate = [], Engine.generate

    def spy(self, prompt, params):
        found.append(params)
        return generate(self, prompt, params)

    monkeypatch.setattr(Engine, "generate", spy)
    return found


def test_what_a_text_takes(meter):
    plain = meter.run(PLAIN, turn())
    assert (plain["tokens"], plain["rounds"], plain["drafted"]) == (30, 30, 0)
    assert 0 <= plain["drafting"] < plain["seconds"]
    same = meter.run(Candidate(str(meter.folder / "same"), "token", 3), turn())
    assert (same["tokens"], same["rounds"]) == (30, 8)  # all is accepted: four tokens a pass
    assert same["accepted"] == same["drafted"] == 22
    assert same["drafting"] > 0


def test_candidates_share_a_drafter_and_not_its_trees(meter):
    same = str(meter.folder / "same")
    assert meter.grows(same)
    assert meter.heavy(same)
    assert not meter.trees(same)
    assert not meter.grows("prompt-lookup")
    assert not meter.heavy("prompt-lookup")
    rates = meter.measure(same, [turn(number, 1.0) for number in range(4)])
    assert rates[0][0] == pytest.approx(1.0, abs=0.15)  # the target itself: the first child is the one
    meter.use(same, rates)
    drafter = meter._drafter(same)
    for tree in ("measured", None, "dynamic", "static", None):
        candidate = Candidate(same, "traversal" if tree else "token", 6, tree)
        meter.run(candidate, turn())
        assert drafter.trees == (tree is not None)
    meter.run(Candidate(same, "traversal", 6, "dynamic"), turn())
    cascade = f"prompt-lookup,{same}"
    meter.run(Candidate(cascade, "token", 3), turn())
    assert not drafter.trees
    assert meter._drafter(cascade).drafters[1] is drafter


def test_no_candidate_copies_what_was_written_before(meter):
    """Neither from its own warm-up and outputs nor from those of candidates that share its drafter."""
    alone = meter.run(Candidate("suffix", "token", 4), turn())
    for k in (4, 5, 4):
        found = meter.run(Candidate("suffix:1000", "token", k), turn())
    assert (found["rounds"], found["drafted"]) == (alone["rounds"], alone["drafted"])


def test_the_number_of_tokens_is_free_where_it_is_chosen(meter, asked):
    meter.run(Candidate("prompt-lookup", "token", 3), turn(7, 1.0))
    assert {params.seed for params in asked} == {7}
    asked.clear()
    meter.run(Candidate("prompt-lookup", "token", "auto"), turn(7, 1.0))
    assert {params.seed for params in asked} == {None}


def test_the_first_output_of_each_kind_is_not_measured(meter, asked):
    """Sampled drafts are compiled apart from greedy ones."""
    for temperature in (0.0, 0.0, 1.0, 0.7, 0.0):
        meter.run(Candidate("prompt-lookup", "token", 7), turn(1, temperature))
    assert [params.max_new_tokens for params in asked] == [16, 30, 30, 16, 30, 30, 30]


def test_what_does_not_fit_says_so(meter):
    with pytest.raises(ModelError, match="40"):
        meter.trees(str(meter.folder / "foreign"))

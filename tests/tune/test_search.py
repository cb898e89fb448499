"""Who goes on, who wins, and what time and failures do to that: on given speeds."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from given_speeds import Track, plan
from rich.console import Console

from foretoken.bench.errors import BenchError
from foretoken.drafters import Known, NgramStorage, PromptLookup, known
from foretoken.errors import ModelError
from foretoken.tune import Candidate, candidates
from foretoken.tune.candidates import PLAIN
from foretoken.tune.report import profile_of, show


def test_the_fastest_wins_with_its_best_settings(race):
    track = Track({"slow": 0.5, "good": 1.5, "fair": 1.2, "poor": 0.9, Candidate("good", "block", 6): 1.8})
    results = race(track)
    best = results.ranked[0]
    assert best.candidate == Candidate("good", "block", 6)
    assert best.score == pytest.approx(1.8)
    assert best.acceptance_length == 2
    assert best.drafting == pytest.approx(0.25)
    assert list(dict.fromkeys(one.candidate.drafter for one in results.ranked if one.rung == 0)) == ["poor", "slow"]
    assert results.unmeasured == []
    # Ratios are those of one turn, and each turn is everybody's.
    turns = Counter(turn.number for candidate, turn in track.calls if turn.rung == 2)
    assert len(turns) == 32
    assert len(set(turns.values())) == 1


def test_what_is_clearly_slower_has_few_turns(race):
    track = Track({"slow": 0.5, "good": 1.5})
    race(track)
    turns = Counter(candidate.drafter for candidate, turn in track.calls if turn.rung == 0)
    assert turns == {"none": 8, "good": 3 * 8, "slow": 3 * 4}  # usual settings, and two fixed draft lengths


def test_drift_of_the_machine_hits_all_alike(race):
    track = Track({"good": 1.5, "fair": 1.3}, drift=0.01)
    best = race(track).ranked[0]
    assert best.candidate.drafter == "good"
    assert best.score == pytest.approx(1.5, rel=0.1)
    assert track.calls[0][0] != track.calls[12][0] or track.calls[1][0] != track.calls[13][0]  # nobody is always first


def test_where_nothing_helps_plain_decoding_wins(race):
    results = race(Track({"slow": 0.5, "poor": 0.97}))
    assert results.ranked[0].candidate == PLAIN
    assert results.ranked[0].score == 1


def test_both_temperatures_count(race):
    class Uneven(Track):
        def run(self, candidate, turn):
            told = super().run(candidate, turn)
            if candidate.drafter == "greedy" and turn.temperature:
                told["seconds"] *= 4
            return told

    results = race(Uneven({"greedy": 2.0, "even": 1.2}))
    assert results.ranked[0].candidate.drafter == "even"
    uneven = next(one for one in results.ranked if one.candidate.drafter == "greedy")
    assert uneven.ratios[0.0].median == pytest.approx(2.0)
    assert uneven.ratios[1.0].median == pytest.approx(0.5)


def test_a_drafter_is_not_dropped_for_what_one_draft_length_makes_of_it(race):
    """The policy never drafts with it; with 3 tokens it is the fastest."""
    track = Track({"model": 0.9, "good": 1.3, "fair": 1.2, "poor": 1.1, Candidate("model", "block", 3): 1.6})
    assert race(track).ranked[0].candidate == Candidate("model", "block", 3)


class Apart(Track):
    """Speeds by temperature: pairs for greedy and sampled requests."""

    def run(self, candidate, turn):
        speeds = self.speeds.get(candidate, self.speeds.get(candidate.drafter, 1.0))
        if isinstance(speeds, tuple):
            speed = speeds[turn.temperature > 0]
            self.now += self.seconds / speed
            self.calls.append((candidate, turn))
            return {"tokens": 64, "rounds": 32, "drafted": 96, "accepted": 32, "seconds": 1 / speed, "drafting": 0.1}
        return super().run(candidate, turn)


def test_what_is_fast_at_one_temperature_alone_stays_to_the_end(race):
    speeds = {"greedy": (2.5, 0.3), "sampled": (0.4, 1.7), **{name: (1.2, 1.2) for name in ("a", "b", "c", "d")}}
    results = race(Apart(speeds))
    assert results.ranked[0].candidate.drafter in ("a", "b", "c", "d")
    assert results.best_at(0.0).candidate.drafter == "greedy"
    assert results.best_at(1.0).candidate.drafter == "sampled"


def test_the_profile_has_settings_for_greedy_and_for_sampled_requests(race):
    chosen = plan(["one", "other"])
    speeds = {"one": (1.5, 0.9), "other": (1.2, 1.3), Candidate("other", "block", 6): (1.4, 1.2)}
    profile = profile_of(race(Apart(speeds), chosen), chosen, None, {}, {})
    assert (profile.drafter, profile.num_speculative_tokens) == ("other", 6)
    greedy, sampled = profile.for_requests(False), profile.for_requests(True)
    assert greedy.drafter == "one"
    assert (sampled.drafter, sampled.num_speculative_tokens) != ("other", 6)
    assert sampled.drafter == "other"
    assert profile.for_requests(None) is profile


def test_the_best_model_and_the_best_of_the_others_join(race):
    track = Track({"lookup": 1.2, "other": 1.3, "model": 1.5, "other,model": 1.7}, models_of=("model",))
    results = race(track)
    assert results.ranked[0].candidate.drafter == "other,model"
    assert not any("lookup,model" in candidate.drafter for candidate, _ in track.calls)


def test_drafters_of_trees_are_tried_with_trees_and_with_chains(race):
    track = Track({"tree": 1.5}, trees_of=("tree",))
    race(track)
    tried = {(candidate.verifier, candidate.num_speculative_tokens) for candidate, _ in track.calls} - {
        ("token", "auto")
    }
    assert tried == {("traversal", k) for k in ("auto", 8, 16, 32)} | {("block", "auto")}


def test_trees_are_measured_and_tried_where_they_can_be_grown(race, tmp_path):
    measured = Candidate("model", "traversal", 12, "measured")
    track = Track({"model": 1.5, measured: 1.9}, grown=("model",))
    results = race(track, file=tmp_path / "state")
    assert results.ranked[0].candidate == measured
    assert track.measured == ["model"]
    assert track.rates == results.acceptance == {"model": [[0.5, 0.25], [0.25, 0.125]]}
    assert {candidate.tree for candidate, _ in track.calls} == {None, "dynamic", "measured"}
    again = Track(track.speeds, grown=("model",))
    race(again, file=tmp_path / "state")
    assert (again.measured, again.rates) == ([], track.rates)


@pytest.mark.parametrize(("seconds", "temperatures", "trees"), [
    (1e9, (0.0,), {None, "dynamic"}), (120.0, (0.0, 1.0), {None, "dynamic", "static"}),
])  # fmt: skip
def test_trees_are_not_measured_where_nothing_is_drawn_or_time_is_short(race, seconds, temperatures, trees):
    track = Track({"model": 1.5}, grown=("model",))
    race(track, plan(["model"], seconds=seconds, temperatures=temperatures))
    assert track.measured == []
    assert {candidate.tree for candidate, _ in track.calls} == trees


def test_greedy_texts_alone_need_one_verifier(race):
    track = Track({"good": 1.5})
    race(track, plan(["good"], temperatures=(0.0,)))
    assert {candidate.verifier for candidate, _ in track.calls} == {"block"}


def test_failures_are_told_and_harm_nobody(race):
    track = Track(
        {
            "good": 1.5,
            "foreign": ModelError("other vocabulary\nmore"),
            Candidate("good", "token", "auto"): OSError("odd"),
        }
    )
    results = race(track)
    assert {(one.drafter, reason) for one, reason in results.failed.items()} == {
        ("foreign", "other vocabulary"),
        ("good", "odd"),
    }
    assert results.ranked[0].candidate.drafter == "good"
    assert "foreign" not in {one.candidate.drafter for one in results.ranked}


def test_an_error_of_plain_decoding_is_the_targets(race):
    class Broken(Track):
        def run(self, candidate, turn):
            raise ModelError("no target")

    with pytest.raises(ModelError, match="no target"):
        race(Broken({"good": 1.5}))


@pytest.mark.parametrize("seconds", [12.0, 60.0, 200.0])
def test_the_time_is_kept(race, seconds):
    speeds = {f"drafter-{number}": 1.0 + number / 10 for number in range(6)}
    track = Track(speeds)
    results = race(track, plan(speeds, seconds=seconds))
    assert track.now <= seconds
    assert track.now > seconds / 2
    best = max((one.candidate for one in results.ranked), key=lambda one: speeds.get(one.drafter, 0))
    assert results.ranked[0].candidate.drafter == best.drafter == "drafter-5"


def test_what_there_is_no_time_for_is_named(race):
    speeds = {f"drafter-{number}": 1.2 for number in range(6)}
    results = race(Track(speeds), plan(speeds, seconds=4.5, temperatures=(0.0,)))
    assert results.unmeasured
    assert {one.drafter for one in results.unmeasured} | {one.candidate.drafter for one in results.ranked} == {
        "none", *speeds,
    }  # fmt: skip


def test_drafters_that_were_measured_are_not_said_to_be_unmeasured(race):
    speeds = {f"drafter-{number}": 1.2 for number in range(6)}
    results = race(Track(speeds), plan(speeds, seconds=4.5, temperatures=(0.0,)))
    never = [one.drafter for one in results.unmeasured]
    measured = next(one for one in speeds if one not in never)
    results.contenders[0].append(Candidate(measured, "block", 7))
    console = Console(width=400, record=True, file=StringIO())
    show(results, plan(speeds, temperatures=(0.0,)), console)
    line = f"Not measured, for lack of time: {', '.join(dict.fromkeys(never))}; other settings of {measured}"
    assert line in console.export_text().splitlines()


@pytest.mark.parametrize("stop_after", [1, 17, 60, 150])
def test_an_interrupted_race_goes_on(race, tmp_path, stop_after):
    speeds = {"good": 1.5, "fair": 1.2, "poor": 0.9, "bad": ModelError("no")}
    whole = race(Track(dict(speeds)), file=tmp_path / "whole")
    file = tmp_path / "state"
    first = Track(dict(speeds), stop_after=stop_after)
    with pytest.raises(KeyboardInterrupt):
        race(first, file=file)
    with file.open("a") as opened:
        opened.write('{"kind": "run", "candi')  # it was being written
    second = Track(dict(speeds))
    results = race(second, file=file)
    assert len(first.calls) + len(second.calls) == len(file.read_text().splitlines()) - 2  # the settings, the failure
    assert results.ranked == whole.ranked
    third = Track(dict(speeds))
    assert race(third, file=file).ranked == whole.ranked
    assert third.calls == []


def test_time_that_was_spent_before_counts(race, tmp_path):
    speeds = {"good": 1.5, "fair": 1.2}
    first = Track(dict(speeds), stop_after=20)
    with pytest.raises(KeyboardInterrupt):
        race(first, plan(speeds, seconds=40), file=tmp_path / "state")
    second = Track(dict(speeds))
    race(second, plan(speeds, seconds=40), file=tmp_path / "state")
    assert 30 < first.now + second.now <= 40


def test_other_settings_do_not_go_on(race, tmp_path):
    race(Track({"good": 1.5}), file=tmp_path / "state")
    with pytest.raises(BenchError, match=r"temperatures.*delete it"):
        race(Track({"good": 1.5}), plan(["good"], temperatures=(0.0, 0.5)), file=tmp_path / "state")


def test_all_that_is_registered_and_complete_is_tried(monkeypatch):
    class Indexed(PromptLookup):
        def __init__(self, index):
            super().__init__()

    class Layers(PromptLookup):
        def __init__(self, target, layers=None):
            super().__init__()

    more = {
        **known(),
        "indexed": Known(Indexed, "needs an index", argument="index"),
        "layers": Known(Layers, "has a default", needs_target=True, argument="layers"),
        "new": Known(NgramStorage, "needs nothing"),
    }
    monkeypatch.setattr("foretoken.drafters.registry._DRAFTERS", more)
    found = candidates.registered()
    assert {"prompt-lookup", "ngram-storage", "layers", "new"} <= set(found)
    assert not {"none", "draft-model", "cascade", "indexed"} & set(found)

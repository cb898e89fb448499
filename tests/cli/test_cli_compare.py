"""How ``--compare`` measures."""

from __future__ import annotations

import pytest

import tiny
from foretoken import Engine, SamplingParams
from foretoken.cli import compare
from foretoken.cli.answer import Answer
from foretoken.engine.outputs import DecodeStats
from foretoken.errors import ForetokenError

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


def answer(tokens: int, seconds: float) -> Answer:
    return Answer([], "", "length", DecodeStats(rounds=1, emitted=tokens, seconds={"target": seconds}))


@pytest.fixture
def calls(monkeypatch):
    """Which engine decoded what, in order."""
    made: list[tuple[str, SamplingParams]] = []
    stream, generate = Engine.stream, Engine.generate

    def note(engine: Engine, params: SamplingParams) -> None:
        made.append((engine.drafter.name, params))

    monkeypatch.setattr(Engine, "stream", lambda s, p, o, **m: (note(s, o), stream(s, p, o, **m))[1])
    monkeypatch.setattr(Engine, "generate", lambda s, p, o: (note(s, o), generate(s, p, o))[1])
    return made


def engines():
    engine = Engine(tiny.tiny_llama(vocab_size=16), "prompt-lookup", num_speculative_tokens=2)
    return engine, compare.plain_engine(engine)


def test_both_are_warmed_up_with_the_sampling_of_the_request(calls):
    engine, plain = engines()
    params = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=40, min_new_tokens=30, stop_token_ids=[3])
    compare.warm_up(engine, plain, PROMPT, params)
    assert [name for name, _ in calls] == ["prompt-lookup", "none"]
    for _, used in calls:
        assert (used.temperature, used.top_p, used.max_new_tokens, used.ignore_eos) == (0.7, 0.9, 16, True)


def test_both_are_made_ready_once_for_a_kind_of_request(monkeypatch):
    made = []
    warm_up = Engine.warm_up
    monkeypatch.setattr(Engine, "warm_up", lambda s, *p: (made.append((s.drafter.name, *p)), warm_up(s, *p))[1])
    (engine, plain), drawn, greedy = engines(), SamplingParams(max_new_tokens=4), SamplingParams(temperature=0.0)
    compare.warm_up(engine, plain, PROMPT, drawn)
    assert made == [("prompt-lookup", drawn), ("none", drawn)]
    for params in (drawn, greedy, greedy, drawn):  # as in a chat: the plain engine is made anew
        compare.warm_up(engine, compare.plain_engine(engine), PROMPT, params)
    assert made[2:] == [("prompt-lookup", greedy), ("none", greedy)]
    engine.drafter = "suffix"
    compare.warm_up(engine, plain, PROMPT, greedy)
    assert made[4:] == [("suffix", greedy), ("none", greedy)]


def test_what_cannot_be_served_is_refused_before_anything_is_made_ready(monkeypatch):
    monkeypatch.setattr(Engine, "warm_up", lambda *_: pytest.fail("it is made ready"))
    engine, plain = engines()
    with pytest.raises(ForetokenError, match="tokens"):
        compare.warm_up(engine, plain, [1] * (engine.target.max_length + 1), SamplingParams())


def test_runs_alternate_until_there_are_enough(calls):
    engine, plain = engines()
    ours, theirs = [answer(10, 0.1)], [answer(10, 0.2)]
    compare.alternate(engine, plain, PROMPT, SamplingParams(max_new_tokens=4), ours, theirs, clock=lambda: 0.0)
    assert [name for name, _ in calls] == ["prompt-lookup", "none"] * (compare.RUNS - 1)
    assert len(ours) == len(theirs) == compare.RUNS


def test_no_run_copies_from_the_runs_before():
    engine, params = Engine(tiny.tiny_llama(vocab_size=16), "suffix:1000", "token", 4), SamplingParams(temperature=0.0)
    plain, ours = compare.plain_engine(engine), []
    compare.warm_up(engine, plain, PROMPT, params)
    compare.alternate(engine, plain, PROMPT, params, ours, [], runs=3)
    alone = Engine(engine.target, "suffix", "token", 4).generate(PROMPT, params)
    assert {one.stats.rounds for one in ours} == {alone.stats.rounds}


def test_long_requests_are_run_fewer_times(calls):
    engine, plain = engines()
    ours, theirs = [answer(10, 4.0)], [answer(10, 5.0)]
    times = iter([100.0, 100.5, 101.5])
    compare.alternate(engine, plain, PROMPT, SamplingParams(max_new_tokens=4), ours, theirs, clock=lambda: next(times))
    assert [name for name, _ in calls] == ["prompt-lookup", "none"]


@pytest.mark.parametrize(
    ("each", "expected"), [(0.1, 15), (0.25, 15), (0.45, 9), (0.7, 6), (1.5, 5), (2.6, 4), (10.5, 1)]
)
def test_short_requests_are_run_more_often(each, expected):
    """The machine's clock says that a pair of runs takes `each` seconds; the first one is over."""
    engine, plain = engines()
    ours, theirs, now = [answer(10, 0.4 * each)], [answer(10, 0.6 * each)], iter(range(100))

    def clock() -> float:
        return 100.0 + max(next(now) - 1, 0) * each

    compare.alternate(engine, plain, PROMPT, SamplingParams(max_new_tokens=4), ours, theirs, clock=clock)
    assert len(theirs) == expected


def test_speeds_are_medians():
    result = compare.Comparison(
        "d", [answer(10, 1), answer(10, 0.1), answer(10, 0.5)], [answer(10, 1), answer(10, 2), answer(10, 4)], ""
    )
    assert (result.speed, result.plain_speed, result.speed_up) == (20, 5, 4)
    assert "medians of 3 runs of each, in turns" in result.measured

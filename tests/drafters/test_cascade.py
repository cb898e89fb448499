"""Cascades: who proposes, what is learnt from it, and that rows of several drafters make one draft."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from batches import batch_of, sequence_of
from foretoken import load
from foretoken.draft import Draft
from foretoken.drafters import (
    Cascade,
    Drafter,
    DraftModel,
    Lookahead,
    NgramStorage,
    PromptLookup,
    Suffix,
    TokenRecycling,
)
from foretoken.drafters.base import Seen
from foretoken.drafters.cascade import _Seconds, _Text
from foretoken.drafters.rules import Rule, Times, Trial, learn
from foretoken.engine.engine import Engine
from foretoken.errors import ModelError, ParameterError
from foretoken.policy.controller import Choice
from foretoken.sampling import SamplingParams
from foretoken.verify import EnsembleVerifier
from number_tokenizer import NumberTokenizer
from tiny import tiny_gpt2, tiny_llama

REPEATING = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
NEW = [1, 9, 4, 7, 2]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


class Fixed(Drafter):
    """Proposes the same tokens always, and counts how often it is asked and told."""

    def __init__(self, name: str, tokens: list[int], match: int | None = None) -> None:
        self.name, self.tokens = name, tokens
        self.asked: list[list[int]] = []
        self.told: list[list[int]] = []
        if match is not None:
            self.match = match
            self.matches = self

    def __getitem__(self, sequence):
        return self.match

    def propose(self, batch, limits):
        if any(limits):
            self.asked.append(list(limits))
        return Draft.from_lists([self.tokens[:limit] for limit in limits])

    def observe(self, batch, draft, verdict, logits):
        self.told.append(verdict.counts.tolist())


def wrong_token(prompt: list[int]) -> int:
    """One that the target does not say in the next two dozen tokens."""
    said = Engine(tiny_llama(seed=1), None).generate(prompt, GREEDY).token_ids
    return next(token for token in range(1, 30) if token not in said)


def test_the_first_that_has_a_draft_is_taken_where_it_promises_enough():
    cheap, dear = Fixed("cheap", [1, 2], match=6), Fixed("dear", [3, 4])
    Engine(tiny_llama(seed=1), Cascade([cheap, dear]), num_speculative_tokens=2).generate(
        NEW, SamplingParams(seed=1, max_new_tokens=3, ignore_eos=True)
    )
    assert cheap.asked[0] == [2]
    assert dear.asked == []


def test_where_costs_may_be_measured_all_are_asked_until_they_are():
    cheap, dear = Fixed("cheap", [1, 2], match=9), Fixed("dear", [3, 4])
    Engine(tiny_llama(seed=1), Cascade([cheap, dear]), num_speculative_tokens=2).generate(NEW, GREEDY)
    assert len(dear.asked) >= 5  # the first call reads the text, and the second may compile
    assert dear.asked[:5] == [[2]] * 5


@pytest.mark.parametrize("cost", [0.1, 0.6])
def test_that_a_drawn_draft_is_cut_short_does_not_decide_whether_it_is_taken(cost):
    """The reason can be the tokens that were drawn: if some were preferred, they would not be distributed as q."""

    class Drawn(Fixed):
        def __init__(self, kept: int) -> None:
            super().__init__("drawn", [])
            self.kept = kept

        def propose(self, batch, limits):
            if not any(limits):
                return Draft.empty(len(limits))
            self.asked.append(list(limits))
            width = max(limits)
            counts = torch.tensor([min(limit, self.kept) for limit in limits])
            laws = torch.full((len(limits), width, batch.vocab_size), 1 / batch.vocab_size)
            return Draft.chain(torch.full((len(limits), width), 3), counts, laws)

    turns = []
    for kept in (1, 4):
        drawn = Drawn(kept)
        cascade = Cascade([Fixed("cheap", [5, 6, 7], match=2), drawn], costs=[0.0, cost])
        one = next(iter(Engine(tiny_llama(seed=1), cascade, "token", 4).stream(NEW, SamplingParams(max_new_tokens=9))))
        turns.append((drawn.asked[:1], one.stats.drafted))
    assert turns[0][0] == turns[1][0]
    taken = [count for _, count in turns]
    assert taken == ([1, 4] if cost < 0.5 else [3, 3])


def test_nothing_is_drafted_where_scoring_costs_more_than_it_gives():
    wrong = wrong_token(NEW)
    cheap, dear = Fixed("cheap", [wrong] * 4, match=1), Fixed("dear", [wrong] * 4)
    engine = Engine(tiny_llama(seed=1), Cascade([cheap, dear], costs=[0.0, 0.5]), num_speculative_tokens=4)
    for _ in range(4):
        stats = engine.generate(NEW, GREEDY).stats
    assert stats.drafted < stats.rounds / 2
    assert len(cheap.asked) == 4 * 23  # it costs nothing, and is judged all the same


def test_a_guess_leaves_the_turn_to_the_next():
    cheap, dear = Fixed("cheap", [1, 2], match=1), Fixed("dear", [3, 4])
    Engine(tiny_llama(seed=1), Cascade([cheap, dear]), num_speculative_tokens=2).generate(
        NEW, SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True)
    )
    assert cheap.asked[0] == dear.asked[0] == [2]
    assert cheap.told[0] == [0]  # whatever was accepted was not its


def test_a_drafter_that_is_always_wrong_is_no_longer_taken_even_with_long_matches():
    wrong = wrong_token(NEW)
    cheap, dear = Fixed("cheap", [wrong] * 3, match=9), DraftModel(tiny_llama(seed=1))
    cascade = Cascade([cheap, dear], costs=[0.0, 0.2])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=3).generate(NEW, GREEDY).stats
    assert stats.accepted > 12  # the other one is the target itself


def test_a_drafter_that_was_not_taken_is_judged_by_what_the_target_said():
    said = Engine(tiny_llama(seed=1), None).generate(NEW, GREEDY).token_ids

    class Right(Fixed):
        def propose(self, batch, limits):
            done = len(batch.sequences[0].tokens) - len(NEW)
            return Draft.from_lists([said[done : done + limits[0]]])

    cheap, dear = Right("cheap", [], match=1), Fixed("dear", [wrong_token(NEW)] * 4)
    cascade = Cascade([cheap, dear], costs=[0.0, 0.0])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4).generate(NEW, GREEDY).stats
    assert 0 < len(dear.asked) < 4  # it was preferred until both had shown what they are worth
    assert stats.accepted >= 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["token", "block", "coupled"])
def test_rows_get_in_a_batch_what_they_get_alone(temperature, verifier):
    prompts = [REPEATING, NEW, [2, 2, 2, 2], [*NEW, *REPEATING]]
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=20, ignore_eos=True) for seed in range(4)
    ]

    def engine():
        parts = [PromptLookup(), DraftModel(tiny_llama(seed=2))]
        return Engine(tiny_llama(seed=1), Cascade(parts), verifier, 3)

    together = engine().generate(prompts, params)
    alone = [engine().generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    if (
        temperature and verifier != "coupled"
    ):  # elsewhere the text does not depend on the drafts, which follow the clock
        assert [one.stats.drafted for one in together] == [one.stats.drafted for one in alone]


@pytest.mark.parametrize("learning", [TokenRecycling, NgramStorage, Lookahead])
def test_what_a_drafter_learns_of_a_row_does_not_depend_on_what_others_ask_it(learning):
    def engine():
        return Engine(tiny_llama(seed=1), Cascade([PromptLookup(), learning()]), "token", 4)

    prompts = [[1, 2, 3, 4, 5] * 3 + [1, 2, 3], [7, 3, 9, 1, 22, 14]]
    for seed in range(8):
        params = SamplingParams(temperature=0.7, seed=seed, max_new_tokens=30, ignore_eos=True)
        alone = engine().generate(prompts[0], params)
        assert alone.token_ids == engine().generate(prompts, [params, GREEDY])[0].token_ids


def test_the_clock_has_no_say_where_a_seed_must_give_one_text(monkeypatch):
    now = [0.0]

    def clock():
        now[0] += 1e-3
        return now[0]

    class Slow(Fixed):
        def propose(self, batch, limits):
            now[0] += self.cost
            return super().propose(batch, limits)

    monkeypatch.setattr("foretoken.drafters.cascade.perf_counter", clock)
    found = []
    for cost in (0.0, 5.0):
        slow = Slow("slow", [3, 3, 3])
        slow.cost = cost
        greedy = [SamplingParams(temperature=0.0, seed=seed, max_new_tokens=40, ignore_eos=True) for seed in range(3)]
        drawn = [SamplingParams(temperature=0.7, seed=seed, max_new_tokens=40, ignore_eos=True) for seed in range(3)]
        texts = []
        # A lossy verifier's greedy text depends on the drafts, too.
        for verifier, params in ((EnsembleVerifier(0.5), greedy), ("token", drawn)):
            engine = Engine(tiny_llama(seed=1), Cascade([PromptLookup(min_ngram=3), slow]), verifier, 4)
            for _ in range(3):
                engine.generate(NEW, SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True))
            texts += [engine.generate(REPEATING, one).token_ids for one in params]
        found.append(texts)
    assert found[0] == found[1]


def test_a_round_that_failed_leaves_nothing_behind(monkeypatch):
    engine = Engine(tiny_llama(seed=1), [PromptLookup(), tiny_llama(seed=2)], "token", 4)
    forward, calls = engine.target.forward, []

    def failing(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no more memory")
        return forward(*args, **options)

    monkeypatch.setattr(engine.target, "forward", failing)
    with pytest.raises(RuntimeError):
        engine.generate([REPEATING] * 2, SamplingParams(max_new_tokens=9, ignore_eos=True))
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)  # nothing is drafted for it
    assert [len(each.token_ids) for each in engine.generate([NEW, [1, 2], [3, 4]], one)] == [1, 1, 1]


def test_passes_that_read_a_prompt_are_not_taken_for_the_cost_of_scoring():
    cascade = Cascade([PromptLookup(), Fixed("dear", [3, 3])])
    engine = Engine(load(tiny_llama(seed=1), runner="native"), cascade, num_speculative_tokens=4, reuse_prefixes=False)
    recorded = []
    cascade._seconds.pass_ended = lambda rows, width: recorded.append(cascade._seconds._began is not None)
    for first in range(5):
        engine.generate([first + 1, *range(2, 30)], SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True))
    assert recorded.count(False) == 5  # the first round of each text


@pytest.mark.parametrize("between", ["rounds of others", "plain rounds"])
def test_catching_up_with_a_text_is_not_taken_for_the_cost_of_drafting(between, monkeypatch):
    # Else a drafter that was not asked for long looks dear when it is, and is not asked again.
    cheap, dear = Fixed("cheap", []), Fixed("dear", [wrong_token(NEW)])
    cascade = Cascade([cheap, dear], costs=[0.0, 2.0 if between == "rounds of others" else 0.0])
    engine = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4 if between == "rounds of others" else "auto")
    seen, turns = [], count()
    monkeypatch.setattr(
        cascade._seconds, "asked", lambda place, rows, count, seconds, unread: place == 1 and seen.append(unread)
    )
    monkeypatch.setattr(engine.policy, "choose", lambda *_: Choice(4 if next(turns) % 40 == 39 else 0))
    engine.generate(NEW, SamplingParams(temperature=0.0, max_new_tokens=250, ignore_eos=True))
    assert len(seen) == len(dear.asked) == (2 if between == "rounds of others" else 6)
    assert all(unread >= 39 for unread in seen)  # a token a round, and it is asked every 96 rounds, or every 40


def test_drafters_that_are_asked_each_round_catch_up_with_nothing(monkeypatch):
    cascade = Cascade([Fixed("cheap", []), Right("right", NEW)], costs=[0.0, 0.1])
    engine = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=16)
    seen = []
    monkeypatch.setattr(
        cascade._seconds, "asked", lambda place, rows, count, seconds, unread: place == 1 and seen.append(unread)
    )
    engine.generate([*NEW, *NEW, *NEW, *NEW], SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True))
    assert seen[0] == 20
    assert len(seen) > 2
    assert not any(seen[1:])


def test_what_counts_as_catching_up():
    text = _Text(free=True, greedy=True, waited=[1, 2, 0], known=[50, 50, -100])
    assert text.unread(0, 70) == 0  # asked in the round before, however much was accepted since
    assert text.unread(1, 70) == 20
    assert text.unread(1, 55) == 0
    assert text.unread(2, 1) == 101  # a source that was never read
    seconds = _Seconds(1)
    for _ in range(12):
        seconds.asked(0, 1, 4, 0.010, unread=0)
    seconds.asked(0, 1, 4, 0.050, unread=20)
    assert seconds.as_json()["reading"] == [pytest.approx(0.002)]
    for _ in range(15):  # estimates that are too high can be mended by calls that read as well
        seconds.asked(0, 1, 4, 0.003, unread=20)
    assert seconds.as_json()["calls"][0]["drafter"]["1"]["4"][0] == pytest.approx(0.003)


def test_what_things_cost_is_kept_for_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    params = SamplingParams(temperature=0.0, max_new_tokens=150, ignore_eos=True)
    target = tiny_llama(seed=1)

    def cascade(second="dear"):
        parts = [Fixed("cheap", [1, 2], match=2), Fixed(second, [3, 4])]
        return Engine(target, Cascade(parts), num_speculative_tokens=2).drafter

    first = cascade()
    assert first._seconds.costs(1) is None
    Engine(target, first, num_speculative_tokens=2).generate(NEW, params)
    assert cascade()._seconds.costs(1) is not None
    copy = cascade("another")._seconds
    copy.read(first._seconds.as_json())
    assert copy.as_json() == first._seconds.as_json()
    assert cascade("another")._seconds.costs(1) is None
    used = Engine(target, first, num_speculative_tokens=2).drafter
    assert used._seconds.as_json() == copy.as_json()  # what it knows itself is newer
    Engine(tiny_gpt2(seed=1), first)
    assert first._seconds.costs(1) is None  # another target's passes cost something else
    (tmp_path / "foretoken" / "costs.json").write_text(
        (tmp_path / "foretoken" / "costs.json").read_text().replace('"reading"', '"writing"')
    )
    assert cascade()._seconds.costs(1) is None


def test_rows_that_are_drafted_by_both_have_the_laws_of_both():
    class Watching(Cascade):
        def propose(self, batch, limits):
            draft = super().propose(batch, limits)
            seen.append((list(self._turns), draft))
            return draft

    seen: list = []
    parts = [PromptLookup(), DraftModel(tiny_llama(seed=2))]
    params = [SamplingParams(seed=seed, max_new_tokens=4, ignore_eos=True) for seed in range(2)]
    Engine(tiny_llama(seed=1), Watching(parts), "token", 3).generate([[1, 2, 3, 4, 5, 1, 2, 3], NEW], params)
    turns, draft = seen[0]
    assert turns == [[True, False], [False, True]]
    assert draft.tokens[0].tolist() == [4, 5, 1]
    assert draft.probs[0, torch.arange(3), draft.tokens[0]].tolist() == [1.0] * 3
    assert torch.allclose(draft.probs.sum(-1), torch.ones(2, 3))
    assert draft.probs[1].max() < 0.9


def test_a_drafter_is_not_told_of_paths_longer_than_its_drafts():
    """One row copies a long text while another one is drafted for by a model that grows trees elsewhere."""
    prompt, target = [1, 2, 3], tiny_llama(seed=1)
    said = Engine(target, None).generate(prompt, GREEDY).token_ids

    class Copy(Fixed):
        def propose(self, batch, limits):
            asked = [limit if one.params.greedy else 0 for one, limit in zip(batch.sequences, limits, strict=True)]
            ends = [len(one.output) for one in batch.sequences]
            return Draft.from_lists([said[end:][:limit] for end, limit in zip(ends, asked, strict=True)])

    cascade = Cascade([Copy("copy", [], match=6), DraftModel(tiny_llama(seed=2), "static")])
    params = [GREEDY, SamplingParams(seed=1, max_new_tokens=24, ignore_eos=True)]
    texts = [one.token_ids for one in Engine(target, cascade, "token", 16).generate([prompt, NEW], params)]
    assert texts[0] == said
    alone = Cascade([Copy("copy", [], match=6), DraftModel(tiny_llama(seed=2))])
    assert texts[1] == Engine(target, alone, "token", 16).generate(NEW, params[1]).token_ids


def test_tokens_that_only_one_of_the_drafters_knows():
    words = NumberTokenizer(6)
    target = load(tiny_llama(vocab_size=8, seed=1), runner="hf", tokenizer=words)
    narrow = load(tiny_llama(vocab_size=6, seed=2), runner="hf", tokenizer=words)
    params = [SamplingParams(seed=seed, max_new_tokens=12, ignore_eos=True) for seed in range(4)]
    prompts = [[6, 7, 1, 6, 7, 1, 6, 7], [1, 2, 3], [7, 6, 7, 6], [4, 5]]
    engine = Engine(target, [PromptLookup(), DraftModel(narrow)], "token", 4)
    together = [one.token_ids for one in engine.generate(prompts, params)]
    assert together == [engine.generate(prompt, one).token_ids for prompt, one in zip(prompts, params, strict=True)]


def test_how_a_cascade_is_named(tmp_path):
    model = tiny_llama(seed=2)
    model.save_pretrained(tmp_path)
    target = tiny_llama(seed=1)
    for drafter in (f"prompt-lookup,{tmp_path}", ["prompt-lookup", str(tmp_path)], [PromptLookup(), model]):
        cascade = Engine(target, drafter).drafter
        assert isinstance(cascade, Cascade)
        assert [part.name for part in cascade.drafters] == ["prompt-lookup", "draft-model"]
        assert len(cascade.models) == 1
    with pytest.raises(ParameterError, match="is made of others: name them, 'prompt-lookup,path/of/a/model'"):
        Engine(target, "cascade")
    with pytest.raises(ParameterError, match="a cascade of 1 drafters: give two or more"):
        Engine(target, ["prompt-lookup"])
    with pytest.raises(ParameterError, match=r"margin=-1.*use 0 or more"):
        Cascade([PromptLookup(), PromptLookup()], margin=-1)
    for costs in ([0.1], [0.1, -1.0], [0.1, float("nan")]):
        with pytest.raises(ParameterError, match=r"costs=.*0 or more target passes for each of 2"):
            Cascade([PromptLookup(), PromptLookup()], costs=costs)
    with pytest.raises(ModelError, match="vocabular"):
        Engine(target, ["prompt-lookup", tiny_llama(vocab_size=77)])


def test_a_guess_is_better_than_nothing():
    cheap, dear = Fixed("cheap", [1, 2], match=1), Fixed("dear", [])
    stats = (
        Engine(tiny_llama(seed=1), Cascade([cheap, dear]), num_speculative_tokens=2)
        .generate(NEW, SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True))
        .stats
    )
    assert dear.asked
    assert stats.drafted >= 2


def said_by_the_target(prompt: list[int], count: int = 24) -> list[int]:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return Engine(tiny_llama(seed=1), None).generate(prompt, params).token_ids


class Right(Fixed):
    """Knows what the target will say."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        super().__init__(name, said_by_the_target(prompt))
        self.start = len(prompt)

    def propose(self, batch, limits):
        done = len(batch.sequences[0].tokens) - self.start
        if any(limits):
            self.asked.append(list(limits))
        return Draft.from_lists([self.tokens[done : done + limits[0]]])


@pytest.mark.parametrize(("cost", "asked"), [(0.1, True), (9.0, False)])
def test_a_better_drafter_is_asked_where_its_time_pays(cost, asked):
    # Four tokens more in each round are worth a tenth of a pass, and not nine.
    cheap, dear = Fixed("cheap", [wrong_token(NEW)], match=1), Right("dear", NEW)
    cascade = Cascade([cheap, dear], costs=[0.0, cost])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4).generate(NEW, GREEDY).stats
    assert (stats.rounds < 7) == asked
    assert bool(dear.asked) == asked


def test_a_drafter_that_does_not_pay_is_asked_again_now_and_then():
    cheap, dear = Fixed("cheap", []), Fixed("dear", [wrong_token(NEW)])
    params = SamplingParams(temperature=0.0, max_new_tokens=250, ignore_eos=True)
    Engine(tiny_llama(seed=1), Cascade([cheap, dear], costs=[0.0, 2.0]), num_speculative_tokens=4).generate(NEW, params)
    assert len(cheap.asked) == 249
    assert len(dear.asked) == 2  # every 96 rounds


def test_what_a_text_taught_helps_the_next_one():
    wrong = wrong_token(NEW)
    cheap, dear = Fixed("cheap", [wrong] * 4, match=6), Right("dear", NEW)
    engine = Engine(tiny_llama(seed=1), Cascade([cheap, dear], costs=[0.0, 0.1]), num_speculative_tokens=4)
    first = engine.generate(NEW, GREEDY).stats
    second = engine.generate(NEW, GREEDY).stats
    assert second.rounds < first.rounds
    assert second.drafted_by_position[0] - second.accepted_by_position[0] == 0


def test_a_seed_gives_the_same_drafts_whatever_came_before():
    def engine():
        parts = [PromptLookup(), DraftModel(tiny_llama(seed=2))]
        return Engine(tiny_llama(seed=1), Cascade(parts), "token", 3, reuse_prefixes=False)

    params = SamplingParams(seed=5, max_new_tokens=24, ignore_eos=True)
    fresh, used = engine(), engine()
    for prompt in (REPEATING, NEW):
        used.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True))
        used.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
    one, other = fresh.generate(REPEATING, params), used.generate(REPEATING, params)
    assert one.token_ids == other.token_ids
    assert one.stats.drafted_by_position == other.stats.drafted_by_position
    assert one.stats.rounds == other.stats.rounds


def test_who_is_seldom_right_drafts_few():
    copying, dear = Fixed("copying", [], match=0), Fixed("dear", [wrong_token(NEW)] * 16)
    cascade = Cascade([copying, dear], costs=[0.0, 0.2])
    params = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
    Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=16).generate(NEW, params)
    assert {limit for (limit,) in copying.asked[:99]} == {16}
    limits = [limit for (limit,) in dear.asked]
    assert limits[0] == 10
    assert limits[-1] == 3
    assert limits == sorted(limits, reverse=True)
    assert len(limits) < 80  # then it is not asked any more


def test_guesses_are_short_and_sure_copies_long():
    class Watched(Right):
        def observe(self, batch, draft, verdict, logits):
            self.told.append(draft.counts.tolist())

    widths = {}
    for match in (1, 6):
        copying = Watched("copying", NEW)
        copying.match, copying.matches = match, copying
        cascade = Cascade([copying, Fixed("dear", [])], costs=[0.0, 5.0])
        Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=16).generate(NEW, GREEDY)
        widths[match] = [count for (count,) in copying.told]
    assert widths[6][0] == 15
    assert len(widths[6]) == 2  # it was right to the end
    assert widths[1][0] == 5
    assert widths[1] == sorted(widths[1])


@pytest.mark.parametrize("make", [PromptLookup, Suffix])
def test_lookups_tell_what_they_would_have_gone_on_with(make):
    text = [3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 1, 4, 1, 5, 3, 5, 8, 9, 2, 6]
    drafter, sequence = make(), sequence_of(text[:8])
    found, end = [], 8
    for step in (1, 3, 2, 5, 1, 5):
        drafter.propose(batch_of(sequence), [4])
        found += drafter.foreseen[sequence]
        sequence.tokens.extend(text[end : end + step])
        end += step
    drafter.propose(batch_of(sequence), [0])  # it reads even where nothing is asked for
    found += drafter.foreseen[sequence]
    wanted = []
    for place in range(8, end):
        alone, fresh = sequence_of(text[:place]), make()
        right = fresh.propose(batch_of(alone), [1]).tokens[0].tolist() == [text[place]]
        wanted.append((fresh.matches[alone], right))
    assert [(seen.match, seen.right) for seen in found] == wanted
    assert {right for _, right in wanted} == {True, False}
    assert {match for match, _ in wanted} >= {0, 1, 2}
    # Copies that were right go on from where they are.
    followed = [place for place, seen in enumerate(found, start=8) if seen.follows and seen.right]
    assert followed == [place for place in range(9, end) if wanted[place - 9][1] and wanted[place - 8][1]]


class Foreseeing(Fixed):
    """Offers nothing, and says that it would have known all tokens, after a match of three, or none."""

    def __init__(self, knows):
        super().__init__("cheap", [], match=0)
        self.knows, self.foreseen, self.lengths = knows, {}, {}

    def propose(self, batch, limits):
        for sequence in batch.sequences:
            new = len(sequence.tokens) - self.lengths.get(sequence, len(sequence.tokens))
            self.foreseen[sequence] = [Seen(3, True, True) if self.knows else Seen(0, False, False)] * new
            self.lengths[sequence] = len(sequence.tokens)
        return super().propose(batch, limits)


@pytest.mark.parametrize("knows", [False, True])
def test_a_model_is_asked_where_lookups_would_not_have_known_the_tokens(knows):
    dear = Right("dear", NEW)
    cascade = Cascade([Foreseeing(knows), dear], costs=[0.0, 0.4])
    params = SamplingParams(temperature=0.0, max_new_tokens=120, ignore_eos=True)
    dear.tokens = said_by_the_target(NEW, 120)
    engine = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=2)
    rounds = engine.generate(NEW, params).stats.rounds
    assert dear.asked
    if knows:
        assert len(dear.asked) < rounds / 3
    else:
        assert rounds == 40
        assert len(dear.asked) >= 39


def times(**given):
    """A round with a model takes a third longer than the others; of three of its tokens two are right."""
    return Times(**{"copying": 1.2, "plain": 1.0, "asking": {3: 1.6}, "right": {3: 2.0}, "most": 16, **given})


def trial_of(*seen):
    trial = Trial()
    trial.read([Seen(match, right, right) for match, right in seen])
    return trial


def test_what_rules_take_for_a_token_is_counted_round_by_round():
    # Two tokens that nobody knew, then four that a match of two led to, and one after them.
    trial = trial_of((0, False), (1, False), (2, True), (3, True), (3, True), (3, True), (3, False))
    trial.choose(times(), {})
    # Without the model: a plain round, one whose copy is wrong at once, one over all the others.
    assert trial.found[Rule(1, 0)] == pytest.approx((1.0 + 1.2 + 1.2) / 7)
    # Three tokens by the model, then the rest of the copy.
    assert trial.found[Rule(2, 3)] == pytest.approx((1.6 + 1.2) / 7)
    # Nothing but the model: three rounds, and the last one goes two tokens beyond the end.
    assert trial.found[Rule(99, 3)] == pytest.approx(3 * 1.6 / 9)


def test_the_best_rule_is_that_of_the_text():
    copied = [(3, True)] * 40
    assert trial_of(*copied).choose(times(), {}).asked == 0
    assert trial_of(*[(0, False)] * 40).choose(times(), {}).asked == 3
    # Short matches lead nowhere, long ones do.
    mixed = [(1, False), (1, False), (1, False), (5, True), (5, True), (5, True), (5, True), (5, False)] * 6
    rule = trial_of(*mixed).choose(times(), {})
    assert rule.asked == 3
    assert 2 <= rule.least <= 5
    # A model that is never right is not asked.
    assert trial_of(*mixed).choose(times(right={3: 0.0}), {}).asked == 0


def test_rules_that_proved_good_in_other_texts_are_begun_with():
    others: dict[Rule, float] = {}
    assert Trial().choose(times(), others) == Rule(2, 3)
    for _ in range(3):
        trial = trial_of(*[(0, False)] * 40)
        trial.choose(times(right={3: 0.0}), others)
        learn(others, trial.found)
    first = Trial()
    assert first.choose(times(), others) == Rule(1, 0)
    assert first.pace == min(others.values())
    assert first.saved(Rule(1, 3)) == pytest.approx(1.0 - 1.6)
    # A few tokens do not outweigh them, many do.
    assert trial_of(*[(0, False)] * 2).choose(times(), others).asked == 0
    assert trial_of(*[(0, False)] * 96).choose(times(), others).asked == 3


def test_what_drafts_are_worth_is_kept_for_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    target = tiny_llama(seed=1)

    def cascade():
        return Engine(target, Cascade([PromptLookup(), Fixed("dear", [3, 4])]), num_speculative_tokens=4)

    first = cascade()
    for _ in range(4):
        first.generate(NEW, SamplingParams(temperature=0.0, max_new_tokens=150, ignore_eos=True))
    known, begun = first.drafter, cascade().drafter
    assert {Rule(1, 0), Rule(2, 3)} <= begun._paces[True].keys() <= known._paces[True].keys()
    assert all(0.0 < pace < 10.0 for pace in begun._paces[True].values())
    assert (True, (1, -1)) in begun._overall
    assert begun._overall.keys() <= known._overall.keys()
    for key, record in begun._overall.items():
        assert max(record.as_json()[0], default=0.0) <= 12.0  # it counts for little beside what is seen from now on
        assert 0.0 <= record.rates(1)[0] <= 1.0, key
    path = tmp_path / "foretoken" / "costs.json"
    path.write_text(path.read_text().replace('"rules"', '"laws"'))  # another version's is not read in part
    again = cascade().drafter
    assert again._paces == {True: {}, False: {}}
    assert again._overall == {}
    assert again._seconds.costs(1) is None

"""Cascades in the decode loop: who drafts, which drafts are judged, and that outputs stay exact."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from batches import batch_of, follow, sequence_of
from foretoken import load
from foretoken.draft import Draft
from foretoken.drafters import (
    Cascade,
    Drafter,
    DraftModel,
    Lookahead,
    Lookup,
    NgramStorage,
    PromptLookup,
    Suffix,
    TokenRecycling,
)
from foretoken.engine.engine import Engine
from foretoken.errors import ModelError, ParameterError
from foretoken.policy.costs import CALLED_SECONDS
from foretoken.policy.policy import Policy
from foretoken.sampling import SamplingParams
from foretoken.verify import EnsembleVerifier
from number_tokenizer import NumberTokenizer
from tiny import assume_cpus, tiny_gpt2, tiny_llama

REPEATING = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
NEW = [1, 9, 4, 7, 2]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


class Fixed(Drafter):
    """Proposes the same tokens always, and records `propose` and `observe` calls; with a match it is a free drafter."""

    def __init__(self, name: str, tokens: list[int], match: int | None = None) -> None:
        self.name, self.tokens = name, tokens
        self.asked: list[list[int]] = []
        self.observed: list[list[int]] = []
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
        self.observed.append(verdict.counts.tolist())


def target_output(prompt: list[int], count: int = 24) -> list[int]:
    params = SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=True)
    return Engine(tiny_llama(seed=1), None).generate(prompt, params).token_ids


def wrong_token(prompt: list[int], count: int = 24) -> int:
    """One that the target does not emit in the next tokens."""
    emitted = target_output(prompt, count)
    return next(token for token in range(1, 32) if token not in emitted)


class Right(Fixed):
    """Knows what the target will emit."""

    def __init__(self, name: str, prompt: list[int], match: int | None = None, count: int = 24) -> None:
        super().__init__(name, target_output(prompt, count), match)
        self.start = len(prompt)

    def propose(self, batch, limits):
        done = len(batch.sequences[0].tokens) - self.start
        if any(limits):
            self.asked.append(list(limits))
        return Draft.from_lists([self.tokens[done : done + limits[0]]])


def test_a_long_match_is_copied_without_asking_the_model():
    cheap, dear = Right("cheap", NEW, match=9), Fixed("dear", [3, 4])
    cascade = Cascade([cheap, dear], costs=[0.0, 0.2])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=8).generate(NEW, GREEDY).stats
    assert stats.rounds <= 5
    assert dear.asked == []


def test_the_model_is_asked_where_no_match_is():
    cheap, dear = Fixed("cheap", [], match=0), Right("dear", NEW)
    cascade = Cascade([cheap, dear], costs=[0.0, 0.1])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=8).generate(NEW, GREEDY).stats
    assert stats.accepted > 16
    assert len(cheap.asked) >= stats.rounds - 1  # it costs nothing; the last round may have no room for a draft


@pytest.mark.parametrize(("cost", "asked"), [(0.1, True), (9.0, False)])
def test_a_drafter_is_asked_where_its_time_pays(cost, asked):
    dear = Right("dear", NEW)
    cascade = Cascade([Fixed("cheap", [], match=0), dear], costs=[0.0, cost])
    Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4).generate(NEW, GREEDY)
    assert bool(dear.asked) == asked


def test_nothing_is_drafted_where_verifying_costs_more_than_it_gives():
    wrong = wrong_token(NEW)
    cheap, dear = Fixed("cheap", [wrong] * 4, match=1), Fixed("dear", [wrong] * 4)
    engine = Engine(tiny_llama(seed=1), Cascade([cheap, dear], costs=[0.0, 0.5]), num_speculative_tokens=4)
    for _ in range(4):
        stats = engine.generate(NEW, GREEDY).stats
    assert stats.drafted < stats.rounds / 4
    assert len(cheap.asked) == 4 * 23  # it costs nothing, and is judged all the same


def test_drafts_that_were_not_verified_are_judged_by_what_the_target_emitted():
    cheap = Right("cheap", NEW, match=1)
    cascade = Cascade([cheap, Right("dear", NEW)], costs=[0.0, 0.01])
    engine = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4)
    before = cascade.policy.open(sampled=False).acceptance[0].reach(3, 1)[2]
    engine.generate(NEW, GREEDY)
    assert cascade.policy.open(sampled=False).acceptance[0].reach(3, 1)[2] > before


def test_a_drafter_that_is_always_wrong_is_no_longer_taken_even_with_long_matches():
    wrong = wrong_token(NEW, 100)
    cheap, dear = Fixed("cheap", [wrong] * 3, match=9), Right("dear", NEW, count=100)
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    cascade = Cascade([cheap, dear], costs=[0.0, 0.1])
    stats = Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=3).generate(NEW, params).stats
    assert stats.accepted > 50


def test_a_drafter_that_does_not_pay_is_looked_at_again_at_growing_intervals():
    dear = Fixed("dear", [wrong_token(NEW, 250)] * 9)
    rounds: list[int] = []

    class Counting(Fixed):
        def propose(self, batch, limits):
            if len(dear.asked) > len(rounds):
                rounds.append(len(self.asked))
            return super().propose(batch, limits)

    params = SamplingParams(temperature=0.0, max_new_tokens=250, ignore_eos=True)
    cascade = Cascade([Counting("cheap", [], match=0), dear], costs=[0.0, 0.3])
    Engine(tiny_llama(seed=1), cascade, num_speculative_tokens=4).generate(NEW, params)
    waits = [after - before for before, after in pairwise(rounds)]
    assert 3 < len(rounds) < 25, rounds
    assert all(later > 0.9 * earlier for earlier, later in pairwise(waits)), waits  # what a look may cost is saved up
    assert waits[-1] > 5 * waits[0]


def test_a_round_of_the_policy_never_depends_on_tokens_that_are_yet_to_be_emitted():
    """A drafter whose first token and whose seconds are correlated.

    To verify some drawn drafts and not others by their tokens would change the distribution. So neither the tokens of a
    draft nor its seconds may decide in its own round whether and how much of it is verified.
    """

    class Telling(Drafter):
        name = "telling"

        def __init__(self) -> None:
            self.now, self.drawn, self.verified = 0.0, [], []

        def propose(self, batch, limits):
            if not any(limits):
                return Draft.empty(len(limits))
            tokens = torch.randint(0, 32, (1, max(limits)), generator=generator)
            likely = int(tokens[0, 0]) < 16
            self.now += 0.001 if likely else 5.0
            probs = torch.full((1, max(limits), batch.vocab_size), 1 / batch.vocab_size)
            self.drawn.append((likely, limits[0]))
            return Draft.chain(tokens, torch.tensor(limits), probs)

        def observe(self, batch, draft, verdict, logits):
            if self.drawn and len(self.verified) < len(self.drawn):
                self.verified.append(int(draft.counts[0]))

    generator = torch.Generator().manual_seed(1)
    telling = Telling()
    cascade = Cascade([PromptLookup(), telling], clock=lambda: telling.now)
    engine = Engine(tiny_llama(seed=1), cascade, "token", 4)
    engine.generate(REPEATING, SamplingParams(max_new_tokens=200, ignore_eos=True))
    assert {likely for likely, _ in telling.drawn} == {True, False}
    assert [limit for _, limit in telling.drawn] == telling.verified


@pytest.mark.parametrize("kept", [1, 4])
def test_that_a_drawn_draft_is_cut_short_does_not_decide_whether_it_is_verified(kept):
    class Drawn(Fixed):
        def propose(self, batch, limits):
            if not any(limits):
                return Draft.empty(len(limits))
            self.asked.append(list(limits))
            counts = torch.tensor([min(limit, kept) for limit in limits])
            probs = torch.full((len(limits), max(limits), batch.vocab_size), 1 / batch.vocab_size)
            return Draft.chain(torch.full((len(limits), max(limits)), 3), counts, probs)

    drawn = Drawn("drawn", [])
    cascade = Cascade([Fixed("cheap", [5, 6, 7], match=1), drawn], costs=[0.0, 0.05])
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    one = next(iter(Engine(tiny_llama(seed=1), cascade, "token", 4).stream(NEW, params)))
    assert len(drawn.asked) == 1
    assert one.stats.drafted == min(kept, drawn.asked[0][0])


def test_a_single_drafter_is_decided_on_as_well():
    wrong = Fixed("wrong", [wrong_token(NEW, 250)] * 16)
    engine = Engine(tiny_llama(seed=1), Cascade([wrong], costs=[0.5]), num_speculative_tokens="auto")
    params = SamplingParams(temperature=0.0, max_new_tokens=250, ignore_eos=True)
    completion = engine.generate(NEW, params)
    assert completion.token_ids == target_output(NEW, 250)
    assert len(wrong.asked) < 60
    right = Right("right", NEW)
    engine = Engine(tiny_llama(seed=1), Cascade([right], costs=[0.1]), num_speculative_tokens="auto")
    assert engine.generate(NEW, GREEDY).stats.rounds < 12


@pytest.mark.parametrize("make", [Lookup, PromptLookup, Suffix, TokenRecycling])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_of_coupled_and_greedy_requests_is_the_targets_own(make, temperature):
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=60, ignore_eos=True)
    wanted = Engine(tiny_llama(seed=1), None, "coupled").generate(REPEATING, params)
    found = Engine(tiny_llama(seed=1), make(), "coupled").generate([REPEATING, NEW], params)[0]
    assert found.token_ids == wanted.token_ids


def test_a_request_with_a_fixed_length_beside_one_that_leaves_it_to_the_policy():
    engine = Engine(tiny_llama(seed=1), Fixed("one", [3] * 16), "coupled", "auto", reuse_prefixes=False)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
    fixed, free = engine.submit(NEW, params, num_speculative_tokens=2), engine.submit(REPEATING, params)
    while engine.busy:
        engine.step()
    assert fixed.completion.token_ids == target_output(NEW, 12)
    assert len(fixed.completion.stats.drafted_by_position) == 2
    assert fixed.completion.stats.drafted >= 2 * (fixed.completion.stats.rounds - 3)
    assert free.completion.token_ids == target_output(REPEATING, 12)


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
    ):  # elsewhere the output does not depend on the drafts, which follow the clock
        assert [one.stats.drafted for one in together] == [one.stats.drafted for one in alone]


@pytest.mark.grid
@pytest.mark.parametrize("learning", [TokenRecycling, NgramStorage, Lookahead])
def test_a_drafters_state_of_a_row_does_not_depend_on_other_rows(learning):
    def engine():
        return Engine(tiny_llama(seed=1), Cascade([PromptLookup(), learning()]), "token", 4)

    prompts = [[1, 2, 3, 4, 5] * 3 + [1, 2, 3], [7, 3, 9, 1, 22, 14]]
    for seed in range(5):
        params = SamplingParams(temperature=0.7, seed=seed, max_new_tokens=30, ignore_eos=True)
        alone = engine().generate(prompts[0], params)
        assert alone.token_ids == engine().generate(prompts, [params, GREEDY])[0].token_ids


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


def test_a_drafters_verdict_has_no_path_longer_than_its_drafts():
    """One row copies a long output while a model that could draft trees drafts for another row."""
    prompt, target = [1, 2, 3], tiny_llama(seed=1)
    wanted = Engine(target, None).generate(prompt, GREEDY).token_ids

    class Copy(Fixed):
        def propose(self, batch, limits):
            asked = [limit if one.params.greedy else 0 for one, limit in zip(batch.sequences, limits, strict=True)]
            ends = [len(one.output) for one in batch.sequences]
            return Draft.from_lists([wanted[end:][:limit] for end, limit in zip(ends, asked, strict=True)])

    cascade = Cascade([Copy("copy", [], match=6), DraftModel(tiny_llama(seed=2), "static")])
    params = [GREEDY, SamplingParams(seed=1, max_new_tokens=24, ignore_eos=True)]
    outputs = [one.token_ids for one in Engine(target, cascade, "token", 16).generate([prompt, NEW], params)]
    assert outputs[0] == wanted
    alone = Cascade([Copy("copy", [], match=6), DraftModel(tiny_llama(seed=2))])
    assert outputs[1] == Engine(target, alone, "token", 16).generate(NEW, params[1]).token_ids


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
    with pytest.raises(ParameterError, match="a cascade of no drafters"):
        Cascade([])
    for costs in ([0.1], [0.1, -1.0], [0.1, float("nan")]):
        with pytest.raises(ParameterError, match=r"costs=.*0 or more target passes for each of 2"):
            Cascade([PromptLookup(), PromptLookup()], costs=costs)
    with pytest.raises(ModelError, match="vocabular"):
        Engine(target, ["prompt-lookup", tiny_llama(vocab_size=77)])


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


def test_drafts_do_not_depend_on_the_clock_where_a_seed_must_give_one_output():
    class Slow(Fixed):
        def propose(self, batch, limits):
            now[0] += cost
            return super().propose(batch, limits)

    found, now, cost = [], [0.0], 0.0
    for seconds in (0.0, 5.0):
        outputs, cost = [], seconds
        greedy = [SamplingParams(temperature=0.0, seed=0, max_new_tokens=30, ignore_eos=True)]
        drawn = [SamplingParams(temperature=0.7, seed=seed, max_new_tokens=30, ignore_eos=True) for seed in range(2)]
        # A lossy verifier's greedy output depends on the drafts, too.
        for verifier, params in ((EnsembleVerifier(0.5), greedy), ("token", drawn)):
            cascade = Cascade([PromptLookup(min_ngram=3), Slow("slow", [3, 3, 3])], clock=lambda: now[0])
            engine = Engine(tiny_llama(seed=1), cascade, verifier, "auto")
            for _ in range(2):
                engine.generate(NEW, SamplingParams(temperature=0.0, max_new_tokens=30, ignore_eos=True))
            outputs += [engine.generate(REPEATING, one).token_ids for one in params]
        found.append(outputs)
    assert found[0] == found[1]


def test_measured_costs_are_stored_for_the_next_process(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    target = tiny_llama(seed=1)
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)

    def engine(second: str) -> Engine:
        return Engine(target, Cascade([Fixed("cheap", [1, 2], match=2), Fixed(second, [3, 4])]))

    first = engine("dear")
    first.generate(NEW, params)
    saved = first.policy.as_json()
    assert engine("dear").policy.as_json()["costs"]["target"] != engine("another").policy.as_json()["costs"]["target"]
    file = tmp_path / "foretoken" / "costs.json"
    assert str(saved["costs"]["target"][0])[:3] in file.read_text() or file.exists()
    file.write_text(file.read_text().replace('"target"', '"other"'))  # another version's
    assert engine("dear").policy.as_json()["costs"] == engine("another").policy.as_json()["costs"]
    assert Engine(tiny_gpt2(seed=1), Cascade([Fixed("cheap", [1], match=2)])).policy is not first.policy


def test_fixed_costs_are_by_the_sizes_of_weights(monkeypatch):
    assume_cpus(monkeypatch)
    target, small = load(tiny_llama(seed=1)), load(tiny_llama(seed=2, num_hidden_layers=1))
    costs = Engine(target, small).policy.fixed_costs
    call = CALLED_SECONDS / target.assumed_seconds  # many passes of so small a model
    assert 0.1 < (costs.draft(0, 1, 1, 0) - call) / costs.target(1) < 0.9
    assert costs.draft(0, 5, 1, 0) - call == pytest.approx(5 * (costs.draft(0, 1, 1, 0) - call))
    target.weight_bytes, small.weight_bytes = 900_000_000, 90_000_000
    costs = Engine(target, small).policy.fixed_costs
    assert costs.draft(0, 1, 1, 0) / costs.target(1) == pytest.approx(0.1, rel=0.1)  # hardly anything of a large one's


def test_a_request_with_a_seed_is_not_drafted_for_by_a_model_whose_calls_take_as_long_as_passes(monkeypatch):
    assume_cpus(monkeypatch)
    target, small = load(tiny_llama(seed=1)), load(tiny_llama(seed=1))
    params = SamplingParams(seed=1, max_new_tokens=40, ignore_eos=True)
    drafted = []
    for size in (1_000_000, 100_000_000):
        target.weight_bytes, small.weight_bytes = size, size // 10
        drafted.append(Engine(target, small).generate([1, 2, 3], params).stats.drafted)
    assert drafted[0] == 0
    assert drafted[1] > 20


class Told(Fixed):
    """Keeps the tokens after the accepted ones too."""

    def observe(self, batch, draft, verdict, logits):
        self.observed.append([verdict.counts.tolist(), verdict.tokens.tolist()])


def test_every_drafter_is_told_the_token_that_comes_next_whoever_drafted_it():
    prompt = NEW
    following = target_output(prompt)
    free, idle = Told("free", [], match=1), Told("idle", [])
    drafter = Fixed("right", following[:1])
    engine = Engine(tiny_llama(seed=1), Cascade([free, idle, drafter], costs=[0.0, 9.0, 0.001]))
    engine.generate(prompt, SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
    rounds = len(free.observed)  # calibration asks no free drafter
    at, judged = 0, 0
    for told, other in zip(free.observed, idle.observed[-rounds:], strict=True):
        (accepted,), (token,) = told
        assert token == following[at + accepted]
        assert other == [[0], [following[at]]]  # nothing of its own was accepted
        at += accepted + 1
        judged += accepted
    assert judged > 0


def test_lookup_knows_the_tokens_that_a_model_drafted():
    lookup, prompt = Lookup(), NEW
    following = target_output(prompt)
    drafter = Fixed("right", following[:4])
    engine = Engine(tiny_llama(seed=1), Cascade([lookup, drafter], costs=[0.0, 0.001]))
    events = engine.stream(prompt, SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True))
    next(events)
    next(events)
    (state,) = lookup._sequences._states.values()
    assert sum(sum(counts) for counts in drafter.observed) > 0
    end = 0
    for token in [*prompt, *following][: len(state.known)]:
        end = state.known.automaton.step(end, token)
        assert end >= 0


def test_nothing_is_foreseen_in_a_sequence_that_is_not_worth_reading(monkeypatch):
    """Which tokens lookups foresee is not learnt from sequences that copy alone."""

    def ask(self, requests, beside=0):
        for request in requests:
            request.asked = True
        return [0.9] * len(requests)

    monkeypatch.setattr(Policy, "ask", ask)
    cascade = Cascade([Lookup()])
    for tokens, draft in (([1, 2, 3, 4], []), ([*range(12), 13, *range(12)], [13])):
        sequence = sequence_of(tokens)
        drafted = cascade.propose(batch_of(sequence), [1])
        assert [tokens[:count] for tokens, _, count in zip(*drafted.listed, strict=True)] == [draft]
        follow(cascade, sequence, {token: [token + 1] for token in range(20)}, drafted, False)
        request = cascade._states[sequence].request
        assert list(request.foreseen)[:1] == [False]
        cascade.observe_seconds(1.0)
        assert request.runs.known


class Recorded(DraftModel):
    """A draft model that records how long the sequences were for which it was asked."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.lengths: list[int] = []

    def propose(self, batch, limits):
        self.lengths += [len(one.tokens) for one, limit in zip(batch.sequences, limits, strict=True) if limit]
        return super().propose(batch, limits)


@pytest.mark.grid
@pytest.mark.parametrize("seed", [None, 4])
@pytest.mark.parametrize("others", [0, 1])
def test_a_model_is_not_asked_where_a_text_is_too_long_for_it(others, seed):
    """It would draft nothing, round after round, and its calls would seem to take no time."""
    target = load(tiny_llama(seed=1, max_position_embeddings=256))
    small = load(tiny_llama(seed=1, max_position_embeddings=64))
    model = Recorded(small)
    cascade = Cascade([*[PromptLookup()][:others], model], costs=[*[0.0][:others], 0.01])
    engine = Engine(target, cascade, "coupled")
    params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=150, ignore_eos=True)
    for _ in range(2):
        completion = engine.generate(NEW, params)
        assert len(completion.token_ids) == 150
    assert 55 < max(model.lengths) <= 64
    assert engine.generate(NEW, SamplingParams(max_new_tokens=20, seed=seed)).stats.drafted > 0


def test_a_cascade_keeps_what_it_knows_of_a_target():
    target, cascade = load(tiny_llama(seed=1)), Cascade([DraftModel(tiny_llama(seed=2))])
    engine = Engine(target, cascade)
    engine.generate(NEW, GREEDY)
    policy = cascade.policy
    assert cascade.measured
    engine.drafter = None
    engine.drafter = cascade
    assert Engine(target, cascade).policy is policy
    assert cascade.measured
    other = Engine(load(tiny_llama(seed=3)), cascade)
    assert other.policy is not policy
    assert not cascade.measured
    other.generate(NEW, GREEDY)
    assert cascade.measured

"""Plain rounds of rows that are followed: they end where a copy pays, and nothing else changes."""

from __future__ import annotations

import gc
from dataclasses import replace
from weakref import ref

import pytest

from byte_tokenizer import byte_tokenizer
from engine.test_plain_passes import Idle
from foretoken import Engine, Grammar, SamplingParams, load
from foretoken.drafters import Cascade, Lookup
from foretoken.drafters.cascade_following import Followed
from foretoken.engine import decode_loop, plain, recording
from foretoken.limits import Limits
from foretoken.policy.copying import Copying
from foretoken.policy.following import Following
from foretoken.policy.lead import Lead
from tiny import tiny_llama

ONE, MANY = Limits(plain_passes=1), Limits()
PROMPTS = [[4, 4, 5, 1], [1, 2, 3, 1, 2], [5, 6, 5]]


@pytest.fixture(scope="module")
def target():
    """Its outputs repeat themselves now and then."""
    return load(tiny_llama(vocab_size=8, seed=1), runner="native")


@pytest.fixture(scope="module")
def byte_target():
    return load(tiny_llama(vocab_size=259, seed=1, eos_token_id=258), tokenizer=byte_tokenizer(), runner="native")


@pytest.fixture
def calls(monkeypatch):
    """Rows never draft in every round, and are called wherever there is anything to copy; how often they were."""
    found, call = [], Copying.call
    monkeypatch.setattr(Following, "needs", property(lambda _: 0.0))
    monkeypatch.setattr(Following, "pays", lambda _, gain: True)
    monkeypatch.setattr(Lead, "passed", lambda *_: False)
    monkeypatch.setattr(Copying, "may_call", property(lambda _: True))

    def counted(copying, gain):
        found.append(copying)
        return call(copying, gain)

    monkeypatch.setattr(Copying, "call", counted)
    return found


def plain_leads(engine):
    """Have the engine's requests begin with plain passes that are followed; whatever the clock says, drafts cost next
    to nothing."""
    engine.warm_up()
    cascade = engine._loops.cascade
    cascade.measure([(1, 1e-3), (9, 1.05e-3), (33, 1.2e-3)], [[]])
    costs = cascade.policy.costs
    costs.record = costs.returned = costs.together.record = costs.together.took = lambda *_, **__: None
    for copying in engine._loops.cascade.policy._copying.values():
        copying.followed = True
        for gains in copying.lead._gains:
            gains.tokens = -1000.0


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_are_those_of_plain_decoding(target, calls, temperature):
    """At a temperature with the verifier that gives one output for a seed whatever is drafted."""
    drafted = 0
    for number, prompt in enumerate(PROMPTS * 2):
        engine = Engine(target, "lookup", "coupled" if temperature else "auto", limits=MANY)
        plain_leads(engine)
        params = SamplingParams(max_new_tokens=90, temperature=temperature, seed=number, ignore_eos=True)
        found = engine.generate(prompt, params)
        expected = Engine(target, None, engine.verifier, limits=ONE).generate(prompt, params)
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert found.stats.emitted == 90
        drafted += found.stats.drafted
    if not temperature:
        assert calls
        assert drafted


def test_a_called_row_drafts_in_the_next_round(target, calls, monkeypatch):
    """The round ends within four passes of the call, and the row rests again behind rounds that gain nothing."""
    lengths, proposals = [], []
    decode, propose = plain.decode_plainly, Lookup.propose

    def decoded(taking, *rest):
        decode(taking, *rest)
        lengths.append(taking.done)

    def proposed(drafter, batch, limits):
        proposals.append(len(calls))
        return propose(drafter, batch, limits)

    engine = Engine(target, "lookup", limits=MANY)
    plain_leads(engine)
    monkeypatch.setattr(decode_loop, "decode_plainly", decoded)
    monkeypatch.setattr(Lookup, "propose", proposed)
    stats = engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)).stats
    assert calls
    assert proposals[0] > 0  # not asked before it was called
    assert len(proposals) >= len(calls)
    assert any(length % 4 == 0 for length in lengths)
    assert sum(lengths) + stats.drafted >= 100
    assert stats.accepted > 0


def test_rows_that_are_not_called_are_not_asked(target, monkeypatch):
    monkeypatch.setattr(Following, "pays", lambda _, gain: False)
    engine = Engine(target, "lookup", limits=MANY)
    plain_leads(engine)
    monkeypatch.setattr(Lead, "passed", lambda *_: False)
    params = SamplingParams(max_new_tokens=120, temperature=0, ignore_eos=True)
    for prompt in PROMPTS:
        assert engine.generate(prompt, params).stats.drafted == 0


@pytest.mark.grid
@pytest.mark.parametrize("why", ["log probabilities", "a stop text", "a batch"])
def test_rows_that_cannot_be_followed_are_asked_for_at_intervals(byte_target, monkeypatch, why):
    """Where the request before was followed, a request that can't be is expected to be until its first plain round."""
    engine = Engine(byte_target, "lookup", limits=MANY)
    plain_leads(engine)
    left, leave = [], Copying.leave_alone
    monkeypatch.setattr(Copying, "leave_alone", lambda copying: left.append(leave(copying)) or left[-1])
    asked, propose = [], Lookup.propose

    def proposed(drafter, batch, limits):
        asked.append(len(batch.sequences[0].output))
        return propose(drafter, batch, limits)

    monkeypatch.setattr(Lookup, "propose", proposed)
    more = {"log probabilities": {"logprobs": 1}, "a stop text": {"stop": ("\x00\x01\x02",)}}.get(why, {})
    params = SamplingParams(max_new_tokens=200, temperature=0, ignore_eos=True, **more)
    prompts = PROMPTS if why == "a batch" else PROMPTS[:1]
    expected = Engine(byte_target, None, limits=ONE).generate(prompts, params)
    found = engine.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert asked
    if why != "a batch":
        assert left[0] is True
        assert not any(left[1:])
        assert asked[0] == 1 + MANY.untold_times * MANY.plain_passes


@pytest.mark.parametrize("why", ["a trace", "a grammar"])
def test_rows_whose_rounds_have_one_pass_are_asked_for_from_the_start(byte_target, monkeypatch, why):
    """Where the request before was followed: these never are."""
    engine = Engine(byte_target, "lookup", limits=MANY)
    plain_leads(engine)
    lengths, propose = [], Lookup.propose

    def proposed(drafter, batch, limits):
        lengths.append(len(batch.sequences[0].output))
        return propose(drafter, batch, limits)

    monkeypatch.setattr(Lookup, "propose", proposed)
    grammar = Grammar.regex("[a-c ]{90,100}") if why == "a grammar" else None
    params = SamplingParams(max_new_tokens=80, temperature=0, ignore_eos=True, grammar=grammar)
    *_, last = engine.stream(PROMPTS[1], params, trace=why == "a trace")
    assert last.completion.stats.emitted == 80
    assert lengths
    assert lengths[0] <= 2
    assert len(lengths) > 2


@pytest.mark.parametrize(("more", "called"), [(0, False), (1, False), (2, True)])
def test_no_row_is_called_that_has_no_room_for_a_draft(target, calls, monkeypatch, more, called):
    ends, judge = [], Followed.calls

    def judged(followed, tokens):
        calling = judge(followed, tokens)
        if calling:
            ends.append(len(followed._sequence.output) + len(tokens))
        return calling

    monkeypatch.setattr(Followed, "calls", judged)

    def generate(count):
        engine = Engine(target, "lookup", limits=MANY)
        plain_leads(engine)
        ends.clear()
        engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=count, temperature=0, ignore_eos=True))
        return [*ends]

    first = generate(60)[0]
    assert generate(first + more) == [first] * called


@pytest.mark.parametrize("passes", [2, 3, 6])
def test_rows_are_called_however_few_passes_a_round_has(target, calls, passes):
    """As in larger models, whose rounds may take no longer where each event is read."""
    engine = Engine(target, "lookup", limits=Limits(plain_passes=passes))
    plain_leads(engine)
    *_, last = engine.stream(PROMPTS[1], SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
    assert calls
    assert last.completion.stats.drafted


class Watching(Idle):
    """Drafts nothing, and watches plain rounds."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def watch(self, batch):
        begin = len(batch.sequences[0].output)
        return lambda tokens: self.seen.append(begin + len(tokens))


def test_a_drafter_watches_no_tokens_behind_which_the_output_ends(byte_target):
    drafter = Watching()
    engine = Engine(byte_target, drafter, num_speculative_tokens=3, limits=MANY)
    params = SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)
    output = engine.generate(PROMPTS[0], params).token_ids
    assert drafter.seen[:3] == [5, 9, 13]
    assert output.index(output[4]) == 4
    drafter.seen.clear()
    stopped = replace(params, stop_token_ids=(output[4],))
    assert engine.generate(PROMPTS[0], stopped).finish_reason == "stop"
    assert not drafter.seen


def test_what_watching_takes_is_the_drafters_time(byte_target, monkeypatch):
    parts, turn_to = [], recording.RoundClock.turn_to
    monkeypatch.setattr(
        recording.RoundClock, "turn_to", lambda clock, part: (turn_to(clock, part), setattr(clock, "at", part))[0]
    )
    decode = plain.decode_plainly

    def decoded(taking, target, cache, members, clock):
        watch = taking.watch
        if watch is not None:
            taking.watch = lambda tokens: parts.append(clock.at) or watch(tokens)
        decode(taking, target, cache, members, clock)

    monkeypatch.setattr(decode_loop, "decode_plainly", decoded)
    engine = Engine(byte_target, Watching(), num_speculative_tokens=3, limits=MANY)
    engine.generate(PROMPTS[1], SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True))
    assert set(parts) == {"drafter"}


def test_a_row_whose_rounds_have_one_pass_is_asked_for_at_intervals(byte_target, monkeypatch):
    """Its grammar may force tokens, so no passes go together, and it is never known whether it is followed."""
    engine = Engine(byte_target, "lookup", limits=MANY)
    plain_leads(engine)
    asked, propose = [], Lookup.propose
    monkeypatch.setattr(Lookup, "propose", lambda *given: asked.append(given) or propose(*given))
    params = SamplingParams(max_new_tokens=100, temperature=0, grammar=Grammar.regex("[a-c]{500}"))
    found = engine.generate(PROMPTS[0], params)
    assert found.token_ids == Engine(byte_target, None, limits=ONE).generate(PROMPTS[0], params).token_ids
    assert asked


def test_a_target_that_fails_within_followed_passes_leaves_the_engine_usable(target, calls, monkeypatch):
    engine = Engine(target, "lookup", limits=MANY)
    plain_leads(engine)
    params = SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True)
    expected = Engine(target, None, limits=ONE).generate(PROMPTS[1], params).token_ids
    decode_row = type(target).decode_row

    def failing(own, token, most, cache, following):
        done = 0

        def choose(scores):
            nonlocal done
            done += 1
            if done == 3:
                raise RuntimeError("broken")
            return following(scores)

        return decode_row(own, token, most, cache, choose)

    caches, watch = [], Cascade.watch
    with monkeypatch.context() as patched:
        patched.setattr(type(target), "decode_row", failing)
        patched.setattr(Cascade, "watch", lambda own, batch: caches.append(ref(batch.cache)) or watch(own, batch))
        with pytest.raises(RuntimeError, match="broken"):
            engine.generate(PROMPTS[1], params)
    gc.collect()
    assert caches
    assert not any(cache() for cache in caches)  # nor does what followed the row keep its KV cache
    followed, over, failed = [], Followed.over, engine._loops.cascade._followed
    monkeypatch.setattr(Followed, "over", lambda own: followed.append(own) or over(own))
    engine.generate(PROMPTS, params)
    assert failed is not None
    assert failed not in followed
    assert engine.generate(PROMPTS[1], params).token_ids == expected
    assert engine.generate(PROMPTS[0], params).token_ids == Engine(target, None).generate(PROMPTS[0], params).token_ids

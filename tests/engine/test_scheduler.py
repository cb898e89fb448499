"""Requests that join, leave and are cancelled while others are decoded: each gets what it would get alone."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from foretoken import verify
from foretoken.engine import recording, verification
from foretoken.engine.engine import Engine
from foretoken.engine.outputs import Occupancy
from foretoken.engine.prompts import make_sequence
from foretoken.engine.row import Row
from foretoken.errors import NumericalError, OutOfMemory, ParameterError, PromptError
from foretoken.limits import Limits
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama, tiny_t5


def pair(**options):
    return tiny_llama(seed=1, **options), tiny_llama(seed=2, **options)


def drain(engine):
    events = {}
    while engine.busy:
        for request, event in engine.step():
            events.setdefault(request.number, []).append(event)
    return events


def test_submitted_requests_get_what_they_get_alone():
    engine = Engine(*pair(), "token", 3, max_batch_size=2)
    wanted, requests = [], []
    for number in range(5):
        params = SamplingParams(seed=number, max_new_tokens=6 + 3 * number, ignore_eos=True)
        prompt = [1 + number, 2, 3]
        wanted.append(engine.generate(prompt, params).token_ids)
        requests.append(engine.submit(prompt, params))
        if number % 2:
            engine.step()
    events = drain(engine)
    assert [request.completion.token_ids for request in requests] == wanted
    for request in requests:
        pieces = [piece.token_id for event in events.get(request.number, []) for piece in event.pieces]
        assert pieces == wanted[request.number][-len(pieces) :]
        assert events[request.number][-1].completion.token_ids == wanted[request.number]
    assert engine.step() == []


def test_a_cancelled_request_keeps_what_it_has_and_disturbs_nobody():
    engine = Engine(*pair(), "coupled", 3, max_batch_size=3)
    params = [SamplingParams(seed=seed, max_new_tokens=40, ignore_eos=True) for seed in range(3)]
    alone = [engine.generate([5, 6], one).token_ids for one in params]
    requests = [engine.submit([5, 6], one) for one in params]
    waiting = engine.submit([7], params[0])
    for _ in range(3):
        engine.step()
    requests[1].cancel()
    waiting.cancel()
    events = engine.step()
    assert {request.number for request, _ in events} == {request.number for request in (*requests, waiting)}
    assert [event.pieces for request, event in events if request.finished] == [(), ()]
    drain(engine)
    cancelled = requests[1].completion
    assert cancelled.finish_reason == "cancelled"
    assert 0 < len(cancelled.token_ids) < 40
    assert cancelled.token_ids == alone[1][: len(cancelled.token_ids)]
    assert requests[0].completion.token_ids == alone[0]
    assert requests[2].completion.token_ids == alone[2]
    assert waiting.completion.token_ids == []
    requests[0].cancel()
    assert requests[0].completion.finish_reason == "length"


@pytest.mark.parametrize("drafter", ["model", "prompt-lookup", "ngram-storage", None])
def test_a_long_prompt_is_read_while_others_go_on(drafter):
    target, small = pair()
    drafter = small if drafter == "model" else drafter
    engine = Engine(target, drafter, "coupled", 3, max_batch_size=4, limits=Limits(prefill_tokens=8))
    params = SamplingParams(seed=4, max_new_tokens=30, ignore_eos=True)
    long = [1 + i % 30 for i in range(70)]
    wanted = [engine.generate(prompt, params).token_ids for prompt in ([3, 4, 5], long)]
    first = engine.submit([3, 4, 5], params)
    engine.step()
    second = engine.submit(long, params)
    served = []
    while not second.finished:
        served.append({request.number for request, _ in engine.step()})
    drain(engine)
    assert served[0] == served[1] == {first.number}  # the long one is still being read
    assert [first.completion.token_ids, second.completion.token_ids] == wanted


def test_encoder_decoder_requests_join_too():
    engine = Engine(tiny_t5(seed=1), tiny_t5(seed=2), "coupled", 2, max_batch_size=2)
    params = SamplingParams(seed=4, max_new_tokens=12, ignore_eos=True)
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
    wanted = [engine.generate(prompt, params).token_ids for prompt in prompts]
    requests = []
    for prompt in prompts:
        requests.append(engine.submit(prompt, params))
        engine.step()
    drain(engine)
    assert [request.completion.token_ids for request in requests] == wanted


def test_a_bad_request_fails_alone():
    engine = Engine(*pair(), "token", 3)
    with pytest.raises(PromptError, match="one prompt"):
        engine.submit([[1], [2]])
    with pytest.raises(PromptError, match="99,999"):
        engine.submit([99_999])
    assert not engine.busy


def test_scores_that_cannot_be_used_end_one_request(monkeypatch):
    target = load(tiny_llama(seed=1))
    engine = Engine(target, None, "token", 0)
    params = SamplingParams(seed=1, max_new_tokens=5, ignore_eos=True)
    good, bad = engine.submit([1, 2], params), engine.submit([3, 4], params)
    forward = type(target).forward

    def broken(self, tokens, *arguments, **options):
        scores = forward(self, tokens, *arguments, **options)
        if scores.logits is not None:
            scores.logits[1:] = float("nan")
        return scores

    monkeypatch.setattr(type(target), "forward", broken)
    engine.step()
    monkeypatch.undo()
    drain(engine)
    assert isinstance(bad.completion.error, NumericalError)
    assert good.completion.finish_reason == "length"


def test_no_memory_ends_those_that_run_and_not_those_that_wait(monkeypatch):
    target = load(tiny_llama(seed=1))
    engine = Engine(target, None, "token", 0, max_batch_size=1)
    params = SamplingParams(seed=1, max_new_tokens=5, ignore_eos=True)
    running, waiting = engine.submit([1, 2], params), engine.submit([3, 4], params)

    def full(*_, **__):
        raise MemoryError

    monkeypatch.setattr(type(target), "forward", full)
    with pytest.raises(OutOfMemory):
        engine.step()
    monkeypatch.undo()
    drain(engine)
    assert isinstance(running.completion.error, OutOfMemory)
    assert waiting.completion.finish_reason == "length"


def test_an_interruption_ends_those_that_run(monkeypatch):
    engine = Engine(*pair(), "token", 3, max_batch_size=2)
    params = SamplingParams(seed=1, max_new_tokens=9, ignore_eos=True)
    wanted = engine.generate([5, 6], params).token_ids
    running = [engine.submit([1, 2], params), engine.submit([3, 4], params)]
    waiting = engine.submit([5, 6], params)
    engine.step()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        verification, "decide_batch", interrupted
    )  # the models hold tokens of a round that came to nothing
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    drain(engine)
    assert all("KeyboardInterrupt" in str(request.completion.error) for request in running)
    assert waiting.completion.token_ids == wanted


def test_settings_that_are_changed_after_an_error_hold(monkeypatch):
    target = load(tiny_llama(seed=1))
    engine = Engine(target, "prompt-lookup", "token", 7)
    params = SamplingParams(seed=1, max_new_tokens=20, ignore_eos=True)

    def full(*_, **__):
        raise MemoryError

    engine.submit([1, 2] * 9, params)
    monkeypatch.setattr(type(target), "forward", full)
    with pytest.raises(OutOfMemory):
        engine.step()
    monkeypatch.undo()
    engine.num_speculative_tokens, engine.max_batch_size = 1, 2  # what the message advises
    requests = [engine.submit([1, 2] * 9, params) for _ in range(3)]
    assert len(engine.step()) == 2
    drain(engine)
    assert all(len(request.completion.stats.drafted_by_position) == 1 for request in requests)


def test_a_request_may_leave_its_number_of_tokens_to_an_engine_of_a_fixed_one(monkeypatch):
    monkeypatch.setattr(recording, "perf_counter", iter(range(10**6)).__next__)
    engine = Engine(tiny_llama(seed=1), "prompt-lookup", "coupled", 3)
    params = SamplingParams(seed=1, max_new_tokens=30, ignore_eos=True)
    engine.submit([1, 2] * 9, params, num_speculative_tokens="auto")
    drain(engine)
    assert engine.policy.costs.anchored  # it has been told of rounds


@pytest.mark.parametrize("options", [{"runner": "hf"}, {"runner": "native", "backend": "torch"}])
def test_what_another_text_went_on_with_is_not_copied(options):
    target = load(tiny_llama(seed=1), **options)
    engine = Engine(target, None, "token", 0, limits=Limits(prefill_tokens=64))
    params = SamplingParams(seed=1, max_new_tokens=30, ignore_eos=True)
    good = [*SYSTEM[:40], 1, 2]
    wanted = engine.generate(good, params).token_ids
    engine.release()
    engine.submit(SYSTEM[::-1] + [3] * 120, params)  # the longest: everybody's masks reach as far
    engine.step()
    bad = engine.submit([*SYSTEM, *[3] * 100], params)
    engine.step()
    engine.step()
    cache = engine._scheduler.loop._prefixes.cache
    if target.device.type == "cuda" and options["runner"] == "native":
        (room,) = cache.store._held
        values = room.states[1::2]  # of each layer in turn
    else:
        values = [layer.values for layer in getattr(cache, "layers", None) or cache.store.layers]
    with torch.inference_mode():
        for layer in values:  # as numbers that overflow leave them
            layer[1, :, 110:128] = float("nan")
    sharing = engine.submit(good, params)
    drain(engine)
    assert isinstance(bad.completion.error, NumericalError)
    assert sharing.completion.token_ids == wanted


class Reads:
    """Counts the tokens that a model is fed."""

    def __init__(self, monkeypatch, model):
        self.tokens = 0
        forward = type(model).forward

        def counting(this, tokens, parents, counts, *arguments, **options):
            if this is model:
                self.tokens += int(counts.sum())
            return forward(this, tokens, parents, counts, *arguments, **options)

        monkeypatch.setattr(type(model), "forward", counting)

    def take(self):
        taken, self.tokens = self.tokens, 0
        return taken


SYSTEM = [1 + (5 * i) % 29 for i in range(80)]


@pytest.mark.grid
@pytest.mark.parametrize("runner", ["hf", "native"])
def test_a_beginning_that_requests_share_is_read_once(monkeypatch, runner):
    target, drafter = (load(model, runner=runner) for model in pair())
    engine = Engine(target, drafter, "coupled", 3, reuse_prefixes=False)
    params = SamplingParams(seed=4, max_new_tokens=10, ignore_eos=True)
    prompts = [[*SYSTEM, *ending] for ending in ([1, 2], [1, 3, 4], [9], [])]
    wanted = [engine.generate(prompt, params).token_ids for prompt in [*prompts, [7, 8]]]
    reads, drafted = Reads(monkeypatch, target), Reads(monkeypatch, drafter)
    # All at once: three wait until the first has read what they share.
    assert [one.token_ids for one in engine.generate([*prompts, [7, 8]], params)] == wanted
    assert reads.take() < 80 + 5 * 60
    drafted.take()
    # One after another, the first being decoded.
    requests = []
    for prompt in prompts:
        requests.append(engine.submit(prompt, params))
        engine.step()
    drain(engine)
    assert [request.completion.token_ids for request in requests] == wanted[:4]
    assert reads.take() < 80 + 4 * 60
    assert drafted.take() < 80 + 4 * 60


@pytest.mark.parametrize("runner", ["hf", "native"])
def test_a_conversation_is_not_read_again(monkeypatch, runner):
    target = load(tiny_llama(seed=1), runner=runner)
    engine, other = Engine(target, "prompt-lookup", "coupled", 3), Engine(target, None, "coupled", reuse_prefixes=False)
    params = SamplingParams(seed=4, max_new_tokens=12, ignore_eos=True)
    text = list(SYSTEM)
    for turn in range(4):
        with monkeypatch.context() as patch:
            reads = Reads(patch, target)
            if turn % 2:
                answer = engine.generate(text, params)
            else:
                answer = list(engine.stream(text, params))[-1].completion
            assert turn == 0 or reads.take() < 70
        assert answer.token_ids == other.generate(text, params).token_ids
        text += [*answer.token_ids, 3, 4, 5]
    # Another text altogether, a shorter beginning of this one, and settings that were changed.
    for prompt in ([9, 8, 7], text[:50], text):
        assert engine.generate(prompt, params).token_ids == other.generate(prompt, params).token_ids
        engine.num_speculative_tokens = 2
    broken = engine.stream(text, params)
    next(broken)
    assert engine.generate(text, params).token_ids == other.generate(text, params).token_ids
    assert list(broken)[-1].completion.token_ids == other.generate(text, params).token_ids


def test_a_beginning_whose_reader_is_cancelled_is_read_by_another():
    engine = Engine(*pair(), "coupled", 3, max_batch_size=4)
    params = SamplingParams(seed=4, max_new_tokens=10, ignore_eos=True)
    wanted = engine.generate([*SYSTEM, 2], params).token_ids
    first, second = engine.submit([*SYSTEM, 1], params), engine.submit([*SYSTEM, 2], params)
    first.cancel()
    third = engine.submit([*SYSTEM, 2], params)
    drain(engine)
    assert second.completion.token_ids == third.completion.token_ids == wanted


def test_sources_are_not_shared():
    engine = Engine(tiny_t5(seed=1), tiny_t5(seed=2), "coupled", 2)
    params = SamplingParams(seed=4, max_new_tokens=50, ignore_eos=True)
    prompts = [[*SYSTEM[:30], 3], [*SYSTEM[:30], 4]]
    alone = [engine.generate(prompt, params).token_ids for prompt in prompts]
    assert [one.token_ids for one in engine.generate(prompts, params)] == alone


def test_requests_may_have_settings_of_their_own():
    target, drafter = pair()
    engine = Engine(target, drafter, "token", 3)
    settings = [
        {},
        {"verifier": "coupled"},
        {"verifier": "block", "num_speculative_tokens": 2},
        {"num_speculative_tokens": 0},
        {"verifier": "coupled", "num_speculative_tokens": 5},
        {"verifier": "typical", "num_speculative_tokens": 4},
        {"num_speculative_tokens": "auto"},
    ]
    params = [SamplingParams(seed=seed, max_new_tokens=20, ignore_eos=True, top_k=seed * 3) for seed in range(7)]
    requests = []
    for number, (one, mine) in enumerate(zip(params, settings, strict=True)):
        requests.append(engine.submit([5, 6, number], one, **mine))
        engine.step()
    drain(engine)
    for number, (request, one, mine) in enumerate(zip(requests, params, settings, strict=True)):
        k = mine.get("num_speculative_tokens", 3)
        alone = Engine(engine.target, engine.drafter, mine.get("verifier", "token"), k).generate([5, 6, number], one)
        assert request.completion.token_ids == alone.token_ids, mine
        assert request.completion.stats.drafted == alone.stats.drafted, mine
    with pytest.raises(ParameterError, match="unknown verifier"):
        engine.submit([1], verifier="blok")
    with pytest.raises(ParameterError, match="num_speculative_tokens is -1"):
        engine.submit([1], num_speculative_tokens=-1)
    assert not engine.busy


def test_a_trace_of_rows_with_different_verifiers():
    engine = Engine(*pair(), "token", 3)
    loop = engine.decode_loop()
    params = [SamplingParams(seed=seed, max_new_tokens=9, ignore_eos=True) for seed in range(4)]
    sequences = [make_sequence(engine.target, [5, 6], one) for one in params]
    rows = [Row(sequence, engine.target, verifier=engine.verifier) for sequence in sequences]
    rows[1].verifier = verify.get("coupled")
    untraced = rows.pop()
    for row in rows:
        row.trace = True
    loop.join([untraced])
    loop.join(rows)
    loop.step()
    for row in rows:
        assert len(row.drafted) == 3
        assert [token.token_id for token in row.drafted if token.accepted] == row.sequence.output[: row.stats.accepted]
        assert all(0 < token.p < 1 for token in row.drafted)
        assert row.traced.rule == ("coupled" if row is rows[1] else "rejection")
        assert row.traced.node == row.stats.accepted
    assert untraced.stats.rounds
    assert untraced.drafted == ()
    assert untraced.traced is None


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.full)])
def test_soak(count):
    """Mixed requests, joining and being cancelled at random: every finished one equals what it gives alone."""
    chance = random.Random(count)
    target, drafter = pair()
    engine = Engine(target, drafter, "coupled", max_batch_size=6)
    alone = Engine(engine.target, None, "coupled")
    submitted = []
    while len(submitted) < count or engine.busy:
        for _ in range(chance.randrange(3) if len(submitted) < count else 0):
            prompt = [chance.randrange(1, 30) for _ in range(chance.choice([1, 2, 5, 20]))]
            params = SamplingParams(
                seed=chance.randrange(1000),
                temperature=chance.choice([0.0, 0.7, 1.0]),
                top_k=chance.choice([None, 5]),
                max_new_tokens=chance.randrange(1, 20),
                ignore_eos=True,
            )
            submitted.append((prompt, params, engine.submit(prompt, params)))
        engine.step()
        if chance.random() < 0.1 and submitted:
            chance.choice(submitted)[2].cancel()
    reasons = {request.completion.finish_reason for _, _, request in submitted}
    assert reasons == {"length", "cancelled"}
    for prompt, params, request in submitted:
        tokens = request.completion.token_ids
        assert tokens == alone.generate(prompt, params).token_ids[: len(tokens)]
        assert request.completion.finish_reason == "cancelled" or len(tokens) == params.max_new_tokens
    assert not engine.busy
    assert engine.occupancy() == Occupancy()


@pytest.mark.parametrize("runner", ["hf", "native"])
def test_a_copy_that_another_text_has_spoilt_is_read_again(runner):
    module = tiny_llama(seed=1)
    params = SamplingParams(seed=4, max_new_tokens=10, ignore_eos=True, logit_bias={31: -100.0})
    wanted = Engine(load(module, runner=runner), None, "coupled").generate([*SYSTEM, 3, 4], params).token_ids
    with torch.no_grad():
        module.get_input_embeddings().weight[31] = float("nan")
    target = load(module, runner=runner)
    for drafter in (None, load(tiny_llama(seed=2))):
        engine = Engine(target, drafter, "coupled", 3)
        bad, good, other = engine.generate([[*SYSTEM, 31, 1, 2], [*SYSTEM, 3, 4], [*SYSTEM, 3, 4]], params)
        assert isinstance(bad.error, NumericalError)
        assert good.token_ids == other.token_ids == wanted


def test_results_keep_nothing_alive():
    engine = Engine(*pair(), "coupled", 3)
    params = SamplingParams(seed=4, max_new_tokens=10, ignore_eos=True)
    request = engine.submit([1, 2, 3], params)
    drain(engine)
    completion = engine.generate([1, 2, 3], params)
    gc.collect()
    assert request.completion.token_ids == completion.token_ids
    assert len(engine.drafter._caches) == 0

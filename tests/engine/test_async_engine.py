"""Requests from tasks, threads and event loops: each gets what it would get alone, and nobody hangs."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.engine.prompt_scores import Scoring
from foretoken.errors import (
    ForetokenError,
    NumericalError,
    OutOfMemory,
    ParameterError,
    PromptError,
    QueueTimeout,
    SlowConsumer,
)
from foretoken.models import load
from foretoken.sampling import SamplingParams
from tiny import tiny_llama

LONGEST = 240  # seconds that nothing here comes near: a test that hangs ends


class GatedEngine(Engine):
    """Begins a round when it is let: so a test knows what happened before it, and what will after."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.requests = []
        self.gated = True
        self._begun, self._let = threading.Semaphore(0), threading.Semaphore(0)

    def submit(self, *arguments, **settings):
        self.requests.append(super().submit(*arguments, **settings))
        return self.requests[-1]

    def step(self):
        if self.gated:
            self._begun.release()
            assert self._let.acquire(timeout=LONGEST)
        return super().step()

    async def at_the_gate(self):
        """Until the thread is about to begin a round."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=LONGEST)

    def let(self):
        """One round."""
        self._let.release()

    def open(self):
        """All rounds to come, and the one that waits; a task that is at the gate waits no longer, either."""
        self.gated = False
        self._let.release()
        self._begun.release()


def make(kind=Engine, k=3, **options):
    return kind(tiny_llama(seed=1), tiny_llama(seed=2), "coupled", k, **options)


def sampling(seed, length=12):
    return SamplingParams(seed=seed, max_new_tokens=length, ignore_eos=True)


def run(main):
    return asyncio.run(asyncio.wait_for(main, LONGEST))


@pytest.fixture
def engine_threads():
    """The engines' threads that the test has started: those of other tests may be there, too."""

    def found():
        return [one for one in threading.enumerate() if one.name == "foretoken-engine" and one not in before]

    before = ()
    before = found()
    return found


# --- results ------------------------------------------------------------------------------------------------------


def test_requests_of_many_tasks_get_what_they_get_alone():
    engine = make(max_batch_size=3)
    requests = [([1 + seed, 2, 3], sampling(seed, 5 + 3 * seed)) for seed in range(8)]
    wanted = [engine.generate(*request).token_ids for request in requests]

    async def main():
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(served.generate(*request) for request in requests))

    completions = run(main())
    assert [completion.token_ids for completion in completions] == wanted
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_requests_are_decoded_together():
    engine = make(GatedEngine, k=0)

    async def main():
        async with AsyncEngine(engine) as served:
            first = asyncio.create_task(served.generate([1], sampling(1, 4)))
            await engine.at_the_gate()
            others = [asyncio.create_task(served.generate([seed], sampling(seed, 3))) for seed in (2, 3)]
            await asyncio.sleep(0)  # both have submitted
            for _ in range(4):
                engine.let()
            await asyncio.gather(first, *others)

    run(main())  # four rounds were enough: one for the first alone, three for all


def test_a_stream_equals_what_generate_gives():
    engine = make()
    prompts = [[3, 4, 5], [6], [7, 8]]
    wanted = [engine.generate(prompt, sampling(9, 20)).token_ids for prompt in prompts]

    async def read(served, prompt):
        return [event async for event in served.stream(prompt, sampling(9, 20))]

    async def main():
        async with AsyncEngine(engine) as served:
            return await asyncio.gather(*(read(served, prompt) for prompt in prompts))

    for events, tokens in zip(run(main()), wanted, strict=True):
        assert [piece.token_id for event in events for piece in event.pieces] == tokens
        assert [event.completion is not None for event in events] == [False] * (len(events) - 1) + [True]
        assert events[-1].completion.token_ids == tokens


@pytest.mark.parametrize(("most", "ends"), [(5, True), (31, False)])
def test_a_reader_may_be_so_many_events_behind(most, ends):
    engine = make(k=0)

    async def main():
        async with AsyncEngine(engine, max_events=most) as served:
            stream = served.stream([5], sampling(1, 30))
            tokens = [piece.token_id for piece in (await anext(stream)).pieces]
            await served.generate([6], sampling(2, 40))  # the stream's rounds are over by then
            async for event in stream:
                tokens += [piece.token_id for piece in event.pieces]
            return tokens

    wanted = engine.generate([5], sampling(1, 30)).token_ids
    if ends:
        with pytest.raises(SlowConsumer):
            run(main())
    else:
        assert run(main()) == wanted


def test_a_request_may_wait_for_so_long(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("foretoken.engine.worker.monotonic", lambda: now[0])
    engine = make(GatedEngine, k=0, max_batch_size=1)

    async def main():
        async with AsyncEngine(engine, queue_seconds=10.0) as served:
            first = asyncio.create_task(served.generate([1], sampling(1, 4)))
            await engine.at_the_gate()
            second = asyncio.create_task(served.generate([2], sampling(1, 4)))
            await asyncio.sleep(0)
            now[0] = 109.0
            engine.let()
            await engine.at_the_gate()
            assert served.occupancy().running == served.occupancy().waiting == 1
            now[0] = 119.0
            engine.open()
            with pytest.raises(QueueTimeout):
                await second
            assert len((await first).token_ids) == 4

    run(main())
    assert engine.requests[1].completion.finish_reason == "cancelled"


@pytest.mark.parametrize("wrong", [{"queue_seconds": 0}, {"max_events": 0}, {"max_events": 1.5}])
def test_limits_have_ranges(wrong):
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        AsyncEngine(make(), **wrong)


def test_a_slow_reader_misses_nothing_and_delays_nobody():
    engine = make()
    wanted = engine.generate([5], sampling(1, 30)).token_ids

    async def main():
        async with AsyncEngine(engine) as served, aclosing(served.stream([5], sampling(1, 30))) as stream:
            tokens = [piece.token_id for piece in (await anext(stream)).pieces]
            for seed in range(5):
                await served.generate([6], sampling(seed, 40))
            async for event in stream:
                tokens += [piece.token_id for piece in event.pieces]
            return tokens

    assert run(main()) == wanted


def test_requests_of_one_task_are_read_together():
    engine = make()
    wanted = [engine.generate([5 + at], sampling(at, 12)).token_ids for at in range(3)]

    async def main():
        async with AsyncEngine(engine) as served:
            with served.streams() as streams:
                assert [streams.submit([5 + at], sampling(at, 12), {}) for at in range(3)] == [0, 1, 2]
                found = [[], [], []]
                while streams.left:
                    index, event = await streams.next()
                    found[index] += [piece.token_id for piece in event.pieces]
            return found

    assert run(main()) == wanted


def test_rounds_behind_an_event_may_have_none_for_some_time(monkeypatch):
    """The first one has, so that a reader knows when it began, and so has the last one, with all of it."""
    engine = make()
    wanted = [engine.generate([5 + at], sampling(at, 12)) for at in range(2)]

    async def events(interval):
        async with AsyncEngine(engine) as served:
            with served.streams(interval) as streams:
                for at in range(2):
                    streams.submit([5 + at], sampling(at, 12), {})
                found = [[], []]
                while streams.left:
                    index, event = await streams.next()
                    found[index].append(event)
            return found

    every, few = run(events(0.0)), run(events(1e9))
    assert [len(one) for one in every] == [one.stats.rounds for one in wanted]
    assert min(map(len, every)) > 2
    assert [len(one) for one in few] == [2, 2]
    for given in (every, few):
        assert [one[-1].completion.token_ids for one in given] == [one.token_ids for one in wanted]
        assert all(event.completion is None for one in given for event in one[:-1])
    moments = iter(range(1000))
    monkeypatch.setattr("foretoken.engine.worker.monotonic", lambda: next(moments))  # a second a round
    assert [len(one) for one in run(events(4.0))] == [2 + (one.stats.rounds - 2) // 4 for one in wanted]


def test_events_are_taken_at_once_where_the_task_waits():
    """In order, none twice; the last one and those that are not taken go to the task."""
    engine = make(GatedEngine)
    engine.gated = False
    wanted = engine.generate([5], sampling(1)).token_ids
    engine.gated = True

    async def main():
        found, taken, woken = [], [], []

        def take(index, event):
            assert (index, event.completion) == (0, None)
            if not found:
                return False
            found.extend(piece.token_id for piece in event.pieces)
            taken.append(event)
            return True

        async def rounds():
            while True:
                await engine.at_the_gate()  # the task has seen what came before
                engine.let()

        async with AsyncEngine(engine) as served:
            with served.streams() as streams:
                streams.take_at_once(take)
                streams.submit([5], sampling(1), {})
                driving = asyncio.create_task(rounds())
                while streams.left:
                    _, event = await streams.next()
                    found.extend(piece.token_id for piece in event.pieces)
                    woken.append(event.completion is not None)
                driving.cancel()
            engine.open()
        return found, taken, woken

    found, taken, woken = run(main())
    assert found == wanted
    assert taken
    assert woken == [False, True]


def test_what_taking_events_raises_is_raised_in_the_task():
    """And ends its requests alone."""
    engine = make()

    async def main():
        async with AsyncEngine(engine) as served:
            other = asyncio.create_task(served.generate([5], sampling(2, 40)))
            with served.streams() as streams:
                streams.take_at_once(lambda index, event: 1 / 0)
                streams.submit([5], sampling(1, 60), {})
                with pytest.raises(ZeroDivisionError):
                    await streams.next()
            assert (await other).finish_reason == "length"
            assert (await served.generate([6], sampling(3))).finish_reason == "length"
            return served.occupancy().running

    assert run(main()) == 0


def test_requests_that_are_read_together_expire_behind_what_has_come():
    engine = make(GatedEngine)

    async def main():
        async with AsyncEngine(engine) as served:
            with served.streams() as streams:
                streams.submit([1], sampling(1, 100), {})
                engine.let()
                index, event = await streams.next()
                assert (index, len(event.pieces) > 0, event.completion) == (0, True, None)
                streams.expire(0.0)
                with pytest.raises(TimeoutError):
                    await streams.next()
            assert streams.left == 1
            engine.open()

    run(main())
    assert engine.requests[0].completion.finish_reason == "cancelled"


def test_settings_reach_submit():
    engine = make(GatedEngine)
    engine.gated = False

    async def main():
        async with AsyncEngine(engine) as served:
            plain = await served.generate([1, 2], sampling(1), num_speculative_tokens=0)
            streamed = [event async for event in served.stream([1, 2], sampling(1), num_speculative_tokens=0)]
            with pytest.raises(ParameterError, match="colour"):
                await served.generate([1, 2], colour="blue")
            return plain, streamed[-1].completion

    for completion in run(main()):
        assert completion.stats.drafted == 0
        assert completion.token_ids == engine.generate([1, 2], sampling(1)).token_ids


def test_two_event_loops_share_one_engine(engine_threads):
    engine = make(max_batch_size=4)
    wanted = {seed: engine.generate([seed], sampling(seed, 25)).token_ids for seed in range(1, 9)}
    served = AsyncEngine(engine)
    together = threading.Barrier(2)
    results = {}

    def loop(seeds):
        async def main():
            together.wait(LONGEST)
            return await asyncio.gather(*(served.generate([seed], sampling(seed, 25)) for seed in seeds))

        results.update(zip(seeds, run(main()), strict=True))

    threads = [threading.Thread(target=loop, args=(seeds,)) for seeds in ([1, 2, 3, 4], [5, 6, 7, 8])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    assert len(engine_threads()) == 1
    run(served.aclose())
    assert {seed: completion.token_ids for seed, completion in results.items()} == wanted


# --- cancelling ---------------------------------------------------------------------------------------------------


def test_cancelling_the_task_frees_the_row():
    engine = make(GatedEngine, k=0, max_batch_size=1)

    async def main():
        async with AsyncEngine(engine) as served:
            task = asyncio.create_task(served.generate([1], sampling(1, 100)))
            await engine.at_the_gate()
            engine.let()
            await engine.at_the_gate()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.open()
            return await served.generate([2], sampling(2))

    completion = run(main())
    assert completion.token_ids == engine.generate([2], sampling(2)).token_ids
    cancelled = engine.requests[0].completion
    assert cancelled.finish_reason == "cancelled"
    # Of the round that was at the gate, and the one before.
    assert cancelled.token_ids == engine.generate([1], sampling(1, 100)).token_ids[:2]
    assert not engine.busy


def test_a_request_that_waits_for_a_row_can_be_cancelled():
    engine = make(GatedEngine, max_batch_size=1)

    async def main():
        async with AsyncEngine(engine) as served:
            running = asyncio.create_task(served.generate([1], sampling(1)))
            await engine.at_the_gate()
            waiting = asyncio.create_task(served.generate([2], sampling(2)))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            engine.open()
            return await running

    assert run(main()).finish_reason == "length"
    assert engine.requests[1].completion.token_ids == []


@pytest.mark.parametrize("how", ["break", "aclosing", "timeout"])
def test_leaving_a_stream_cancels_its_request(how):
    engine = make(GatedEngine, k=0, max_batch_size=1)

    async def main():
        async with AsyncEngine(engine) as served:
            if how == "break":
                engine.let()
                async for _ in served.stream([1], sampling(1, 100)):
                    break
                await asyncio.sleep(0)  # asyncio closes generators that were left in a task of their own
            elif how == "aclosing":
                async with aclosing(served.stream([1], sampling(1, 100))) as stream:
                    engine.let()
                    await anext(stream)
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(served.stream([1], sampling(1, 100))), 0.01)
                engine.let()
            await asyncio.sleep(0)
            engine.open()
            return await served.generate([2], sampling(2))

    assert run(main()).token_ids == make().generate([2], sampling(2)).token_ids
    assert engine.requests[0].completion.finish_reason == "cancelled"
    assert len(engine.requests[0].completion.token_ids) <= 2


def test_a_loop_that_was_closed_is_forgotten():
    engine = make(GatedEngine, k=0)
    served = AsyncEngine(engine)
    loop = asyncio.new_event_loop()
    stream = served.stream([1], sampling(1, 100))
    engine.let()
    loop.run_until_complete(anext(stream))
    loop.close()
    engine.open()
    assert run(served.generate([2], sampling(2))).token_ids == make().generate([2], sampling(2)).token_ids
    run(served.aclose())
    assert engine.requests[0].completion.finish_reason == "cancelled"
    assert len(engine.requests[0].completion.token_ids) == 2


# --- errors -------------------------------------------------------------------------------------------------------


def test_a_bad_request_is_its_callers_alone():
    engine = make()

    async def main():
        async with AsyncEngine(engine) as served:
            good, *bad = await asyncio.gather(
                served.generate([1], sampling(1)),
                served.generate([99_999]),
                served.generate([[1], [2]]),
                served.generate([1], "hot"),
                anext(served.stream("text, without a tokenizer")),
                return_exceptions=True,
            )
            return good, bad

    good, bad = run(main())
    assert good.token_ids == engine.generate([1], sampling(1)).token_ids
    assert [type(error) for error in bad] == [PromptError, PromptError, ParameterError, PromptError]
    assert "99,999" in str(bad[0])


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_scores_that_cannot_be_used_are_one_requests_error(monkeypatch, how):
    target = load(tiny_llama(seed=1))
    engine = GatedEngine(target, None, "coupled", 0)
    forward = type(target).forward

    def broken(self, *arguments, **options):
        scores = forward(self, *arguments, **options)
        if scores.logits is not None and len(scores.logits) > 1:
            scores.logits[1:] = float("nan")
        return scores

    async def bad(served):
        if how == "generate":
            return await served.generate([3, 4], sampling(2))
        return [event async for event in served.stream([3, 4], sampling(2))]

    async def main():
        async with AsyncEngine(engine) as served:
            tasks = [asyncio.create_task(served.generate([1, 2], sampling(1)))]
            await engine.at_the_gate()
            tasks.append(asyncio.create_task(bad(served)))
            await asyncio.sleep(0)
            monkeypatch.setattr(type(target), "forward", broken)
            engine.open()
            return await asyncio.gather(*tasks, return_exceptions=True)

    good, failed = run(main())
    monkeypatch.undo()
    assert good.token_ids == engine.generate([1, 2], sampling(1)).token_ids
    assert isinstance(failed, NumericalError)


def test_no_memory_ends_those_that_run_and_not_those_that_wait(monkeypatch):
    target = load(tiny_llama(seed=1))
    engine = GatedEngine(target, None, "coupled", 0, max_batch_size=2)

    def full(*_, **__):
        raise MemoryError

    async def main():
        async with AsyncEngine(engine) as served:
            tasks = [asyncio.create_task(served.generate([seed], sampling(seed))) for seed in range(1, 4)]
            await engine.at_the_gate()
            engine.let()  # a round for those that were submitted before it began
            await engine.at_the_gate()  # by now all are, and two of them run in this one
            monkeypatch.setattr(type(target), "forward", full)
            engine.let()
            await engine.at_the_gate()
            monkeypatch.undo()
            engine.open()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return results, await served.generate([1], sampling(1))

    (*ran, waited), later = run(main())
    assert all(isinstance(error, OutOfMemory) for error in ran)
    assert waited.token_ids == engine.generate([3], sampling(3)).token_ids
    assert later.token_ids == engine.generate([1], sampling(1)).token_ids


def test_an_engine_that_cannot_go_on_ends_everybody(monkeypatch, engine_threads):
    engine = make()

    def broken():
        raise RuntimeError("no more")

    async def main():
        monkeypatch.setattr(engine, "step", broken)
        served = AsyncEngine(engine)
        first = await asyncio.gather(
            served.generate([1], sampling(1)), anext(served.stream([2], sampling(2))), return_exceptions=True
        )
        with pytest.raises(ForetokenError, match="no more"):
            await served.generate([1], sampling(1))
        await served.aclose()
        return first

    for error in run(main()):
        assert "no more" in str(error)
    assert not engine_threads()


def generated(served, number):
    return served.generate([number + 3], sampling(number, 3))


def failing(engine, monkeypatch, fails, tries=4, ask=generated):
    """What came of requests, one after the other, while passes raise what `fails(number of the request, tokens)` is."""
    forward, number = type(engine.target).forward, 0

    def guarded(self, tokens, *arguments, **options):
        if error := fails(number, tokens):
            raise error
        return forward(self, tokens, *arguments, **options)

    async def main():
        nonlocal number
        results = []
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.target), "forward", guarded)
            async with AsyncEngine(engine) as served:
                for number in range(tries):
                    results += await asyncio.gather(ask(served, number), return_exceptions=True)
                return results, served.failure

    return run(main())


def test_an_engine_whose_target_fails_again_and_again_is_ended(monkeypatch):
    """Else a server would answer with errors for ever, and be well."""
    lost = RuntimeError("no device")
    results, failure = failing(make(), monkeypatch, lambda *_: lost)
    assert failure is lost
    assert results[:3] == [lost] * 3
    assert "ended by an error" in str(results[3])


def test_requests_that_fail_by_themselves_do_not_end_an_engine(monkeypatch):
    """Else whoever finds one could end a server for all."""
    results, failure = failing(make(), monkeypatch, lambda _, tokens: IndexError() if tokens.any() else None, 10)
    assert [type(one) for one in results] == [IndexError] * 10
    assert failure is None


def test_failures_that_others_come_between_do_not_end_an_engine(monkeypatch):
    results, failure = failing(make(), monkeypatch, lambda number, _: IndexError() if number % 3 else None, 7)
    assert [isinstance(one, IndexError) for one in results] == [False, True, True] * 2 + [False]
    assert failure is None


def test_an_engine_that_never_has_enough_memory_goes_on(monkeypatch):
    results, failure = failing(make(), monkeypatch, lambda *_: MemoryError())
    assert [type(one) for one in results] == [OutOfMemory] * 4
    assert failure is None


@pytest.mark.parametrize("full", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory")])
def test_an_engine_whose_target_finds_no_memory_when_it_is_tried_goes_on(monkeypatch, full):
    results, failure = failing(make(), monkeypatch, lambda _, tokens: IndexError() if tokens.any() else full)
    assert [type(one) for one in results] == [IndexError] * 4
    assert failure is None


def test_a_target_is_tried_without_the_tensors_of_the_round_that_failed(monkeypatch):
    """Else a round that left no memory would have the target seem dead."""
    held, left = [], []

    def fails(_, tokens):
        if not tokens.any():
            left.append(held[-1]() is not None)
            return None
        states = torch.zeros(1)  # what this frame holds, which the error's stack has
        held.append(weakref.ref(states))
        raise IndexError

    _, failure = failing(make(), monkeypatch, fails, 3)
    assert failure is None
    assert left == [False]


def test_a_scoring_that_ran_out_of_memory_keeps_none(monkeypatch):
    """The error that its caller has would else hold what was computed, as long as it lives."""
    held = []

    def fails(*_):
        states = torch.zeros(1)
        held.append(weakref.ref(states))
        raise torch.OutOfMemoryError("no memory")

    results, failure = failing(make(), monkeypatch, fails, 1, ask=lambda served, number: served.score([3, 1]))
    assert isinstance(results[0], torch.OutOfMemoryError)
    assert held[0]() is None
    assert failure is None


needs_accelerator_errors = pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch 2.8 made it")


@needs_accelerator_errors
def test_an_engine_whose_device_is_lost_is_ended_at_once(monkeypatch):
    lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
    results, failure = failing(make(), monkeypatch, lambda *_: lost)
    assert failure is lost
    assert results[0] is lost
    assert "ended by an error" in str(results[1])


@needs_accelerator_errors
def test_an_engine_whose_device_refuses_single_calls_goes_on(monkeypatch):
    """Else a request that is sent again to other replicas would end them all."""
    refused = torch.AcceleratorError("CUDA error: invalid configuration argument")
    results, failure = failing(make(), monkeypatch, lambda _, tokens: refused if tokens.any() else None)
    assert results == [refused] * 4
    assert failure is None


@needs_accelerator_errors
@pytest.mark.parametrize("is_lost", [False, True])
def test_an_engine_whose_device_is_lost_in_a_scoring_is_ended(monkeypatch, is_lost):
    error = torch.AcceleratorError("CUDA error")

    def fails(_, tokens):
        return error if is_lost or tokens.any() else None

    results, failure = failing(make(), monkeypatch, fails, ask=lambda served, number: served.score([number + 3, 1]))
    assert results[0] is error
    assert failure is (error if is_lost else None)
    assert ["ended by an error" in str(one) for one in results] == [False, *[is_lost] * 3]


# --- the end ------------------------------------------------------------------------------------------------------


def test_closing_ends_requests_as_cancelled(engine_threads):
    engine = make(GatedEngine, k=0, max_batch_size=1)

    async def main():
        async with AsyncEngine(engine) as served:
            stream = served.stream([1], sampling(1, 100))
            engine.let()
            events = [await anext(stream)]
            waiting = asyncio.create_task(served.generate([2], sampling(2)))
            await engine.at_the_gate()
            await engine.at_the_gate()
            closing = asyncio.create_task(served.aclose())
            while not served._worker._closed:
                await asyncio.sleep(0)
            engine.open()
            await closing
            await served.aclose()  # once more does nothing
            return events + [event async for event in stream], await waiting

    events, waited = run(main())
    completion = events[-1].completion
    assert completion.finish_reason == waited.finish_reason == "cancelled"
    assert completion.token_ids == [piece.token_id for event in events for piece in event.pieces]
    assert len(completion.token_ids) == 2
    assert waited.token_ids == []
    assert not engine.busy
    assert not engine_threads()


def test_a_closed_engine_says_so(engine_threads):
    engine = make()

    async def main():
        served = AsyncEngine(engine)
        await served.generate([1], sampling(1))
        assert len(engine_threads()) == 1
        await served.aclose()
        assert not engine_threads()
        with pytest.raises(ForetokenError, match="closed"):
            await served.generate([1])
        with pytest.raises(ForetokenError, match="closed"):
            await anext(served.stream([1]))
        async with AsyncEngine(engine):
            pass  # never used: nothing to end
        async with AsyncEngine(engine) as again:
            return await again.generate([1], sampling(1))

    assert run(main()).token_ids == engine.generate([1], sampling(1)).token_ids


def test_it_ends_with_its_last_reference(engine_threads):
    served = AsyncEngine(make())
    run(served.generate([1], sampling(1)))
    (thread,) = engine_threads()
    del served
    gc.collect()
    assert not thread.is_alive()


def test_it_takes_an_engine():
    assert foretoken.AsyncEngine is AsyncEngine
    with pytest.raises(ParameterError, match="an Engine, not str"):
        AsyncEngine("some/model")


def test_the_snippets_of_its_page(capsys):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    snippets = [snippet for snippet in found if "Engine" in snippet]  # others are clients of a running server
    namespace = {"__name__": "snippets"}
    for snippet in snippets:
        exec(compile(snippet, "serving.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert len(snippets) == 2
    assert printed.rstrip().endswith("'cancelled']")


PROGRAM = """
import asyncio, os, sys
from foretoken import AsyncEngine, Engine, SamplingParams
from foretoken.models.tiny_pair import load_part

# Importing takes seconds: a copy of this process is the first interpreter that exits, and it is the second one itself.
child = os.fork() if {fork} else 0
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
length = 200 if child else 1
served = AsyncEngine(Engine(load_part("drafter", backend="torch", eager=True), None))
loop = asyncio.new_event_loop()
stream = served.stream([1], SamplingParams(max_new_tokens=length, ignore_eos=True))

async def read(stream):
    async for event in stream:
        if length > 1:
            break

loop.run_until_complete(read(stream))
print("busy" if length > 1 else "idle")
"""


def test_the_interpreter_exits():
    """While the engine's thread is idle, and while it is busy."""
    program = PROGRAM.format(fork=hasattr(os, "fork"))
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * LONGEST)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == ("idle\nbusy\n" if hasattr(os, "fork") else "idle\n")


def test_an_engine_has_one_that_is_open():
    engine = make()

    async def main():
        async with AsyncEngine(engine) as served:
            with pytest.raises(ParameterError, match="has an AsyncEngine already: close that one"):
                AsyncEngine(engine)
            first = await served.generate([5], sampling(1))
        async with AsyncEngine(engine) as again:
            second = await again.generate([5], sampling(1))
        return first.token_ids == second.token_ids

    assert run(main())


class Panic(BaseException):
    """As libraries in Rust raise, which no `except Exception` catches."""


def panics(*_, **__):
    raise Panic("index out of bounds")


@pytest.mark.parametrize("where", ["submit", "step"])
def test_a_panic_in_the_engines_thread_leaves_nobody_waiting(monkeypatch, where):
    engine = make()

    async def main():
        async with AsyncEngine(engine) as served:
            with monkeypatch.context() as patch:
                patch.setattr(engine, where, panics)
                with pytest.raises(ForetokenError, match=r"Panic.*index out of bounds"):
                    await asyncio.wait_for(served.generate([1, 2], sampling(1)), LONGEST)
            if where == "submit":  # of one request alone
                return (await served.generate([1, 2], sampling(1))).token_ids
            assert served.failure is not None
            with pytest.raises(ForetokenError, match="ended by an error"):
                await served.generate([1, 2], sampling(1))

    assert run(main()) in (None, make().generate([1, 2], sampling(1)).token_ids)


@pytest.mark.parametrize("where", ["scoring", "round"])
def test_a_panic_beside_a_prompt_that_is_scored_leaves_nobody_waiting(monkeypatch, where):
    """Who asked for the scores is told once it is known that the engine has failed."""
    engine = make()

    async def main():
        async with AsyncEngine(engine) as served:
            asked = [asyncio.create_task(served.generate([1, 2], sampling(1, 200)))] * (where == "round")
            await asyncio.sleep(0)
            monkeypatch.setattr(Scoring, "step", panics if where == "scoring" else lambda *_: False)
            if where == "round":
                monkeypatch.setattr(engine, "step", panics)
            with pytest.raises(ForetokenError, match="index out of bounds"):
                await asyncio.wait_for(served.score([1, 2, 3]), LONGEST)
            assert served.failure is not None
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LONGEST)

    for one in run(main()):
        assert isinstance(one, ForetokenError)


def test_an_engine_is_given_back_once():
    """Else two of them could have it: one that was closed before is closed again as it is forgotten."""
    engine = make()

    async def main():
        first = AsyncEngine(engine)
        await first.generate([1], sampling(1))
        await first.aclose()
        async with AsyncEngine(engine) as second:
            await first.aclose()
            del first
            gc.collect()
            with pytest.raises(ParameterError, match="has an AsyncEngine already"):
                AsyncEngine(engine)
            await second.generate([1], sampling(1))
        await AsyncEngine(engine).aclose()

    run(main())

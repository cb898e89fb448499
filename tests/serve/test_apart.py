"""An engine that is spoken to as one of another process: what comes of it is what comes of one in this process."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken import Grammar, SamplingParams
from foretoken.engine.outputs import Completion, DecodeStats, Piece, StreamEvent
from foretoken.errors import ForetokenError, GrammarError, QueueTimeout, RequestTooLarge, SlowConsumer
from foretoken.serve.apart.host import Host
from foretoken.serve.apart.process import EngineProcess
from foretoken.serve.apart.remote import DecodingApart
from foretoken.serve.apart.wire import (
    Channel,
    Frames,
    Kind,
    Told,
    events_frame,
    frame,
    read_event,
    sendable,
    write_event,
)
from foretoken.serve.decoding import DecodingHere, facts_of
from foretoken.serve.logs import name_error
from foretoken.serve.settings import ServeSettings
from serve_harness import LONGEST, MODEL, GatedEngine, hosted, numbers, process_runs, serving, tiny_engine, until

PROMPTS = ([116, 104, 101], [97] * 9, [104, 105], [116, 104, 101, 32, 99, 97, 116])


def allowed(**settings: Any) -> ServeSettings:
    return ServeSettings(model=MODEL, **settings)


def run(engine, work, **settings):
    """What `work` gives, called with an engine that is spoken to as another process's."""

    async def main():
        decoding = hosted(engine, allowed(**settings))
        await decoding.open()
        try:
            return await asyncio.wait_for(work(decoding), LONGEST)
        finally:
            await decoding.aclose()

    return asyncio.run(main())


async def one_by_one(decoding, prompts, params, **settings):
    """The same of requests that run after each other: which ones share a pass changes the last bits of scores."""
    told = {}
    for index, pair in enumerate(zip(prompts, params, strict=True)):
        told[index] = (await events_of(decoding, pair[:1], pair[1:], **settings))[0]
    return told


async def events_of(decoding, prompts, params, **settings):
    """The events of some requests that run together, by request."""
    told: dict[int, list[StreamEvent]] = {}
    with decoding.streams() as streams:
        for prompt, one in zip(prompts, params, strict=True):
            streams.submit(list(prompt), one, settings)
        while streams.left:
            index, event = await streams.next()
            if isinstance(event, Exception):
                raise event
            told.setdefault(index, []).append(copied(event))
    return told


def copied(event: StreamEvent) -> StreamEvent:
    """An event as it is now, and without times."""
    stats = replace(event.stats, seconds={}, drafted_by_position=list(event.stats.drafted_by_position))
    stats.accepted_by_position = list(event.stats.accepted_by_position)
    completion = event.completion and replace(event.completion, stats=stats)
    trace = event.trace and replace(event.trace, seconds={})
    return replace(event, stats=stats, completion=completion, trace=trace)


PARAMS = [
    SamplingParams(max_new_tokens=24, temperature=0.0),
    SamplingParams(max_new_tokens=24, seed=3, logprobs=2),
    SamplingParams(max_new_tokens=24, seed=4, stop=("zq",)),
    SamplingParams(max_new_tokens=1, seed=5),
]


@pytest.mark.parametrize("settings", [{}, {"trace": True}, {"prediction": [97] * 20}, {"num_speculative_tokens": 0}])
@pytest.mark.parametrize("k", [0, 3])
def test_events_are_those_of_an_engine_in_this_process(k, settings):
    async def here():
        decoding = DecodingHere(tiny_engine(k=k))
        try:
            return await one_by_one(decoding, PROMPTS, PARAMS, **settings)
        finally:
            await decoding.aclose()

    there = run(tiny_engine(k=k), lambda decoding: one_by_one(decoding, PROMPTS, PARAMS, **settings))
    expected = asyncio.run(here())
    assert {index: [one.pieces for one in events] for index, events in there.items()} == {
        index: [one.pieces for one in events] for index, events in expected.items()
    }
    # Statistics go on while events wait, in this process; those of the last one are final.
    for index, events in expected.items():
        assert there[index][-1] == events[-1]
        for ours, theirs in zip(there[index], events, strict=True):
            assert (ours.drafted, ours.trace, ours.logprobs) == (theirs.drafted, theirs.trace, theirs.logprobs)
        emitted = [event.stats.emitted for event in there[index]]
        assert emitted == sorted(emitted)
        assert emitted[-1] == len(events[-1].completion.token_ids)


def test_one_connection_serves_one_request_after_another():
    async def work(decoding):
        told = [await events_of(decoding, PROMPTS, PARAMS) for _ in range(3)]
        return [[one[at][-1].completion.token_ids for at in sorted(one)] for one in told]

    first, *more = run(tiny_engine(), work)
    assert more == [first, first]


@given(
    st.lists(
        st.tuples(st.integers(0, 2**31), st.text(st.characters(codec=None)), st.integers(0, 3), st.integers(0, 2)),
        min_size=1,
    ),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_events_survive_the_wire_in_any_pieces(rounds, cuts):
    names = ("accepted", "residual", "bonus", "target")
    stats, sent = DecodeStats(), []
    mine, theirs = Told(), Told()
    data = b""
    for token, text, origin, drafted in rounds:
        stats.record(range(1, drafted + 1), 0, 1)
        stats.add_seconds({"target": 0.5, "other": 0.25})
        event = StreamEvent((Piece(token, text, names[origin]),), stats)
        sent.append((event.pieces, copy.deepcopy(stats)))
        data += events_frame([write_event(7, mine, event, 1.5)])
    frames, at, read = Frames(), 0, []
    while at < len(data):
        size = cuts[at % len(cuts)]
        for kind, events in frames.feed(data[at : at + size]):
            assert kind is Kind.EVENTS
            for written in events:
                assert written[0] == 7
                event, begun_at = read_event(theirs, written)
                assert begun_at in (None, 1.5)
                read.append((event.pieces, copy.deepcopy(event.stats)))
        at += size
    assert read == sent


def test_rounds_without_drafts_go_as_numbers():
    told, stats = Told(), DecodeStats()
    lengths = []
    for _ in range(3):
        stats.record((), 0, 1)
        lengths.append(len(write_event(0, told, StreamEvent((Piece(5, "x", "target"),), stats), None)))
    assert lengths[0] == 2  # what does not change comes with the first one
    assert lengths[1:] == [10, 10]
    end = StreamEvent((), stats, completion=Completion([5], "x", "length", stats=stats))
    assert len(write_event(0, told, end, None)) == 2


def test_a_request_that_nobody_reads_on_ends():
    engine = tiny_engine()

    async def work(decoding):
        with decoding.streams() as streams:
            streams.submit([1, 2], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            await streams.next()
            assert streams.begun_at(0) is not None
        for _ in range(1000):
            await decoding.refresh()
            if decoding.occupancy().running == 0:
                return decoding._calls, decoding._index_of
            await asyncio.sleep(0.001)
        raise AssertionError

    assert run(engine, work) == ({}, {})
    assert not engine.busy


def test_who_is_too_far_behind_is_told_and_holds_up_nobody():
    async def work(decoding):
        # Of the other one's events the first and the last alone are sent: it can't be behind, however busy all is.
        with decoding.streams() as slow, decoding.streams(LONGEST) as other:
            slow.submit([1, 2], SamplingParams(max_new_tokens=200, ignore_eos=True, temperature=0.0), {})
            other.submit(
                [1, 2], SamplingParams(max_new_tokens=300, ignore_eos=True, temperature=0.0), {"stream": False}
            )
            while (await other.next())[1].completion is None:
                pass
            told = []
            while slow.left:
                told.append((await slow.next())[1])
            return told

    *events, error = run(tiny_engine(), work, max_backlog=3)
    assert [type(event) for event in events] == [StreamEvent] * 3
    assert isinstance(error, SlowConsumer)


def test_a_request_may_wait_for_so_long():
    engine = tiny_engine(GatedEngine, max_batch_size=1)

    async def work(decoding):
        with decoding.streams() as first, decoding.streams() as second:
            first.submit([1], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            engine.let(1)
            await first.next()
            second.submit([2], None, {})
            found = (await second.next())[1]
            engine.open()
            return found

    assert isinstance(run(engine, work, queue_seconds=0.05), QueueTimeout)


class _Failing(GatedEngine):
    error: Exception = ValueError("broken")

    def step(self) -> Any:
        if not self.gated:
            raise self.error
        return super().step()


class _Unsendable(Exception):
    def __init__(self) -> None:
        super().__init__("can't be sent")
        self.lock = threading.Lock()


class _Unreadable(Exception):
    def __init__(self, part: str, other: str) -> None:
        super().__init__(f"{part} {other}")


@pytest.mark.parametrize("error", [ValueError("broken"), _Unsendable(), _Unreadable("not", "read")])
def test_an_error_of_the_engine_ends_all_requests_and_is_known(error):
    engine = tiny_engine(_Failing)
    engine.error = error

    async def work(decoding):
        with decoding.streams() as streams:
            streams.submit([1], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            engine.open()
            while isinstance(found := (await streams.next())[1], StreamEvent):
                pass  # a round that had begun
            while decoding.failure is None:
                await asyncio.sleep(0.001)
            with pytest.raises(ForetokenError, match="start the server again"):
                streams.submit([1], None, {})
            with pytest.raises(ForetokenError, match="start the server again"):
                await decoding.score([1, 2])
            await decoding.refresh()  # what was known last stays
            return found, decoding.failure

    for found in run(engine, work):
        assert str(error) in str(found)


@pytest.mark.parametrize("error", [ValueError("broken"), _Unsendable(), _Unreadable("not", "read")])
def test_what_is_sent_of_an_error_has_its_name(error):
    """Else the log has it again for each request that it ended."""
    names = [name_error(pickle.loads(pickle.dumps(sendable(error)))) for _ in range(2)]
    assert names == [name_error(error)] * 2


def test_an_error_keeps_its_stack_and_ends_all_scorings():
    engine = tiny_engine(_Failing)

    async def work(decoding):
        with decoding.streams() as streams:
            streams.submit([1], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("foretoken.engine.prompt_scores._MOST_TOKENS", 1)
                scorings = [asyncio.create_task(decoding.score([1] * 100)) for _ in range(2)]
                await decoding.refresh()  # they have begun
                engine.open()
                found = await asyncio.gather(*scorings, return_exceptions=True)
            while streams.left:
                last = (await streams.next())[1]
            return [*found, last, decoding.failure]

    *found, failure = run(engine, work)
    assert [str(one) for one in found] == ["broken"] * 3
    assert len(failure.__notes__) == 1
    assert "in step" in failure.__notes__[0]


def test_nobody_waits_for_the_servers_process_to_read():
    here, there = socket.socketpair()
    channel = Channel(there)
    sent = [frame(Kind.REPLY, (number, "x" * 100_000)) for number in range(50)]
    for data in sent:  # far more than sockets hold
        channel.send(data)
    frames, read = Frames(), []
    while len(read) < len(sent):
        read += [value[0] for _, value in frames.feed(here.recv(1 << 16))]
    assert read == list(range(50))
    channel.send(frame(Kind.REPLY, (50, "")))
    assert next(frames.feed(here.recv(1 << 16)))[1] == (50, "")
    here.close()

    def send_on() -> None:
        for data in sent:
            channel.send(data)
            until(lambda: channel._sender is None)

    with pytest.raises(OSError):  # noqa: PT011  # any way in which the other side is gone
        send_on()
    channel.close()


def test_the_end_of_the_other_process_ends_all_requests():
    async def main():
        here, there = socket.socketpair()
        engine = tiny_engine(GatedEngine)
        host = Host(engine, Channel(there), None)
        thread = threading.Thread(target=host.run)
        thread.start()
        decoding = DecodingApart(here, facts_of(engine), join=thread.join)
        await decoding.open()
        may_answer = threading.Event()
        host._answers["compile"] = lambda _: may_answer.wait()
        with decoding.streams() as streams:
            streams.submit([1], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            asking = asyncio.create_task(asyncio.to_thread(decoding.compile, Grammar.regex("a")))
            await decoding.refresh()
            there.shutdown(socket.SHUT_RDWR)
            found = (await streams.next())[1]
            with pytest.raises(ForetokenError, match=r"process has ended|ended by an error"):
                await asking
        may_answer.set()
        engine.open()
        assert decoding.failure is found
        await decoding.aclose()
        return found, engine

    found, engine = asyncio.run(main())
    assert "process has ended" in str(found)
    assert not engine.busy


def test_an_engine_that_does_not_answer_is_left(monkeypatch):
    """Its process may hang, and be killed only when nobody waits for it any more."""
    monkeypatch.setattr("foretoken.serve.apart.remote._CLOSE_SECONDS", 0.05)
    monkeypatch.setattr("foretoken.serve.apart.remote._STATE_SECONDS", 0.05)

    async def main():
        here, there = socket.socketpair()
        joined = []
        decoding = DecodingApart(here, facts_of(tiny_engine()), join=lambda: joined.append(True))
        there.sendall(frame(Kind.REPLY, (0, ("running", 2.5, {}))))
        opening = asyncio.create_task(decoding.open())
        await opening
        asking = asyncio.create_task(asyncio.to_thread(decoding.compile, Grammar.regex("a")))
        with decoding.streams() as streams:
            streams.submit([1], None, {})
            await decoding.refresh()
            assert (decoding.occupancy(), decoding.speedup) == ("running", 2.5)
            await decoding.aclose()
            with pytest.raises(ForetokenError, match="closed"):
                await asking
            assert isinstance((await streams.next())[1], ForetokenError)
        there.close()
        return joined

    assert asyncio.run(main()) == [True]


def test_the_end_of_the_servers_process_ends_the_engines_requests():
    here, there = socket.socketpair()
    engine = tiny_engine(GatedEngine)
    thread = threading.Thread(target=Host(engine, Channel(there), None).run)
    thread.start()
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    here.sendall(frame(Kind.SUBMIT, (0, 0.0, [1], params, {"stream": True})))
    engine.let(2)
    assert here.recv(10)
    here.close()
    engine.open()
    thread.join(LONGEST)
    assert not thread.is_alive()
    assert not engine.busy


def test_questions_are_answered_or_refused():
    engine = tiny_engine(cache_memory="1MiB")

    async def work(decoding):
        loop = asyncio.get_running_loop()
        scores = await decoding.score([1, 2, 3], 1)
        with pytest.raises(RequestTooLarge, match="cache_memory"):
            await loop.run_in_executor(None, decoding.check, [1], SamplingParams(max_new_tokens=100_000))
        await loop.run_in_executor(None, decoding.check, [1], SamplingParams(max_new_tokens=2))
        await loop.run_in_executor(None, decoding.compile, Grammar.regex("[0-9]+"))
        with pytest.raises(GrammarError):
            await loop.run_in_executor(None, decoding.compile, Grammar.regex("("))
        waiting = asyncio.create_task(decoding.score([1] * 200))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return scores, decoding.policy_report(), decoding._link._asked

    engine.target.max_length = 1_000_000  # so that the limit is the memory's
    scores, report, asked = run(engine, work)
    assert [one.token_id for one in scores] == [2, 3]
    assert set(report) == set(DecodingHere(tiny_engine()).policy_report())
    assert asked == {}


def test_a_closed_one_refuses():
    async def main():
        decoding = hosted(tiny_engine(), allowed())
        await decoding.open()
        with decoding.streams() as streams:
            streams.submit([1], SamplingParams(max_new_tokens=400, ignore_eos=True), {})
            await decoding.aclose()
            while streams.left:
                last = (await streams.next())[1]
        await decoding.aclose()  # once more does nothing
        with pytest.raises(ForetokenError, match="closed"), decoding.streams() as streams:
            streams.submit([1], None, {})
        return last

    assert asyncio.run(main()).completion.finish_reason == "cancelled"


SEEDED = {"seed": 5, "max_tokens": 12}
ASKED = [
    ("/v1/completions", {"prompt": "the cat", **SEEDED}),
    ("/v1/completions", {"prompt": ["the", "cat"], "n": 2, "temperature": 0, "max_tokens": 5}),
    ("/v1/completions", {"prompt": "the cat", "stream": True, "logprobs": 2, **SEEDED}),
    ("/v1/completions", {"prompt": "the cat", "echo": True, "logprobs": 1, **SEEDED}),
    ("/v1/completions", {"prompt": "the cat", "prediction": {"type": "content", "content": "sat on"}, **SEEDED}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[0-9]{3}"}, **SEEDED}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}, **SEEDED}),
    ("/v1/completions", {"prompt": "x" * 600, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [300], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "speculation": {"drafter": "nobody"}}),
    ("/v1/completions", {"prompt": "x", "speculation": {"num_speculative_tokens": 0, "drafter": "none"}, **SEEDED}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **SEEDED}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True, **SEEDED}),
    ("/v1/foretoken/trace", {"prompt": "the cat", **SEEDED}),
    ("/tokenize", {"prompt": "the cat"}),
    ("/detokenize", {"tokens": [116, 104, 101]}),
]


def test_clients_are_answered_alike():
    changes = re.compile(r'"(id|created|time|seconds)": ?("[^"]*"|[\d.e+-]+|\{[^}]*\})')

    def told(apart: bool) -> list[Any]:
        with serving(tiny_engine(), apart=apart) as running:
            answers = [running.post(path, body) for path, body in ASKED]
            names = sorted(numbers(running))
            status = running.get("/v1/foretoken/status").json
            health = running.get("/health")
        return [*((one.status, changes.sub("", one.text)) for one in answers), names, sorted(status), health.status]

    for here, there in zip(told(False), told(True), strict=True):
        assert there == here


def _engine() -> Any:
    return tiny_engine()


def _refused() -> Any:
    raise ForetokenError("no such model")


def _broken() -> Any:
    raise SystemExit(3)


class _Tokenizer:
    """Holds what can't be sent."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.lock = inner, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def _with_a_tokenizer_of_its_own() -> Any:
    engine = tiny_engine()
    engine.target.tokenizer = _Tokenizer(engine.target.tokenizer)
    return engine


def test_a_process_makes_its_engine_and_decodes_with_it():
    async def main():
        process = EngineProcess(_engine, None)
        decoding = process.decoding(None)
        await decoding.open()
        told = await events_of(decoding, PROMPTS, PARAMS)
        await decoding.aclose()
        return told, process._process.exitcode

    told, exit_code = asyncio.run(main())
    assert exit_code == 0
    here = run(tiny_engine(), lambda decoding: events_of(decoding, PROMPTS, PARAMS))
    assert [told[at][-1].completion.token_ids for at in told] == [here[at][-1].completion.token_ids for at in told]


def test_a_process_that_makes_no_engine_says_why():
    process = EngineProcess(_refused, None)
    with pytest.raises(ForetokenError, match="no such model"):
        process.decoding(None)
    process.close()
    process = EngineProcess(_broken, None)
    with pytest.raises(ForetokenError, match="exit code 3"):
        process.decoding(None)
    process.close()


def test_an_engine_whose_tokenizer_cannot_be_sent_is_not_used_from_here():
    process = EngineProcess(_with_a_tokenizer_of_its_own, None)
    assert process.decoding(None) is None
    process.close()
    assert process._process.exitcode is not None


def _slow() -> Any:
    threading.Event().wait()


def test_a_process_that_still_loads_is_not_waited_for():
    process = EngineProcess(_slow, None)
    process.close()
    assert process._process.exitcode == -signal.SIGKILL


def _load_for_ever() -> None:
    process = EngineProcess(_slow, None)
    print(process._process.pid, flush=True)
    threading.Event().wait()


def test_a_process_that_loads_ends_with_the_one_that_started_it():
    code = "import serve.test_apart as test; test._load_for_ever()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        server.terminate()
        server.wait(LONGEST)
        until(lambda: not process_runs(pid))


def test_a_process_ends_when_nobody_is_there_any_more():
    process = EngineProcess(_engine, None)
    assert process.decoding(None) is not None
    process._connection.close()
    gc.collect()
    until(lambda: process._process.exitcode is not None)
    assert process._process.exitcode == 0

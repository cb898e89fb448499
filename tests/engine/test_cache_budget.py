"""The limit for the memory of caches: what caches take, and who has to wait."""

from __future__ import annotations

import importlib.util
from threading import Barrier, Thread
from time import monotonic

import pytest

from foretoken.engine.cache_budget import Budget, parse_bytes
from foretoken.engine.engine import Engine
from foretoken.engine.scheduler import Scheduler
from foretoken.errors import OutOfMemory, ParameterError, RequestTooLarge, show_bytes
from foretoken.models import load
from foretoken.models.feed import feed
from foretoken.models.native.rooms import RoomStore
from foretoken.sampling import SamplingParams
from models.native.checkpoints import longrope
from tiny import tiny_gpt2, tiny_llama, tiny_phi3, tiny_t5

OPENVINO = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("1", 1), ("2k", 2048), ("1.5 MiB", 3 << 19), ("4GiB", 4 << 30), ("3gb", 3 << 30), ("1TB", 1 << 40)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [0, -1, True, 1.5, None, "", "GiB", "-1G", "0", "4 apples", "nan"])
def test_no_sizes(text):
    with pytest.raises(ParameterError, match=r"cache_memory is .*'4GiB'"):
        parse_bytes(text)


def test_sizes_for_people():
    assert [show_bytes(size) for size in (5, 2048, 3 << 19, 7 << 30)] == ["5 bytes", "2 KiB", "1.5 MiB", "7 GiB"]


def taken(model, cache):
    """Bytes of the keys and values that are allocated."""
    if isinstance(getattr(cache, "store", None), RoomStore):
        return sum(room.bytes for room in cache.store._held)
    layers = getattr(getattr(cache, "slots", cache), "layers", None)
    if layers is None and hasattr(cache.store, "layers"):
        layers = cache.store.layers
    tensors = model.backend.pool.tensors if layers is None else [t for one in layers for t in (one.keys, one.values)]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "hf"},
        {"runner": "native", "backend": "torch"},
        pytest.param({"runner": "native", "backend": "openvino"}, marks=OPENVINO),
    ],
)
@pytest.mark.parametrize("lengths", [[5], [300, 20, 7], [10] * 40, [400] * 5])
def test_caches_take_what_they_are_said_to_take(options, lengths):
    model = load(tiny_llama(seed=1, max_position_embeddings=512), **options)
    cache = model.open(len(lengths))
    for start in range(0, max(lengths), 37):  # in steps, as they grow in use
        feed(model, cache, [[1] * max(0, min(37, length - start)) for length in lengths])
    said = model.cache_bytes(lengths)
    # Where rooms hold several rows, what is said leaves place for a chunk of a prompt behind every row.
    share = 8 if isinstance(getattr(cache, "store", None), RoomStore) and len(lengths) > 1 else 4
    assert said / share <= taken(model, cache) <= said
    # Most leave, one goes on, and others come.
    cache.select([0, *[-1] * 6])
    feed(model, cache, [[], *[[1] * 30] * 6])
    assert taken(model, cache) <= max(said, model.cache_bytes([lengths[0], *[30] * 6]))


@OPENVINO
def test_rows_that_begin_alike_never_take_more_blocks_than_they_have():
    model = load(tiny_llama(seed=1, max_position_embeddings=512), runner="native", backend="openvino")
    cache = model.open(8)
    feed(model, cache, [[1] * 400] * 8)
    before = taken(model, cache)
    cache.select([0] * 8, [300, 350, *[200] * 6])
    assert cache.lengths.tolist() == [300, 350, *[200] * 6]
    assert taken(model, cache) == before
    blocks = [block for table in cache.store.tables for block in table]
    assert len(set(blocks)) == len(blocks)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_t5])
def test_caches_of_other_models(make):
    model = load(make(seed=1))
    cache = model.open(2)
    if make is tiny_t5:
        for row in range(2):
            cache.encode(row, [1, 2, 3])
    feed(model, cache, [[1] * 20, [2] * 9])
    said = model.cache_bytes([20, 9])
    assert said / 16 <= taken(model, cache) <= said  # sources and what is made of them are counted, too


@pytest.mark.parametrize("lengths", [[300], [300, 20, 7], [20, 9]])
def test_caches_of_two_sets_of_frequencies(lengths):
    model = load(tiny_phi3(**longrope(original=40, head_dim=8, longest=512)), runner="hf")
    cache = model.open(len(lengths))
    for start in range(0, max(lengths), 37):
        feed(model, cache, [[1] * max(0, min(37, length - start)) for length in lengths])
    assert taken(model, cache.parts[0]) > 0
    assert (taken(model, cache.parts[1]) > 0) == (max(lengths) > 40)
    assert sum(taken(model, part) for part in cache.parts) <= model.cache_bytes(lengths)


def test_models_that_keep_nothing_need_nothing():
    from foretoken.models.recompute import RecomputeModel

    assert RecomputeModel(tiny_llama(seed=1)).cache_bytes([100]) == 0


def test_requests_wait_until_they_fit():
    target, drafter = (load(model) for model in (tiny_llama(seed=1), tiny_llama(seed=2)))
    params = [SamplingParams(seed=seed, max_new_tokens=20, ignore_eos=True) for seed in range(9)]
    free = Engine(target, drafter, "coupled", 3)
    wanted = [one.token_ids for one in free.generate([[5, 6, 7]] * 9, params)]
    limit = Budget(1, [target, drafter]).needs([23, 23])
    engine = Engine(target, drafter, "coupled", 3, cache_memory=limit)
    requests = [engine.submit([5, 6, 7], one) for one in params]
    most = 0
    while engine.busy:
        served = engine.step()
        most = max(most, len(served))
    assert most == 2
    assert [request.completion.token_ids for request in requests] == wanted
    assert [one.token_ids for one in engine.generate([[5, 6, 7]] * 9, params)] == wanted


def test_a_request_that_never_fits_is_refused_alone():
    target = load(tiny_llama(seed=1, max_position_embeddings=2048))
    engine = Engine(target, None, "token", cache_memory=target.cache_bytes([300]))
    small, large = (SamplingParams(max_new_tokens=size, ignore_eos=True) for size in (9, 1500))
    with pytest.raises(
        RequestTooLarge, match=r"1,502 tokens needs .*iB of KV cache, and cache_memory is .*lower max_new_tokens"
    ):
        engine.generate([1, 2], large)
    with pytest.raises(RequestTooLarge, match="1,502"):
        engine.submit([1, 2], large)
    with pytest.raises(RequestTooLarge, match="1,502"):
        engine.check([1, 2], large)
    engine.check([1, 2], small)
    bad, good = engine.generate([[1, 2], [1, 2]], [large, small])
    assert isinstance(bad.error, RequestTooLarge)
    assert len(good.token_ids) == 9


def test_one_limit_holds_for_streams_and_calls_together():
    target = load(tiny_llama(seed=1))
    params = SamplingParams(seed=1, max_new_tokens=20, ignore_eos=True)
    wanted = Engine(target, None).generate([5, 6, 7], params).token_ids
    limit = 2 * Budget(1, [target]).needs([23])
    engine = Engine(target, None, cache_memory=limit)
    streams = [engine.stream([5, 6, 7], params) for _ in range(3)]
    for stream in streams[:2]:
        next(stream)
    for refused in (lambda: next(streams[2]), lambda: engine.generate([5, 6, 7], params)):
        with pytest.raises(OutOfMemory, match=r"other requests of this engine hold .*finish or close the streams"):
            refused()
    assert list(streams[0])[-1].completion.token_ids == wanted
    # One stream is left: a batch has room for one row at a time beside it.
    requests = [engine.submit([5, 6, 7], params) for _ in range(2)]
    assert len(engine.step()) == 1
    while engine.busy:
        engine.step()
    assert [request.completion.token_ids for request in requests] == [wanted, wanted]
    streams[1].close()
    assert not engine._loops.budget.held()


@pytest.mark.grid
@pytest.mark.parametrize("begun", [False, True])
def test_calls_of_several_threads_wait_for_each_other(begun):
    """One share is left, beside a stream that nobody reads or alone: who has none waits, and is not refused."""
    target = load(tiny_llama(seed=1))
    params = [SamplingParams(seed=seed, max_new_tokens=20, ignore_eos=True) for seed in range(4)]
    wanted = [one.token_ids for one in Engine(target, None).generate([[5, 6, 7]] * 4, params)]
    engine = Engine(target, None, cache_memory=(1 + begun) * Budget(1, [target]).needs([23]))
    stream = engine.stream([5, 6, 7], params[0])
    if begun:
        next(stream)
    together = Barrier(4, timeout=60)

    found = {}

    def generate(number):
        together.wait()
        batches = [engine.generate([[5, 6, 7]] * 2, [params[number]] * 2) for _ in range(3)]
        found[number] = [[each.token_ids for each in batch] for batch in batches]

    threads = [Thread(target=generate, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found.get(number) for number in range(4)] == [[[tokens] * 2] * 3 for tokens in wanted]
    if begun:
        assert list(stream)[-1].completion.token_ids == wanted[0]
    assert not engine._loops.budget.held()


def until_waiting(budget, count, thread):
    """Until so many wait for memory, the last one in this thread."""
    end = monotonic() + 60
    with budget.changes:
        while len(budget.waiting) < count and thread.is_alive():
            assert monotonic() < end
            budget.changes.wait(0.01)


def test_who_waits_is_served_in_turn_and_hears_of_streams_that_are_dropped():
    """A small request does not overtake a large one that came before."""
    target = load(tiny_llama(seed=1, max_position_embeddings=512))
    engine = Engine(target, None, cache_memory=2 * Budget(1, [target]).needs([23]))
    budget, requests = engine._loops.budget, {}
    assert budget.needs([303]) == budget.limit

    def scheduler_of(length):
        scheduler = Scheduler(engine._loops.make(), 1, budget)
        params = SamplingParams(seed=1, max_new_tokens=length, ignore_eos=True)
        requests[length] = scheduler.submit(engine._loops.row(([5, 6, 7], params, None), engine.verifier))
        return scheduler

    call, stream = scheduler_of(20), scheduler_of(20)
    call.step()
    stream.step()
    call.runs = stream.runs = True  # as in calls of other threads that are under way
    large, small = scheduler_of(300), scheduler_of(20)
    threads = [Thread(target=one.run, daemon=True) for one in (large, small)]
    for count, thread in enumerate(threads, 1):
        thread.start()
        until_waiting(budget, count, thread)
    while call.busy:
        call.step()
    with budget.changes:
        assert budget.waiting == [large, small]
        assert budget.fits([23], small)
        assert small._fitting(budget, []) == 0  # though there is room
        stream = None  # it tells nobody
    for thread in threads:
        thread.join(60)
    assert requests[300].completion.finish_reason == requests[20].completion.finish_reason == "length"
    assert requests[300].begun_at < requests[20].begun_at
    assert not budget.waiting


def test_a_request_that_is_cancelled_waits_no_longer():
    target = load(tiny_llama(seed=1))
    one = SamplingParams(seed=1, max_new_tokens=20, ignore_eos=True)
    engine = Engine(target, None, cache_memory=Budget(1, [target]).needs([23]))
    holder = Scheduler(engine._loops.make(), 1, engine._loops.budget)
    holder.submit(engine._loops.row(([5, 6, 7], one, None), engine.verifier))
    holder.runs = True
    holder.step()
    request, served = engine.submit([5, 6, 7], one), []
    waiting = Thread(target=lambda: served.append(engine.step()), daemon=True)
    waiting.start()
    until_waiting(engine._loops.budget, 1, waiting)
    request.cancel()
    waiting.join(60)
    assert served == [[]]
    assert [one for one, _ in engine.step()] == [request]
    assert request.completion.finish_reason == "cancelled"


def test_another_drafter_changes_what_fits_and_what_is_known_of_costs():
    target, drafter = (load(model) for model in (tiny_llama(seed=1), tiny_llama(seed=2)))
    params = SamplingParams(seed=1, max_new_tokens=20, ignore_eos=True)
    engine = Engine(target, drafter, "coupled", "auto", cache_memory=Budget(1, [target, drafter]).needs([23, 23]))

    def most_at_once():
        requests = [engine.submit([5, 6, 7], params) for _ in range(5)]
        most = 0
        while engine.busy:
            most = max(most, len(engine.step()))
        return most, [request.completion.token_ids for request in requests]

    before, texts = most_at_once()
    learnt = engine.policy
    engine.drafter = "prompt-lookup"
    assert engine.policy is not learnt
    assert most_at_once() == (4, texts)
    assert before == 2
    engine.drafter = drafter
    assert most_at_once() == (2, texts)
    with pytest.raises(ParameterError, match="unknown drafter 'prompt-lokup'"):
        engine.drafter = "prompt-lokup"
    assert engine.drafter.models == (drafter,)
    with pytest.raises(ParameterError, match="num_speculative_tokens is 1000"):
        engine.num_speculative_tokens = 1000

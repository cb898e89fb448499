"""The backend of GPUs: buffers of few shapes, and passes that are captured over them.

On a CPU it computes the same, with nothing captured; ``make test-gpu`` runs these tests on a GPU.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Event

import pytest
import torch

import grid
import tiny
from distributions import g_test
from foretoken.drafters import Eagle3, Medusa
from foretoken.drafters.draft_model import DraftModel
from foretoken.drafters.early_exit import EarlyExit
from foretoken.engine.async_engine import AsyncEngine
from foretoken.engine.engine import Engine
from foretoken.limits import Limits, use_limits
from foretoken.models import load
from foretoken.models.chain import UNITS, Draws, probs_of
from foretoken.models.feed import feed
from foretoken.models.native import decoder
from foretoken.models.native.captured import Captures
from foretoken.models.native.drawing import best_tokens, draw_tokens
from foretoken.models.native.kernels import attention_kernels
from foretoken.models.native.rooms import LEAST_SLOTS, Rooms, RoomShape, RoomStore
from foretoken.sampling import SamplingParams
from models.native.checkpoints import MODELS, in_rooms, longrope, plain
from models.reference import walk
from tiny_heads import tiny_eagle3, tiny_medusa

EXACT = 1e-4


@cache
def walked(name, widths):
    return in_rooms(MODELS[name](), widths=widths)


@pytest.mark.parametrize("widths", [(1, 2, 3, 4, 6, 16), (2, 4)], ids=["captured", "partly"])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_passes(name, batch_size, widths):
    """Chains, trees, partial commits and rows that come and go; passes wider than those that are captured, too."""
    model = walked(name, widths)
    assert max(walk(model, batch_size, seed, rounds=8) for seed in range(3)) < EXACT


def scores(model, text, chunk):
    """`[n, V]`: logits after each token, fed in chunks."""
    cache, parts = model.open(1), []
    for start in range(0, len(text), chunk):
        tokens = torch.tensor([text[start : start + chunk]])
        steps = torch.arange(tokens.shape[1])[None]
        counts = torch.tensor([tokens.shape[1]])
        parts.append(model.forward(tokens, steps - 1, counts, cache).logits[0].float().cpu())
        cache.commit(steps, counts)
    return torch.cat(parts)


@pytest.mark.parametrize("chunk", [7, 64, 300])
def test_long_rows_outgrow_rooms(chunk):
    module = tiny.tiny_llama(max_position_embeddings=2048)
    model, text = in_rooms(module), [(7 * i) % 30 for i in range(1200)]
    for _ in range(2):  # the second time in rooms that are there
        assert torch.allclose(scores(model, text, chunk), plain(module, text), atol=EXACT)


@pytest.mark.parametrize("window", [4, 300])
def test_windows_of_long_rows(window):
    module = tiny.tiny_mistral(sliding_window=window, max_position_embeddings=2048)
    text = [(7 * i) % 30 for i in range(700)]
    assert torch.allclose(scores(in_rooms(module), text, 50), plain(module, text), atol=EXACT)


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_kernels_of_cudnns_are_left_out_and_nothing_else_is_changed(ready, used):
    """The process's switches can be set without a GPU, too."""
    cuda = torch.backends.cuda
    before, flash = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    cuda.enable_cudnn_sdp(used)
    cuda.enable_flash_sdp(False)
    try:
        with suppress(ZeroDivisionError), attention_kernels(torch.device("cuda"), ready=ready):
            assert cuda.cudnn_sdp_enabled() == (used and not ready)
            assert not cuda.flash_sdp_enabled()
            raise ZeroDivisionError
        assert cuda.cudnn_sdp_enabled() == used
        with attention_kernels(torch.device("cpu"), ready=True):
            assert cuda.cudnn_sdp_enabled() == used
    finally:
        cuda.enable_cudnn_sdp(before)
        cuda.enable_flash_sdp(flash)


def test_one_thread_at_a_time_says_which_kernels_are_used():
    device, inside, leave = torch.device("cuda"), Event(), Event()

    def keep():
        with attention_kernels(device, ready=True):
            inside.set()
            leave.wait(60)

    def look():
        with attention_kernels(device, ready=False):
            return torch.backends.cuda.cudnn_sdp_enabled()

    with ThreadPoolExecutor(2) as threads:
        kept = threads.submit(keep)
        inside.wait(60)
        found = threads.submit(look)
        with pytest.raises(TimeoutError):
            found.result(0.2)
        leave.set()
        kept.result()
        assert found.result() == torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("width", [1, 5])
def test_heads_that_share_keys_are_packed_with_the_same_result(width, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, width, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 20, 8, generator=generator)
    mask = torch.randn(2, 1, width, 20, generator=generator)
    packed = decoder.attend(query, key, value, mask)
    monkeypatch.setattr(decoder, "MOST_PACKED_ROWS", 0)
    assert torch.allclose(packed, decoder.attend(query, key, value, mask), atol=1e-6)


def test_a_text_that_becomes_long_is_read_anew_in_chunks():
    module = tiny.tiny_phi3(**longrope(original=40, head_dim=8))
    text = [(7 * i) % 29 + 1 for i in range(60)]
    with use_limits(Limits(prefill_tokens=8)):
        found = scores(in_rooms(module), text, chunk=7)
    for length in (1, 39, 40, 41, 42, 60):
        assert torch.allclose(found[length - 1], plain(module, text[:length])[-1], atol=EXACT)


@pytest.mark.parametrize("widths", [(4,), (2,)], ids=["captured", "at once"])
def test_hidden_states_stay_when_the_next_pass_has_run(widths):
    module = tiny.tiny_llama()
    model = in_rooms(module, widths=widths)
    counts = torch.tensor([4, 2])
    steps = torch.arange(4).expand(2, 4)
    found = []
    for tokens in (torch.tensor([[3, 5, 7, 11], [2, 4, 0, 0]]), torch.tensor([[8, 8, 1, 9], [6, 1, 0, 0]])):
        found.append((tokens, model.forward(tokens, steps - 1, counts, model.open(2), "all", (0, 2, 1))))
    for tokens, result in found:
        for row, count in enumerate(counts.tolist()):
            expected = module(tokens[row : row + 1, :count].to(module.device), output_hidden_states=True)
            for layer, states in zip((0, 2, 1), result.hidden, strict=True):
                assert torch.allclose(states[row, :count], expected.hidden_states[layer][0], atol=EXACT)
            assert torch.allclose(result.logits[row, count - 1], expected.logits[0, -1], atol=EXACT)


def test_nan_of_a_row_that_left_is_gone():
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.get_input_embeddings().weight[31] = float("nan")
    model = in_rooms(module)
    chain, two = torch.tensor([[-1, 0]]), torch.tensor([2])
    cache = model.open(1)
    for how in ("row", "batch"):
        assert model.forward(torch.tensor([[31, 31]]), chain, two, cache).logits.isnan().all()
        cache.commit(chain + 1, two)
        if how == "row":
            cache.select([-1])
        else:
            del cache
            gc.collect()
            cache = model.open(1)
        good = model.forward(torch.tensor([[3, 4]]), chain, two, cache).logits.cpu()
        assert torch.allclose(good[0, 1], plain(module, [3, 4])[-1], atol=EXACT)
        cache.select([-1])


@pytest.mark.parametrize("widths", [(1, 2, 4, 8), (1,)], ids=["captured", "at once"])
def test_nan_of_drafts_that_were_not_accepted_is_gone(widths):
    """Wide passes leave it behind what later, narrower ones write to; so do chains, and padding if it is token 0."""
    module = tiny.tiny_llama()
    with torch.no_grad():
        module.get_input_embeddings().weight[[0, 31]] = float("nan")
    model, text = in_rooms(module, widths=widths), [3, 4, 9]
    cache = model.open(2)
    feed(model, cache, [text, text[:2]])
    tokens, counts = torch.tensor([[5, 6, 31, 7, 8, 31], [31, 6, 0, 0, 0, 0]]), torch.tensor([6, 2])
    steps = torch.arange(6).expand(2, 6)
    for parents in (steps - 1, torch.where(steps > 2, 0, steps - 1)):
        logits = model.forward(tokens, parents, counts, cache).logits
        assert logits[0, 2].isnan().all()
        cache.commit(steps, torch.tensor([0, 0]))
        found = model.forward(torch.tensor([[7], [7]]), steps[:, :1] - 1, torch.tensor([1, 1]), cache).logits.cpu()
        cache.commit(steps, torch.tensor([0, 0]))
        assert torch.allclose(found[0, 0], plain(module, [3, 4, 9, 7])[-1], atol=EXACT)
        assert torch.allclose(found[1, 0], plain(module, [3, 4, 7])[-1], atol=EXACT)


def test_early_exits_share_rooms_and_what_is_captured_there():
    module = tiny.tiny_llama(num_hidden_layers=3)
    model = in_rooms(module)
    early = model.exit_after(1)
    cache = model.open(1)
    tokens, chain, three = torch.tensor([[3, 4, 5]]), torch.tensor([[-1, 0, 1]]), torch.tensor([3])
    found = early.forward(tokens, chain, three, cache).logits.cpu()
    hidden = module(tokens.to(module.device), output_hidden_states=True).hidden_states[1]
    expected = module.lm_head(module.model.norm(hidden)).cpu()
    assert torch.allclose(found, expected, atol=EXACT)
    cache.commit(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]))
    assert torch.allclose(
        model.forward(tokens, chain, three, cache).logits[0].cpu(), plain(module, [3, 4, 5]), atol=EXACT
    )


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["draft-model", "prompt-lookup", "recycling", None])
def test_engine_writes_the_same_as_over_transformers(drafter, temperature):
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9], [2, 7], [1, 8, 2, 8]]
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    outputs = []
    for make in (load, in_rooms):
        target, model = make(tiny.tiny_llama(seed=1)), make(tiny.tiny_qwen3(seed=2))
        engine = Engine(
            target, model if drafter == "draft-model" else drafter, num_speculative_tokens=6, max_batch_size=3
        )
        for _ in range(2):
            outputs.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("head", ["eagle3", "medusa", "early-exit", "trees"])
def test_drafters_that_read_the_target_draft_the_same_as_over_transformers(head, temperature):
    prompts, params = [[3, 1, 4, 1, 5], [9, 2, 6]], SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    outputs = []
    for make in (load, in_rooms):
        module = tiny.tiny_llama(seed=1)
        target = make(module)
        drafter = {
            "eagle3": lambda: Eagle3(tiny_eagle3(module), target, backend="torch"),
            "medusa": lambda: Medusa(tiny_medusa(module), target),
            "early-exit": lambda: EarlyExit(target, 1),
            "trees": lambda: DraftModel(make(tiny.tiny_qwen3(seed=2)), tree="static"),
        }[head]()
        engine = Engine(target, drafter, num_speculative_tokens=6, max_batch_size=2)
        outputs.append([completion.token_ids for completion in engine.generate(prompts, params)])
    assert outputs[0] == outputs[1]


def test_many_requests_at_once_get_what_each_gets_alone():
    """Rows that come and go, in a thread of the engine's own."""
    target, model = in_rooms(tiny.tiny_llama(seed=1)), in_rooms(tiny.tiny_qwen3(seed=2))
    prompts = [[(7 * i + j) % 29 + 1 for j in range(3 + 5 * i)] for i in range(9)]
    params = [SamplingParams(seed=i, max_new_tokens=10 + 3 * i) for i in range(9)]
    alone = Engine(target, model, num_speculative_tokens=3)
    expected = [alone.generate(*each).token_ids for each in zip(prompts, params, strict=True)]

    async def main():
        async with AsyncEngine(Engine(target, model, num_speculative_tokens=3, max_batch_size=4)) as served:
            return await asyncio.gather(*(served.generate(*each) for each in zip(prompts, params, strict=True)))

    assert [completion.token_ids for completion in asyncio.run(main())] == expected


@torch.inference_mode()
def test_rooms_follow_the_batch():
    """Twice as many rows or slots as before are another room; that of a batch that has shrunk is smaller again."""
    rooms = Rooms(RoomShape(1, 1, 2, torch.float32, tiny.DEVICE))
    store = RoomStore(rooms, 2)
    room = store.reserve([10, 3])
    assert (room.rows, room.slots) == (2, LEAST_SLOTS)
    room.states[:, 1, :, :10] = 7
    room = store.reserve([LEAST_SLOTS + 1, None])
    assert (room.rows, room.slots, room.used) == (2, 2 * LEAST_SLOTS, LEAST_SLOTS + 1)
    assert (room.states[:, 1, :, :10] == 7).all()
    store.select([1, -1, 1], [10, 0, 4], [2])
    room = store.reserve([None] * 3)
    assert (room.rows, room.slots) == (4, LEAST_SLOTS)
    assert room.states[0, :, 0, :10, 0].tolist() == [[7] * 10, [0] * 10, [7] * 4 + [0] * 6, [0] * 10]
    room = store.reserve([None, None, 8 * LEAST_SLOTS])
    store.select([2], [4])
    room = store.reserve([None])
    assert (room.rows, room.slots) == (1, LEAST_SLOTS)
    assert room.states[0, 0, 0, :10, 0].tolist() == [7] * 4 + [0] * 6


def test_the_largest_room_has_no_more_slots_than_the_longest_row_needs():
    shape = RoomShape(1, 1, 2, torch.float32, tiny.DEVICE, most=2 * LEAST_SLOTS + 1)
    assert [shape.slots(needed) for needed in (0, LEAST_SLOTS, LEAST_SLOTS + 1)] == [
        LEAST_SLOTS,
        LEAST_SLOTS,
        2 * LEAST_SLOTS,
    ]
    assert shape.slots(2 * LEAST_SLOTS + 1) == shape.slots(3 * LEAST_SLOTS) == 3 * LEAST_SLOTS
    assert shape.slots(3 * LEAST_SLOTS + 1) == 4 * LEAST_SLOTS


def test_rows_come_to_the_end_of_the_context():
    module = tiny.tiny_llama(max_position_embeddings=270)
    model, text = in_rooms(module), [(7 * i) % 29 + 1 for i in range(270)]
    assert torch.allclose(scores(model, text, 6), plain(module, text), atol=EXACT)
    for drafter in ("prompt-lookup", in_rooms(tiny.tiny_qwen3(seed=2, max_position_embeddings=270))):
        engine = Engine(model, drafter, num_speculative_tokens=7)
        output = engine.generate(text[:250], SamplingParams(temperature=0, max_new_tokens=100)).token_ids
        assert len(output) == 20
        assert output == plain(module, [*text[:250], *output]).argmax(-1).tolist()[249:-1]


@torch.inference_mode()
def test_rooms_are_used_again_and_not_all_kept():
    shape = RoomShape(1, 1, 2, torch.float32, tiny.DEVICE)
    rooms = Rooms(shape, kept_bytes=3 * shape.bytes(1, 256))
    stores = [RoomStore(rooms, 1) for _ in range(4)]
    made = [store.reserve([1]) for store in stores]
    for room in made:
        room.states[:], room.used = 1, 256
    del stores
    gc.collect()
    again = [rooms.take(1, 256) for _ in range(4)]
    assert len({id(room) for room in again} & {id(room) for room in made}) == 3
    assert all((room.states == 0).all() and room.used == 0 for room in again)
    rooms.give_back([rooms.take(8, 4096)])  # the latest one is kept, whatever its size
    assert rooms.take(8, 4096) is not rooms.take(8, 4096)


@pytest.fixture
def captures(monkeypatch):
    """The captures that are made."""
    made = []
    capture = Captures.capture

    def counted(*given):
        made.append(given)
        return capture(*given)

    monkeypatch.setattr(Captures, "capture", counted)
    return made


def test_a_model_and_its_rooms_are_freed_when_nothing_uses_them():
    model = in_rooms(tiny.tiny_llama())
    rooms = model.backend._rooms
    scores(model, [3, 1, 4], 1)
    model.chain([[3]], 2, model.open(1))
    gc.collect()
    gc.disable()
    try:
        backend, room = weakref.ref(model.backend), weakref.ref(rooms._free[0])
        rooms._free.clear()
        assert room() is None
        del model
        assert backend() is None
    finally:
        gc.enable()


def test_prompts_of_several_rows_are_one_pass_before_a_chain(monkeypatch):
    module = tiny.tiny_llama()
    model, rows = in_rooms(module), [[(7 * i + row) % 29 for i in range(20 + 9 * row)] for row in range(5)]
    widths = []
    states = type(model.backend)._states

    def watched(backend, cache, begins, feeds, width, hidden_layers):
        widths.append(width)
        return states(backend, cache, begins, feeds, width, hidden_layers)

    monkeypatch.setattr(type(model.backend), "_states", watched)
    for most in (512, 8):
        with use_limits(Limits(prefill_tokens=most)):
            chains = model.chain(rows, 3, model.open(5))
        for tokens, chain in zip(rows, chains.tokens, strict=True):
            expected = plain(module, [*tokens, *chain]).argmax(-1).tolist()
            assert chain == expected[len(tokens) - 1 : -1]
    assert widths == [64] * 7


def test_what_is_captured_is_used_by_later_batches(captures):
    model = in_rooms(tiny.tiny_llama())
    for _ in range(3):
        scores(model, [3, 1, 4, 1, 5, 9, 2, 6], 1)
        gc.collect()
    assert len(captures) == 1


@pytest.mark.grid
@pytest.mark.parametrize("drafter", ["auto", "draft-model", "recycling"])
def test_warm_up_captures_what_requests_need(drafter, captures):
    """Of one row: prompts of any length, chains and trees, drafts now and then, greedy and sampled."""
    sizes = {"max_position_embeddings": 512}
    target, model = in_rooms(tiny.tiny_llama(seed=1, **sizes)), in_rooms(tiny.tiny_qwen3(seed=2, **sizes))
    for one in (target, model):  # each alone, so that no room of the other's is in the way
        one.backend._rooms._kept_bytes = 2**30
    drafts = {"auto": ["auto", model], "draft-model": model}.get(drafter, drafter)
    engine = Engine(target, drafts, num_speculative_tokens="auto" if drafter == "auto" else 5)
    engine.warm_up()
    gc.collect()
    made = len(captures)
    assert made > 20
    for number, length in enumerate([3, 30, 70, 200, 5, 131]):
        prompt = [(7 * i + number) % 29 + 1 for i in range(length)]
        for temperature in (0.0, 1.0):
            engine.generate(prompt, SamplingParams(temperature=temperature, seed=number, max_new_tokens=100))
    assert len(captures) == made


def chains_of(model, rows, steps, draws=None):
    cache = model.open(len(rows))
    start = [[5, 9, 2]] * len(rows)
    feed(model, cache, start)
    return cache, [[*a, *b] for a, b in zip(start, rows, strict=True)], model.chain(rows, steps, cache, draws)


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 7, 12])
@pytest.mark.parametrize("rows", [[[3]], [[3, 1, 4]], [[3], [], [7, 1]], [[(7 * i) % 30 for i in range(150)], [4]]])
def test_a_chain_is_what_single_passes_choose(rows, steps):
    module = tiny.tiny_llama()
    model = in_rooms(module)
    cache, texts, chains = chains_of(model, rows, steps)
    for tokens, text, chain in zip(rows, texts, chains.tokens, strict=True):
        if not tokens:
            assert chain == []
            continue
        assert len(chain) == steps
        expected = plain(module, [*text, *chain]).argmax(-1).tolist()
        assert chain == expected[len(text) - 1 : -1]
    # A chain's tokens but for the last are tentative nodes now: the next one may follow them, or they are dropped.
    counts = torch.tensor([min(steps - 1, 2) if tokens else 0 for tokens in rows])
    cache.commit(torch.arange(2).expand(len(rows), 2), counts)
    texts = [[*text, *chain[:count]] for text, chain, count in zip(texts, chains.tokens, counts, strict=True)]
    logits = feed(model, cache, [[8] if tokens else [] for tokens in rows], keep="last").cpu()
    for row, (tokens, text) in enumerate(zip(rows, texts, strict=True)):
        if tokens:
            assert torch.allclose(logits[row], plain(module, [*text, 8])[-1], atol=EXACT)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_drawn_chain_has_the_distributions_that_it_was_drawn_from(steps):
    module = tiny.tiny_llama()
    model, rows = in_rooms(module), [[3], [], [7, 1], [6, 6, 6]]
    uniforms = torch.rand(4, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    warmth = torch.tensor([1.0, 0.0, 1.7, 0.4])
    _, texts, chains = chains_of(model, rows, steps, Draws(warmth, uniforms))
    probs = chains.probs.cpu()
    assert probs.shape == (4, steps, 32)
    for row, (tokens, text, chain) in enumerate(zip(rows, texts, chains.tokens, strict=True)):
        if not tokens:
            assert chain == []
            continue
        logits = plain(module, [*text, *chain])[len(text) - 1 : -1]
        assert torch.allclose(probs[row], (logits * warmth[row]).softmax(-1), atol=1e-5)
        units = probs[row].double() * UNITS
        assert torch.equal(units, units.floor())
        assert (units.sum(-1) == UNITS).all()
        below = units.cumsum(-1) <= (uniforms[row] * UNITS).floor()[:, None]
        assert chain == below.sum(-1).tolist()


def test_a_chain_ends_where_scores_are_no_numbers():
    module = tiny.tiny_llama()
    model = in_rooms(module)
    chains = chains_of(model, [[3]], 4)[2]
    with torch.no_grad():
        module.get_input_embeddings().weight[chains.tokens[0][1]] = float("nan")
    for draws in (None, Draws(torch.full((1,), 1e4), torch.full((1, 4), 0.5, dtype=torch.float64))):
        assert chains_of(in_rooms(module), [[3]], 4, draws)[2].tokens == [chains.tokens[0][:2]]


@pytest.mark.parametrize("size", [2, 33, 4096, 200_000])
def test_what_is_drawn_is_drawn_from_q(size):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(5, size, generator=generator) * 4
    logits[1, : size // 2] = -torch.inf
    logits[2] = 0.0
    logits[3, -1] = 100.0
    logits[4, 0] = torch.nan
    uniforms = (torch.rand(5, 1, dtype=torch.float64, generator=generator) * UNITS).floor()
    given = [logits, torch.ones(5, 1), uniforms]
    tokens, cumulative = (one.cpu() for one in draw_tokens(*(one.to(tiny.DEVICE) for one in given)))
    assert tokens[4] == size
    assert (cumulative[:, -1] == UNITS).all()
    assert (cumulative.diff(dim=-1) >= 0).all()
    q = probs_of(cumulative)
    assert (q.double().sum(-1) == 1).all()
    p = logits[:4].double().softmax(-1)
    assert (q[:4] - p).abs().sum(-1).max() < size * 2.0**-24 + 1e-6
    assert (q[1, : size // 2] == 0).all()
    chosen = q[torch.arange(4), tokens[:4]]
    assert (chosen > 0).all()
    assert torch.equal(tokens[:4], (cumulative[:4] <= uniforms[:4]).sum(-1))


def test_the_best_token_is_the_lowest_of_equal_ones():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, torch.nan, 5.0], [-torch.inf, -torch.inf, -1.0]])
    assert best_tokens(logits.to(tiny.DEVICE)).tolist() == [1, 0, 3, 2]


CASES = [
    ("none", "token", "plain"),
    ("draft-model", "token", "plain"),
    ("draft-model", "block", "temperature"),
    ("cascade", "coupled", "top_p"),
    ("recycling", "traversal", "penalties"),
    ("early-exit", "block", "plain"),
    ("lookup", "token", "top_k"),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_outputs_have_the_targets_distribution(case):
    """In a batch, with logits on the CPU; alone the same, with logits where the model is."""
    drafter, verifier, option = case
    module = grid.target("llama", drafter)
    target, model = in_rooms(module), in_rooms(grid.model("llama", 2))
    made = {"draft-model": lambda: model, "cascade": lambda: ["prompt-lookup", model], "none": lambda: None}
    drafts = made.get(drafter, lambda: drafter)()
    batch = Engine(target, drafts, verifier, 3, max_batch_size=grid.BATCH_SIZE)
    samples = grid.draw(batch, option, grid.QUICK_DRAWS, 9_000_011)
    assert g_test(samples, grid.distribution_of(module, option)) > grid.ERROR_LEVEL / len(CASES)
    alone = Engine(target, drafts, verifier, 3, limits=Limits(host_logits=1))
    assert grid.draw(alone, option, grid.QUICK_ALONE, 9_000_011) == samples[: grid.QUICK_ALONE]


def test_what_a_pass_is_assumed_to_take():
    """On a CPU in proportion to the weights; on a GPU layers take time, captured ones less, however few weights."""
    small, large = (in_rooms(tiny.tiny_llama(num_hidden_layers=layers)) for layers in (1, 4))
    for one in (small, large):
        one.device = torch.device("cpu")
    assert large.assumed_seconds / small.assumed_seconds == pytest.approx(large.weight_bytes / small.weight_bytes)
    one_by_one = load(tiny.tiny_llama(num_hidden_layers=4))
    for one in (small, large, one_by_one):
        one.device = torch.device("cuda")
    assert 1.5 < large.assumed_seconds / small.assumed_seconds < 3.0  # two of six layers' time is none of theirs
    assert one_by_one.assumed_seconds > 5 * large.assumed_seconds
    large.weight_bytes = 10**12
    assert large.assumed_seconds == pytest.approx(0.5, rel=0.01)

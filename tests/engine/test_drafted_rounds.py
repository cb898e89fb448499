"""Rounds of a row by itself that go together though they draft: they give what single rounds give."""

from __future__ import annotations

from itertools import count, product
from types import SimpleNamespace

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, Grammar, SamplingParams, load
from foretoken.drafters import Cascade, DraftModel, PromptLookup
from foretoken.engine import drafted, recording
from foretoken.errors import NumericalError, OutOfMemory
from foretoken.limits import Limits
from models.native.checkpoints import in_rooms
from tiny import tiny_llama

ONE, MANY = Limits(plain_passes=1), Limits()
PROMPTS = [[1, 2, 3, 1, 2], [7, 8], list(range(40, 90))]
PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_new_tokens": 5},
    "stopped": {"temperature": 0, "stop_token_ids": (97, 104, 111, 32)},
    "stopped late": {"temperature": 1.0, "stop_token_ids": tuple(range(120)), "min_new_tokens": 20},
}
WHOLE = ("greedy", "drawn", "stopped")
"""Kinds whose chains one call of the drafter drafts."""
STATS = ("rounds", "drafts", "drafted", "accepted", "emitted", "drafted_by_position", "accepted_by_position")


def module(noise=0.0, size=259, **fields):
    """A model with a vocabulary padded to a size; with noise, one that is often right about it."""
    made = tiny_llama(**{"vocab_size": 259, "seed": 1, "eos_token_id": 258, **fields})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            if noise and parameter.dim() > 1:
                scale = noise * float(parameter.std())
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * scale)
    with torch.random.fork_rng(devices=[]):
        made.resize_token_embeddings(size, mean_resizing=False)
    return made


def native(noise=0.0, **options):
    return load(module(noise, **options), tokenizer=byte_tokenizer(), runner="native", backend="openvino")


PAIRS = {
    "openvino": lambda: (native(), native(0.1)),
    "rooms": lambda: (in_rooms(module(), widths=(1, 3, 4, 8)), in_rooms(module(0.1), widths=(1, 3, 4, 8))),
    "padded": lambda: (native(size=264), native(0.1)),
}


@pytest.fixture(scope="module", params=PAIRS)
def any_pair(request):
    pytest.importorskip("openvino")
    return PAIRS[request.param]()


@pytest.fixture(scope="module")
def pair():
    pytest.importorskip("openvino")
    return PAIRS["openvino"]()


def same(found, expected):
    for name in ("token_ids", "text", "finish_reason", "stop_reason"):
        assert getattr(found, name) == getattr(expected, name)
    for name in STATS:
        assert getattr(found.stats, name) == getattr(expected.stats, name), name


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "k"), [*((kind, 3) for kind in PARAMS), *product(("greedy", "drawn"), (1, 9))])
def test_outputs_and_drafts_are_those_of_single_rounds(any_pair, together, kind, k):
    target, drafter = any_pair
    one, many = (Engine(target, drafter, num_speculative_tokens=k, limits=limits) for limits in (ONE, MANY))
    accepted = 0
    for seed in range(2):
        for prompt, length in zip(PROMPTS, (60, 23, 41), strict=True):
            params = SamplingParams(max_new_tokens=length, seed=seed, **PARAMS[kind])
            expected = one.generate(prompt, params)
            assert not together
            same(many.generate(prompt, params), expected)
            accepted += expected.stats.accepted
            # Elsewhere chains are drawn token by token.
            assert bool(together) == (kind in WHOLE and expected.stats.rounds > 1), (kind, expected.stats.rounds)
            together.clear()
    assert accepted


@pytest.mark.parametrize("verifier", ["token", "block", "coupled", "traversal", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_verifier_decides_as_in_single_rounds(pair, together, verifier, temperature):
    one, many = (Engine(*pair, verifier, num_speculative_tokens=4, limits=limits) for limits in (ONE, MANY))
    for prompt in PROMPTS:
        params = SamplingParams(max_new_tokens=50, seed=3, temperature=temperature, ignore_eos=True)
        same(many.generate(prompt, params), one.generate(prompt, params))
    # Noise that drafter and target share is drawn token by token.
    assert any(rounds > 1 for rounds in together) == (verifier != "coupled" or temperature == 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_tells_of_every_token_once_with_its_text_and_origin(pair, together, temperature):
    params = SamplingParams(temperature=temperature, max_new_tokens=60, seed=2, ignore_eos=True)
    told = []
    for limits in (ONE, MANY):
        engine = Engine(*pair, num_speculative_tokens=3, limits=limits)
        events = list(engine.stream(PROMPTS[0], params))
        pieces = [piece for event in events for piece in event.pieces]
        completion = events[-1].completion
        assert [piece.token_id for piece in pieces] == completion.token_ids
        assert "".join(piece.text for piece in pieces) == completion.text
        assert sum(completion.stats.seconds.values()) > 0
        assert completion.stats.seconds["target"] > 0
        assert completion.stats.seconds["drafter"] > 0
        assert completion.stats.seconds["verification"] > 0
        told.append((pieces, len(events), len(events[0].pieces)))
    (single, many_events, _), (joined, few_events, first) = told
    assert joined == single
    assert few_events < many_events
    assert first <= 4  # the first token is not waited for
    assert max(together) == MANY.plain_passes // 2


def test_where_nobody_is_told_more_rounds_go_together(pair, together):
    params = SamplingParams(temperature=0, max_new_tokens=150, ignore_eos=True)
    engine = Engine(*pair, num_speculative_tokens=2)
    engine.generate(PROMPTS[0], params)
    assert max(together) > MANY.plain_passes // 2


def test_any_number_of_rounds_goes_together(pair, together):
    params = SamplingParams(temperature=1.0, max_new_tokens=70, ignore_eos=True, seed=4)
    expected = Engine(*pair, num_speculative_tokens=3, limits=ONE).generate(PROMPTS[0], params)
    for most in (2, 3, 4, 7, 40):
        limits = Limits(plain_passes=most, untold_times=1)
        same(Engine(*pair, num_speculative_tokens=3, limits=limits).generate(PROMPTS[0], params), expected)
        assert max(together, default=0) <= max(most // 2, 1)
        assert bool(together) == (most >= 4)
        together.clear()


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_anywhere_in_a_draft_ends_the_row_there(pair, place, temperature):
    plain = SamplingParams(temperature=temperature, max_new_tokens=30, seed=5, ignore_eos=True)
    engine, one = (Engine(*pair, num_speculative_tokens=5, limits=limits) for limits in (MANY, ONE))
    tokens = one.generate(PROMPTS[0], plain).token_ids
    params = SamplingParams(
        temperature=temperature, max_new_tokens=30, seed=5, ignore_eos=True, stop_token_ids=(tokens[place],)
    )
    for _ in range(2):
        found = engine.generate(PROMPTS[0], params)
        same(found, one.generate(PROMPTS[0], params))
        assert found.token_ids == tokens[: tokens.index(tokens[place]) + 1]
        assert found.finish_reason == "stop"
    same(engine.generate(PROMPTS[0], plain), one.generate(PROMPTS[0], plain))


def test_a_later_turn_finds_all_tokens_of_the_last_one_cached(pair, together):
    engine = Engine(*pair, num_speculative_tokens=3)
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    prompt = PROMPTS[0] * 10
    output = engine.generate(prompt, params).token_ids
    assert together
    again = engine.generate(prompt + output + [5, 6], params)
    assert again.stats.cached == len(prompt) + len(output) - 1
    assert again.token_ids == Engine(pair[0], None, limits=ONE).generate(prompt + output + [5, 6], params).token_ids


def run(engine):
    while engine.busy:
        engine.step()


class Broken:
    """A model whose pass number `at`, counted from 0, goes wrong."""

    def __init__(self, model, name, at, how, monkeypatch):
        self.passes, work = 0, getattr(type(model), name)

        def watched(*arguments, **options):
            found = work(model, *arguments, **options)
            self.passes += 1
            return found if self.passes - 1 != at else how(found)

        monkeypatch.setattr(model, name, watched)


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("node", [0, 2])
@pytest.mark.parametrize(("entries", "value"), [(slice(None), "nan"), (slice(None), "-inf"), (100, "inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_no_use_end_the_row_with_the_tokens_before(pair, monkeypatch, at, node, entries, value, temperature):
    def spoil(scores):
        with torch.inference_mode():
            scores.logits[0, min(node, scores.logits.shape[1] - 1), entries] = float(value)
        return scores

    params = SamplingParams(temperature=temperature, max_new_tokens=40, ignore_eos=True, seed=1)
    expected = Engine(*pair, num_speculative_tokens=3, limits=ONE).generate(PROMPTS[0], params)
    found = []
    for limits in (ONE, MANY):
        engine = Engine(*pair, num_speculative_tokens=3, limits=limits)
        request = engine.submit(PROMPTS[0], params)
        events = engine.step()  # the prompt's
        with monkeypatch.context() as patch:
            Broken(pair[0], "forward", at, spoil, patch)
            while engine.busy:
                events += engine.step()
        completion = request.completion
        told = [piece.token_id for _, event in events for piece in event.pieces]
        assert told == completion.token_ids == expected.token_ids[: len(told)]
        error = None if completion.error is None else str(completion.error)
        assert error is None or isinstance(completion.error, NumericalError)
        found.append((told, error, completion.finish_reason, *(getattr(completion.stats, name) for name in STATS)))
        same(engine.generate(PROMPTS[0], params), expected)
    assert found[0] == found[1]


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("whose", ["target", "drafter"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_a_later_round_leaves_the_tokens_before_it_and_the_engine_goes_on(
    pair, monkeypatch, at, whose, error
):
    def fail(found):
        raise error

    target, drafter = pair
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    expected = Engine(target, None, limits=ONE).generate(PROMPTS[0], params).token_ids
    engine = Engine(target, drafter, num_speculative_tokens=3, max_batch_size=1)
    first, second = (engine.submit(prompt, params) for prompt in PROMPTS[:2])
    begun = len(engine.step()[0][1].pieces)
    with monkeypatch.context() as patch:
        broken = Broken(*((target, "forward") if whose == "target" else (drafter, "chain")), at, fail, patch)
        with pytest.raises(OutOfMemory if error is MemoryError else KeyboardInterrupt):
            run(engine)
    assert broken.passes == at + 1
    tokens = first.completion.token_ids
    assert begun + at <= len(tokens) < 40
    assert tokens == expected[: len(tokens)]
    run(engine)
    assert second.completion.token_ids == Engine(target, None, limits=ONE).generate(PROMPTS[1], params).token_ids
    assert engine.generate(PROMPTS[0], params).token_ids == expected


def test_chains_that_end_early_are_warned_of_and_verified(pair, monkeypatch, together):
    """Of a drafter whose scores are no numbers in one of three calls."""
    target, drafter = pair
    calls, chain = count(), type(drafter).chain

    def cut(*arguments):
        found = chain(drafter, *arguments)
        keep = next(calls) % 3
        return found if keep == 2 else type(found)([found.tokens[0][:keep]], found.probs)

    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    expected = Engine(target, None).generate(PROMPTS[0], params).token_ids
    monkeypatch.setattr(drafter, "chain", cut)
    engine = Engine(target, drafter, num_speculative_tokens=3)
    with pytest.warns(RuntimeWarning, match="NaN or infinity"):
        found = engine.generate(PROMPTS[0], params)
    assert together
    assert found.token_ids == expected
    assert found.stats.drafts < found.stats.rounds


@pytest.mark.grid
@pytest.mark.parametrize("longest", [30, 31, 45])
def test_a_drafter_drafts_no_further_than_it_can_read(pair, together, longest):
    target = pair[0]
    drafter = native(0.1, max_position_embeddings=longest)
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    one, many = (Engine(target, drafter, num_speculative_tokens=4, limits=limits) for limits in (ONE, MANY))
    for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[1]):
        same(many.generate(prompt, params), one.generate(prompt, params))
    assert together


def test_the_targets_length_ends_a_row(pair, together):
    drafter = pair[1]
    target = native(max_position_embeddings=50)
    params = SamplingParams(temperature=0, max_new_tokens=100, ignore_eos=True)
    one, many = (Engine(target, drafter, num_speculative_tokens=4, limits=limits) for limits in (ONE, MANY))
    found = many.generate(PROMPTS[0], params)
    same(found, one.generate(PROMPTS[0], params))
    assert len(PROMPTS[0]) + len(found.token_ids) == 50
    assert together


def counting(kind, name):
    """A class of a user's, with a method of its own."""

    def own(self, *arguments):
        self.asked = getattr(self, "asked", 0) + 1
        return getattr(kind, name)(self, *arguments)

    return type("Own", (kind,), {name: own})


@pytest.mark.parametrize("kind", [DraftModel, Cascade])
@pytest.mark.parametrize("name", ["propose", "observe", "observe_seconds"])
def test_a_drafter_with_a_method_of_its_own_is_asked_by_it(pair, together, kind, name):
    made = counting(kind, name)
    drafter = made(pair[1]) if kind is DraftModel else made([DraftModel(pair[1])])
    engine = Engine(pair[0], drafter, num_speculative_tokens=3 if kind is DraftModel else "auto")
    if kind is Cascade:
        drafter.measure([(1, 0.004), (33, 0.0042)], [[(1, 0.0005), (5, 0.001)]])
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    found = engine.generate(PROMPTS[0], params)
    assert not together
    assert found.stats.drafts > 5
    assert found.stats.drafts <= drafter.asked


def test_a_method_that_is_replaced_in_the_drafter_itself_is_called(pair, together, monkeypatch):
    drafter, asked = DraftModel(pair[1]), []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *arguments: asked.append(1) or propose(*arguments))
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    found = Engine(pair[0], drafter, num_speculative_tokens=3).generate(PROMPTS[0], params)
    assert not together
    assert found.stats.drafts <= len(asked)


@pytest.mark.parametrize(
    "options",
    [{"logprobs": 1}, {"stop": ("zq",)}, {"grammar": Grammar.regex("[a-z]{60}")}, {"presence_penalty": 0.5}],
)
def test_requests_that_want_more_than_tokens_take_single_rounds(pair, together, options):
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True, **options)
    engine = Engine(*pair, num_speculative_tokens=3)
    expected = Engine(pair[0], None).generate(PROMPTS[0], params)
    assert engine.generate(PROMPTS[0], params).token_ids == expected.token_ids
    assert not together


def test_a_trace_is_of_single_rounds(pair, together):
    params = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    events = list(Engine(*pair, num_speculative_tokens=3).stream(PROMPTS[0], params, trace=True))
    assert not together
    assert all(event.trace is not None for event in events)


def test_rows_of_a_batch_take_single_rounds_until_one_is_left(pair, together):
    engine = Engine(*pair, num_speculative_tokens=3)
    lengths = (12, 60)
    params = [SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True) for length in lengths]
    found = engine.generate(PROMPTS[:2], params)
    assert together
    for prompt, one, completion in zip(PROMPTS, params, found, strict=False):
        assert completion.token_ids == Engine(pair[0], None).generate(prompt, one).token_ids


def test_a_request_that_joins_or_is_cancelled_waits_for_these_rounds_alone(pair, together):
    params = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)
    engine = Engine(*pair, num_speculative_tokens=3)
    first = engine.submit(PROMPTS[0], params)
    engine.step()
    engine.step()
    assert together == [MANY.plain_passes // 2]
    second = engine.submit(PROMPTS[1], params)
    assert {request for request, _ in engine.step()} == {first, second}
    first.cancel()
    while engine.busy:
        engine.step()
    expected = [Engine(pair[0], None).generate(prompt, params).token_ids for prompt in PROMPTS[:2]]
    assert second.completion.token_ids == expected[1]
    tokens = first.completion.token_ids
    assert tokens == expected[0][: len(tokens)]


def test_a_request_that_is_cancelled_during_a_pass_ends_with_the_tokens_it_had(pair, monkeypatch):
    params = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)
    expected = Engine(pair[0], None).generate(PROMPTS[0], params).token_ids
    engine = Engine(*pair, num_speculative_tokens=3)
    request = engine.submit(PROMPTS[0], params)
    ((_, begun),) = engine.step()
    with monkeypatch.context() as patch:
        broken = Broken(pair[0], "forward", 2, lambda scores: request.cancel() or scores, patch)
        run(engine)
    assert broken.passes == 3
    assert request.completion.finish_reason == "cancelled"
    assert request.completion.token_ids == [piece.token_id for piece in begun.pieces]
    assert request.completion.stats.emitted == len(begun.pieces)
    assert engine.generate(PROMPTS[0], params).token_ids == expected


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_cancelled_request_gets_no_tokens_of_a_later_round_with_bad_scores(pair, monkeypatch, at):
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    expected = Engine(pair[0], None).generate(PROMPTS[0], params).token_ids
    engine = Engine(*pair, num_speculative_tokens=3)
    request = engine.submit(PROMPTS[0], params)
    told = [piece.token_id for _, event in engine.step() for piece in event.pieces]

    def spoil(scores):
        request.cancel()
        with torch.inference_mode():
            scores.logits[0, 1:] = float("nan")
        return scores

    with monkeypatch.context() as patch:
        Broken(pair[0], "forward", at, spoil, patch)
        while engine.busy:
            told += [piece.token_id for _, event in engine.step() for piece in event.pieces]
    tokens = request.completion.token_ids
    assert tokens == told == expected[: len(tokens)]


class Timed(Cascade):
    """Every call of its clock is half a millisecond after the one before."""

    def __init__(self, *drafters):
        ticks = count()
        super().__init__(drafters, clock=lambda: 0.0005 * next(ticks))


def timed(pair, *drafters, limits=MANY):
    engine = Engine(pair[0], Timed(*drafters, DraftModel(pair[1])), limits=limits)
    calls = [*[[] for _ in drafters], [(1, 0.0005), (5, 0.001)]]
    engine.drafter.measure([(1, 0.004), (33, 0.0042)], calls)
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_policy_hears_of_every_round(pair, together, temperature):
    engine, rounds = timed(pair), 0
    judged, judge = [], engine.policy.judge
    engine.policy.judge = lambda *arguments: judged.append(arguments[2]) or judge(*arguments)
    before = engine.policy.rounds
    drafted_tokens = requests = 0
    for _ in range(2):
        for prompt in PROMPTS:
            params = SamplingParams(temperature=temperature, max_new_tokens=90, ignore_eos=True)
            found = engine.generate(prompt, params)
            rounds += found.stats.rounds
            drafted_tokens += found.stats.drafted
            requests += 1
    steady = engine.drafter._steady
    if steady is not None:
        steady.tell()
    assert any(done > 1 for done in together)
    heard = engine.policy.rounds + engine.drafter._sleep._rested - before
    assert rounds - requests <= heard <= rounds  # the last token may have a round in which nothing can be drafted
    assert sum(judged) == drafted_tokens
    assert rounds - requests <= engine.drafter._saved._rounds <= rounds  # after which costs and rates are stored


def test_seconds_of_each_round_are_learnt_apart(pair, together, monkeypatch):
    told, ticks = [], count()
    monkeypatch.setattr(recording, "perf_counter", lambda: 0.1 * next(ticks))
    engine = timed(pair)
    learn = engine.policy.lessons.learn_together
    monkeypatch.setattr(
        engine.policy.lessons, "learn_together", lambda *arguments: told.append(arguments[1]) or learn(*arguments)
    )
    params = SamplingParams(temperature=0, max_new_tokens=120, ignore_eos=True)
    whole = sum(engine.generate(PROMPTS[0], params).stats.seconds.values())
    assert max(together) > 1
    rounds = [one for rounds in told for one in rounds]
    for one in rounds:
        assert 0.0 < one.call < 0.01
        assert 0.4 < one.seconds < 1.2  # each looks at the clock about as often
        assert one.positions > one.tokens
    assert sum(one.seconds + one.call for one in rounds) < whole


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_a_model_beside_copies_end_when_these_are_due(pair, together, monkeypatch, temperature):
    engine, asked = timed(pair, PromptLookup()), []
    propose = PromptLookup.propose
    monkeypatch.setattr(PromptLookup, "propose", lambda *arguments: asked.append(1) or propose(*arguments))
    before, rounds, requests = engine.policy.rounds, 0, 0
    for seed in range(6):
        params = SamplingParams(temperature=temperature, max_new_tokens=120, ignore_eos=True)
        found = engine.generate([seed, *range(100, 110), *range(100, 106)], params)
        rounds += found.stats.rounds
        requests += 1
        if temperature == 0.0:
            expected = Engine(pair[0], None).generate([seed, *range(100, 110), *range(100, 106)], params)
            assert found.token_ids == expected.token_ids
    steady = engine.drafter._steady
    if steady is not None:
        steady.tell()
    assert temperature == 0.0 or any(done > 1 for done in together)
    assert asked
    heard = engine.policy.rounds + engine.drafter._sleep._rested - before
    assert rounds - requests <= heard <= rounds


def rounds_of(pair, *, row=None, drafter=None, rows=1, limit=3, limits=MANY, told=True):
    """How many rounds of this kind may go together."""
    fields = {"ends_by_token": True, "logprobs": None, "trace": False, "stats": SimpleNamespace(emitted=1)}
    members = SimpleNamespace(rows=(SimpleNamespace(**fields | (row or {})),), num_slots=rows)
    asked = {"hidden_layers": (), "reads_cache": False, "in_row": lambda *_: "rounds"} | (drafter or {})
    found = drafted.rounds_in_row(pair[0], members, SimpleNamespace(**asked), None, limit, limits, told=told)
    return 1 if found is None else found.most


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        (8, {}),
        (32, {"told": False}),
        (1, {"limits": Limits(plain_passes=3)}),
        (2, {"limits": Limits(plain_passes=4)}),
        (6, {"limits": Limits(plain_passes=3), "told": False}),
        (1, {"limits": Limits(plain_passes=1), "told": False}),
        (1, {"limit": 0}),
        (1, {"rows": 2}),
        (1, {"row": {"ends_by_token": False}}),
        (1, {"row": {"logprobs": []}}),
        (1, {"row": {"trace": True}}),
        (1, {"row": {"stats": SimpleNamespace(emitted=0)}}),
        (1, {"drafter": {"hidden_layers": (1,)}}),
        (1, {"drafter": {"reads_cache": True}}),
        (1, {"drafter": {"in_row": lambda *_: None}}),
    ],
)
def test_when_rounds_go_together(pair, expected, options):
    assert rounds_of(pair, **options) == expected

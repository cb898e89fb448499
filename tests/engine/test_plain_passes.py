"""Plain rounds of several passes: what they give is what rounds of one pass give, and when there are any."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, Grammar, SamplingParams, load
from foretoken.draft import no_draft
from foretoken.drafters import Cascade, Drafter, DraftModel, Eagle3
from foretoken.engine import decode_loop, plain
from foretoken.engine.plain import passes_of
from foretoken.errors import NumericalError, OutOfMemory
from foretoken.limits import Limits
from foretoken.models.base import LanguageModel
from foretoken.models.widths import PassWidths
from foretoken.policy.rests import Rests
from models.native.checkpoints import in_rooms
from tiny import assume_cpus, tiny_llama
from tiny_heads import tiny_eagle3

ONE, EIGHT, MANY = Limits(plain_passes=1), Limits(plain_passes=8), Limits()
PROMPTS = [[1, 2, 3, 1, 2], [7, 8], [4, 4, 9, 1]]
PARAMS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "min_new_tokens": 5},
    "told": {"temperature": 0, "logprobs": 2},
    "told, drawn": {"temperature": 0.7, "logprobs": 1},
    "stopped": {"temperature": 0, "stop_token_ids": (97, 104, 111, 32)},
}


def module():
    return tiny_llama(vocab_size=259, seed=1, eos_token_id=258)


TARGETS = {
    "native": lambda: load(module(), tokenizer=byte_tokenizer(), runner="native"),
    "torch": lambda: load(module(), tokenizer=byte_tokenizer(), runner="native", backend="torch", eager=True),
    "rooms": lambda: in_rooms(module(), widths=(1, 3, 4)),
}


@pytest.fixture(scope="module", params=TARGETS)
def any_target(request):
    return TARGETS[request.param]()


@pytest.fixture(scope="module")
def target():
    return TARGETS["native"]()


@pytest.fixture(scope="module")
def draft_model():
    """One for all tests: the chains that it drafts with take longer to compile than a test to run."""
    return load(tiny_llama(vocab_size=259, seed=2, num_hidden_layers=1), runner="native")


def prompt_passes(model):
    """Passes of a short prompt's own: none where the first round's computes it, too."""
    assert model.prefills_with_decode == (model.backend_name == "openvino")
    return 0 if model.prefills_with_decode else 1


def watch(model, monkeypatch, break_at=None, how=None):
    """Count a model's passes; with the number `break_at`, counted from 0, something else happens."""
    passes, forward = [], type(model).forward

    def watched(*arguments, **options):
        passes.append(int(arguments[2].sum()))
        scores = forward(model, *arguments, **options)
        if len(passes) - 1 == break_at:
            how(scores)
        return scores

    monkeypatch.setattr(model, "forward", watched)
    return passes


@pytest.mark.grid
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_outputs_are_those_of_rounds_of_one_pass(any_target, kind, drafter):
    engines = [Engine(any_target, drafter, limits=limits) for limits in (ONE, MANY)]
    for seed in range(3):
        params = [SamplingParams(max_new_tokens=length, seed=seed, **PARAMS[kind]) for length in (23, 40, 9)]
        one, many = ([engine.generate(PROMPTS, params), engine.generate(PROMPTS[0], params[1])] for engine in engines)
        for a, b in zip([*one[0], one[1]], [*many[0], many[1]], strict=True):
            assert (a.token_ids, a.text, a.finish_reason, a.stop_reason) == (
                b.token_ids, b.text, b.finish_reason, b.stop_reason,
            )  # fmt: skip
            if a.logprobs is not None:
                assert [entry.token_id for entry in a.logprobs] == b.token_ids
                assert [entry.logprob for entry in a.logprobs] == pytest.approx(
                    [x.logprob for x in b.logprobs], abs=1e-4
                )


@pytest.mark.grid
@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("drafter", ["lookup", ["lookup", "model"], "model"])
def test_seeded_requests_draft_as_much_in_the_same_rounds(target, draft_model, drafter, monkeypatch):
    """What a request with a seed drafts depends on its own rounds, and not on how many of them go together."""
    # By the bytes that they have, no draft would pay.
    assume_cpus(monkeypatch)
    monkeypatch.setattr(target, "weight_bytes", 20_000_000)
    monkeypatch.setattr(draft_model, "weight_bytes", 1_000_000)
    names = drafter if isinstance(drafter, list) else [drafter]
    drafters = [draft_model if name == "model" else name for name in names]
    drafted = 0
    for seed in range(4):
        params = SamplingParams(max_new_tokens=120, seed=seed, ignore_eos=True)
        one, many = (Engine(target, drafters, limits=limits).generate(PROMPTS[0], params) for limits in (ONE, MANY))
        assert one.token_ids == many.token_ids
        for name in ("rounds", "drafts", "drafted", "accepted", "drafted_by_position"):
            assert getattr(one.stats, name) == getattr(many.stats, name)
        drafted += one.stats.drafted
    assert drafted


def test_a_round_takes_several_passes_and_tells_of_all_of_their_tokens(target, monkeypatch):
    passes = watch(target, monkeypatch)
    engine = Engine(target, None, limits=EIGHT)
    params = SamplingParams(temperature=0, max_new_tokens=21, ignore_eos=True)
    events = list(engine.stream(PROMPTS[0], params))
    sizes = [len(event.pieces) for event in events]
    assert sizes == [1, 8, 8, 4]  # the first round has the prompt in it
    completion = events[-1].completion
    assert [piece.token_id for event in events for piece in event.pieces] == completion.token_ids
    assert "".join(event.text for event in events) == completion.text
    assert {piece.origin for event in events for piece in event.pieces} == {"target"}
    assert completion.stats.rounds == completion.stats.emitted == 21
    assert len(passes) == 21 + prompt_passes(target)
    assert completion.stats.seconds["target"] > 0
    assert completion.stats.seconds["verification"] > 0


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("lookup", {"num_speculative_tokens": 0}),
        (["lookup", "prompt-lookup"], {"num_speculative_tokens": 0}),
        ("lookup", {"drafter": "none"}),
        (None, {}),
    ],
)
def test_requests_that_never_draft_take_several_passes_whatever_the_engine_drafts_with(target, drafter, options):
    engine = Engine(target, drafter, limits=EIGHT)
    request = engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=21, ignore_eos=True), **options)
    events = []
    while engine.busy:
        events += [len(event.pieces) for _, event in engine.step()]
    assert events == [1, 8, 8, 4]
    assert request.completion.stats.rounds == 21
    assert engine.policy.rounds == 0  # which has nothing to choose there


def test_a_drafter_that_follows_hidden_states_is_told_of_every_pass(target):
    drafter = Eagle3(tiny_eagle3(module()), target)
    for k, most in ((0, 1), (3, 4)):
        events = list(
            Engine(target, drafter, num_speculative_tokens=k).stream(
                PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
            )
        )
        assert max(len(event.pieces) for event in events) <= most


def test_a_first_token_is_told_at_once_though_the_prompt_is_cached(target):
    engine = Engine(target, None, limits=EIGHT)
    params = SamplingParams(temperature=0, max_new_tokens=14, ignore_eos=True)
    for _ in range(2):
        assert [len(event.pieces) for event in engine.stream(PROMPTS[0] * 10, params)] == [1, 8, 5]


def test_an_error_leaves_no_rest_behind_for_the_next_request(target, monkeypatch):
    def fail(scores):
        raise MemoryError

    engine = Engine(target, ["lookup", "prompt-lookup"])
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=200, seed=1, ignore_eos=True))
    while len(engine.step()[0][1].pieces) == 1:  # until it rests
        pass
    passes = watch(target, monkeypatch, 0, fail)
    with pytest.raises(OutOfMemory):
        engine.step()
    told = engine.policy.rounds
    engine.submit([5], SamplingParams(max_new_tokens=9, ignore_eos=True), num_speculative_tokens=0)
    while engine.busy:
        engine.step()
    assert len(passes) == 1 + 9
    assert engine.policy.rounds == told


@pytest.mark.parametrize(
    ("expected", "verifier", "options", "limits"),
    [
        (False, "token", {"temperature": 0.0}, {}),
        (False, "token", {"temperature": 0.7}, {}),
        (False, "block", {"temperature": 1.0}, {"verify_entries": 3 * 259}),
        (True, "block", {"temperature": 1.0}, {"verify_entries": 3 * 259 - 1}),
        (True, "coupled", {"temperature": 1.0}, {}),
        (True, "typical", {"temperature": 0.0}, {}),
        (True, "token", {"temperature": 1.0, "top_p": 0.9}, {}),
        (True, "token", {"temperature": 1.0, "presence_penalty": 0.1}, {}),
        (True, "token", {"temperature": 0.0, "presence_penalty": 0.1}, {}),
        (True, "token", {"temperature": 1.0, "logprobs": 0}, {}),
    ],
)
def test_a_verdict_is_taken_where_more_than_a_draw_is_wanted(target, monkeypatch, expected, verifier, options, limits):
    """Wherever it is not, tokens are the same."""
    asked, verdict = [], plain.verify_round
    monkeypatch.setattr(plain, "verify_round", lambda *arguments: asked.append(1) or verdict(*arguments))
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, **options)
    found, one = (
        Engine(target, None, verifier=verifier, limits=Limits(**limits, plain_passes=most)).generate(PROMPTS, params)
        for most in (8, 1)
    )
    assert bool(asked) == expected
    assert [each.token_ids for each in found] == [each.token_ids for each in one]


def test_a_round_ends_with_the_first_row_that_does(target, monkeypatch):
    passes = watch(target, monkeypatch)
    engine = Engine(target, None)
    lengths = (4, 13)
    params = [SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True) for length in lengths]
    done = engine.generate(PROMPTS[:2], params)
    assert [len(one.token_ids) for one in done] == list(lengths)
    assert passes[prompt_passes(target) :] == [2] * 4 + [1] * 9
    longer = engine.generate(PROMPTS[1], params[1])
    assert longer.token_ids == done[1].token_ids
    stop = longer.token_ids[5]
    passes.clear()
    stopped = engine.generate(PROMPTS[1], SamplingParams(temperature=0, max_new_tokens=40, stop_token_ids=(stop,)))
    assert stopped.token_ids == longer.token_ids[: longer.token_ids.index(stop) + 1]
    assert len(passes) - prompt_passes(target) == len(stopped.token_ids)


@pytest.mark.parametrize("at", range(2, 8))
@pytest.mark.parametrize(
    ("spoilt_entries", "value"),
    [(slice(None), "nan"), (slice(None), "-inf"), (100, "nan"), (100, "inf"), (0, "inf"), (258, "nan")],
)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.5, "top_k": 9}])
def test_scores_of_no_use_end_their_row_alone_with_the_tokens_before(
    target, monkeypatch, at, spoilt_entries, value, options
):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=1, **options)
    expected = [Engine(target, None, limits=ONE).generate(prompt, params).token_ids for prompt in PROMPTS[:2]]

    def spoil(scores):
        with torch.inference_mode():
            scores.logits[1, ..., spoilt_entries] = float(value)

    engine = Engine(target, None)
    requests = [engine.submit(prompt, params) for prompt in PROMPTS[:2]]
    events = engine.step()  # the prompts'
    passes = watch(target, monkeypatch, at, spoil)
    while engine.busy:
        events += engine.step()
    told = {request: [] for request in requests}
    for request, event in events:
        told[request] += [piece.token_id for piece in event.pieces]
    sound, spoilt = (request.completion for request in requests)
    assert isinstance(spoilt.error, NumericalError)
    assert spoilt.token_ids == expected[1][: 1 + at]
    assert told[requests[1]] == spoilt.token_ids
    assert sound.error is None
    assert sound.token_ids == told[requests[0]] == expected[0]
    assert len(passes) == 19
    assert engine.generate(PROMPTS[1], params).token_ids == expected[1]


def test_memory_that_runs_out_in_a_later_pass_ends_what_runs_and_nothing_else(target, monkeypatch):
    def fail(scores):
        raise MemoryError

    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    expected = Engine(target, None, limits=ONE).generate(PROMPTS[0], params).token_ids
    engine = Engine(target, None, max_batch_size=1)
    first, second = (engine.submit(prompt, params) for prompt in PROMPTS[:2])
    engine.step()
    watch(target, monkeypatch, 3, fail)
    with pytest.raises(OutOfMemory, match="lower max_batch_size"):
        engine.step()
    assert isinstance(first.completion.error, OutOfMemory)
    assert first.completion.token_ids == expected[:4]
    while engine.busy:
        engine.step()
    assert second.completion.token_ids == Engine(target, None).generate(PROMPTS[1], params).token_ids


def test_a_request_that_is_cancelled_or_joins_waits_for_one_round(target):
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    engine = Engine(target, None, limits=EIGHT)
    first = engine.submit(PROMPTS[0], params)
    engine.step()
    ((_, event),) = engine.step()
    assert len(event.pieces) == 8
    second = engine.submit(PROMPTS[1], params)
    assert {request for request, _ in engine.step()} == {first, second}
    first.cancel()
    while engine.busy:
        engine.step()
    assert len(first.completion.token_ids) < 60
    assert second.completion.token_ids == Engine(target, None, limits=ONE).generate(PROMPTS[1], params).token_ids


def test_a_later_turn_finds_all_tokens_of_the_last_one_cached(target):
    engine = Engine(target, None)
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    prompt = PROMPTS[0] * 10
    output = engine.generate(prompt, params).token_ids
    assert engine._loops._idle._prefixes.cache.lengths.tolist() == [len(prompt) + 60 - 1]
    longer = prompt + output + [5, 6]
    again = engine.generate(longer, params)
    assert again.token_ids == Engine(target, None, limits=ONE).generate(longer, params).token_ids


def test_a_grammar_forces_its_tokens_where_the_engine_drafts(target):
    grammar = Grammar.regex(r"answer: (yes|no)\.")
    params = SamplingParams(grammar=grammar, temperature=0)
    plain = Engine(target, None).generate("q", params)
    drafted = Engine(target, "lookup").generate("q", params)
    assert plain.text == drafted.text
    assert plain.stats.rounds == len(plain.token_ids)
    assert drafted.stats.rounds < len(drafted.token_ids)  # what is forced is drafted, whether or not drafters rest


def members(count=1, *, slots=None, k=0, left=50, emitted=3, **row):
    fields = {
        "trace": False,
        "matcher": None,
        "max_accepted": left - 1,
        "stats": SimpleNamespace(emitted=emitted),
        **row,
    }
    rows = [SimpleNamespace(**fields) for _ in range(count)]
    return SimpleNamespace(
        rows=rows, slots=range(count), num_slots=count if slots is None else slots, fixed_lengths=[k] * count
    )


def model(seconds=1e-4, share=None, commits_late=True):
    return SimpleNamespace(assumed_seconds=seconds, position_share=share, commits_late=commits_late)


@pytest.mark.parametrize(
    ("expected", "target", "of", "idle", "most"),
    [
        (8, model(), members(), 100, 8),
        (3, model(), members(), 3, 8),
        (5, model(), members(left=5), 100, 8),
        (1, model(), members(), 1, 8),
        (1, model(), members(), 100, 1),
        (1, model(commits_late=False), members(), 100, 8),
        (1, model(), members(2, slots=3), 100, 8),  # another row waits for the next part of its prompt
        (1, model(), members(trace=True), 100, 8),
        (1, model(), members(emitted=0), 100, 8),  # the first token is told at once
        (8, model(), members(matcher=object()), 100, 8),
        (1, model(), members(matcher=object(), k=None), 100, 8),
        (1, model(0.0), members(), 100, 8),  # what a pass takes is not known
        (4, model(1 / 250), members(), 100, 8),
        (1, model(1 / 50), members(), 100, 8),  # a large model
        (2, model(1 / 250, 0.1), members(10), 100, 8),
        (1, model(1 / 250, 1.0), members(10), 100, 8),
    ],
)
def test_how_many_passes_a_round_takes(expected, target, of, idle, most):
    assert passes_of(target, of, idle, Limits(plain_passes=most)) == expected


@pytest.mark.parametrize(
    ("expected", "target", "of", "idle", "limits"),
    [
        (32, model(), members(), 100, Limits(plain_passes=8)),
        (24, model(), members(), 100, Limits(plain_passes=8, untold_times=3)),
        (8, model(), members(), 100, Limits(plain_passes=8, untold_times=1)),
        (5, model(), members(left=5), 100, Limits()),
        (7, model(), members(), 7, Limits()),
        (1, model(), members(), 100, Limits(plain_passes=1)),
        (1, model(commits_late=False), members(), 100, Limits()),
        (1, model(1 / 50), members(), 100, Limits()),
        (1, model(), members(trace=True), 100, Limits()),
        (1, model(), members(2, slots=3), 100, Limits()),
    ],
)
def test_rounds_that_nobody_is_told_of_take_more_passes(expected, target, of, idle, limits):
    assert passes_of(target, of, idle, limits, told=False) == expected


def rounds_of(monkeypatch):
    """The passes of each round of several."""
    found, decode = [], decode_loop.decode_plainly

    def watched(taking, *arguments):
        decode(taking, *arguments)
        found.append(taking.done)

    monkeypatch.setattr(decode_loop, "decode_plainly", watched)
    return found


def test_generate_is_told_of_no_round_and_steps_and_streams_of_each(target, monkeypatch):
    found = rounds_of(monkeypatch)
    engine = Engine(target, None, limits=Limits(plain_passes=4, untold_times=3))
    params = SamplingParams(temperature=0, max_new_tokens=21, ignore_eos=True)
    whole = engine.generate(PROMPTS[0], params)
    assert found == [12, 8]  # the first round has the prompt in it
    found.clear()
    streamed = list(engine.stream(PROMPTS[0], params))
    assert found == [4] * 5
    found.clear()
    request = engine.submit(PROMPTS[0], params)
    while engine.busy:
        engine.step()
    assert found == [4] * 5
    assert whole.token_ids == streamed[-1].completion.token_ids == request.completion.token_ids


@pytest.fixture
def hopeless(target, draft_model, monkeypatch):
    """A draft model beside which, by the bytes that they have, no draft pays: requests rest after each decision."""
    assume_cpus(monkeypatch)
    monkeypatch.setattr(target, "weight_bytes", 20_000_000)
    monkeypatch.setattr(draft_model, "weight_bytes", 10_000_000)
    return draft_model


def test_a_round_that_is_decided_goes_on_with_those_that_rest_after_it(target, hopeless):
    params = SamplingParams(max_new_tokens=120, seed=4, ignore_eos=True)
    # Thrice, so that what follows is likely enough to be worth a round of its own.
    told = list(Engine(target, "prompt-lookup").stream(PROMPTS[0] * 3, params))
    assert told[0].stats.drafts == 1  # in the first round
    passes = [len(event.pieces) for event in told]
    first = next(at for at, count in enumerate(passes) if count > 1)
    assert first < 10
    assert 1 not in passes[first:]
    engine, one = Engine(target, hopeless), Engine(target, hopeless, limits=ONE)
    for history in range(3):  # what was learnt is the same, too
        params = SamplingParams(max_new_tokens=90, seed=history, ignore_eos=True)
        outputs = [each.generate(prompt, params) for each in (engine, one) for prompt in PROMPTS]
        assert [out.token_ids for out in outputs[:3]] == [out.token_ids for out in outputs[3:]]
        assert [out.stats.drafted for out in outputs[:3]] == [out.stats.drafted for out in outputs[3:]]
        assert [out.stats.rounds for out in outputs[:3]] == [out.stats.rounds for out in outputs[3:]]


def test_plain_passes_that_go_together_are_not_padded_to_the_prompt_s(monkeypatch):
    """The first round of a request has its prompt in it, the next one four passes."""
    fit, found = PassWidths.fit, []
    monkeypatch.setattr(PassWidths, "fit", lambda widths, tokens: found.append(fit(widths, tokens)) or found[-1])
    params = SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True)
    Engine(TARGETS["native"](), None).generate(list(range(1, 11)), params)
    assert found == [10, 1, 1, 1, 1]


def test_a_row_that_rests_behind_its_prompt_has_several_passes_at_once(hopeless, monkeypatch):
    """Though they are not as wide as the prompt's, which no graph for passes over one token makes cheap."""
    target = TARGETS["native"]()
    monkeypatch.setattr(target, "weight_bytes", 20_000_000)
    engine = Engine(target, hopeless)
    params = SamplingParams(max_new_tokens=60, temperature=1.0, ignore_eos=True)
    for _ in range(6):  # by then it is known that the model never pays
        engine.generate(PROMPTS[0], params)
    engine.policy.guards[1].spare = -100.0  # no look is due
    passes = [len(event.pieces) for event in engine.stream(list(range(1, 11)), params)]
    assert passes[0] == 1
    assert 1 not in passes[1:-1]


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_a_row_by_itself_whose_tokens_are_chosen_elsewhere_has_the_same(target, kind, monkeypatch):
    """On an accelerator tokens may be chosen there, one pass after another."""
    params = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True, **PARAMS[kind])
    expected = Engine(target, None, limits=MANY).generate(PROMPTS[0], params).token_ids
    made, found = plain.Taking.__init__, []

    def elsewhere(taking, *arguments):
        made(taking, *arguments)
        found.append(taking._choose_one)
        taking._choose_one = None

    monkeypatch.setattr(plain.Taking, "__init__", elsewhere)
    assert Engine(target, None, limits=MANY).generate(PROMPTS[0], params).token_ids == expected
    assert found
    assert None not in found


def test_verdicts_of_plain_passes_count_as_verification(target, monkeypatch):
    parts, verify = [], plain.verify_round
    clocks = []
    made = plain.Taking.__init__

    def watched(*arguments):
        parts.append(clocks[-1]._part)
        return verify(*arguments)

    monkeypatch.setattr(plain.Taking, "__init__", lambda own, *given: clocks.append(given[3]) or made(own, *given))
    monkeypatch.setattr(plain, "verify_round", watched)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, **PARAMS["told"])
    for prompts in (PROMPTS[:1], PROMPTS):
        Engine(target, None, limits=MANY).generate(prompts, params)
    assert set(parts) == {"verification"}


class Idle(Drafter):
    """Drafts nothing, and notes what it is told of the rounds in which it does not."""

    def __init__(self):
        self.told = []

    def propose(self, batch, limits):
        return no_draft(len(limits), batch.device)

    def idle_rounds(self):
        return 100

    def observe_idle(self, rounds, seconds):
        self.told.append((rounds, seconds))


@pytest.mark.parametrize("kind", ["greedy", "drawn", "told", "stopped"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "together"])
def test_a_drafter_is_told_what_passes_behind_others_take(target, monkeypatch, kind, prompts):
    times = itertools.accumulate(itertools.repeat(2.0))
    monkeypatch.setattr(plain, "perf_counter", lambda: next(times))
    drafter = Idle()
    engine = Engine(target, drafter, num_speculative_tokens=3, limits=EIGHT)
    engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True, **PARAMS[kind]))
    several = [(rounds, seconds) for rounds, seconds in drafter.told if rounds > 2]
    assert several
    assert all(seconds == pytest.approx(2.0 * rounds) for rounds, seconds in several)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["alone", "together"])
def test_the_first_pass_of_a_round_counts_as_often_as_plain_decoding_has_one(target, monkeypatch, prompts):
    """However few passes follow it: here rounds are short, as they are between drafts."""
    # Of each round: it begins, then its four tokens.
    times = itertools.accumulate(itertools.cycle([0.0, 10.0, 2.0, 2.0, 2.0]))
    monkeypatch.setattr(plain, "perf_counter", lambda: next(times))
    monkeypatch.setattr(Idle, "idle_rounds", lambda _: 4)
    drafter = Idle()
    engine = Engine(target, drafter, num_speculative_tokens=3, limits=EIGHT)
    engine.generate(prompts, SamplingParams(max_new_tokens=33, ignore_eos=True, temperature=0))
    found = [seconds for rounds, seconds in drafter.told if rounds == 4]
    assert len(found) > 3
    assert found == pytest.approx([4 * (2.0 + 8.0 / 8)] * len(found))


class Resting(Idle):
    """The same, asked after each round that it was asked in whether the next ones are plain."""

    may_rest = True

    def idle_rounds(self):
        return 1

    def rest(self, batch, limits):
        return 100


@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_a_drafter_is_told_what_passes_behind_a_round_that_it_was_asked_in_take(target, monkeypatch, kind):
    times = itertools.accumulate(itertools.repeat(2.0))
    monkeypatch.setattr(plain, "perf_counter", lambda: next(times))
    drafter = Resting()
    engine = Engine(target, drafter, num_speculative_tokens=3, limits=EIGHT)
    engine.generate(PROMPTS[0], SamplingParams(max_new_tokens=30, ignore_eos=True, **PARAMS[kind]))
    assert max(rounds for rounds, _ in drafter.told) > 2  # the first pass is the round's that it was asked in
    assert all(seconds == pytest.approx(2.0 * rounds) for rounds, seconds in drafter.told)


def test_a_row_that_can_not_take_its_tokens_is_not_given_them_twice(target, monkeypatch):
    calls, emit = [], plain.emit_plain

    def fails(row, tokens, **options):
        calls.append((row, list(tokens)))
        if len(calls) == 1:
            raise ValueError("no such token")
        emit(row, tokens, **options)

    monkeypatch.setattr(plain, "emit_plain", fails)
    engine = Engine(target, None, limits=MANY)
    with pytest.raises(ValueError, match="no such token"):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, stop=["none"]))
    assert calls
    assert len({id(row) for row, _ in calls}) == len(calls)


@pytest.mark.parametrize("joins", [False, True])
def test_rows_that_rest_have_several_passes_at_once_though_these_are_padded(target, monkeypatch, joins):
    """To the width of a pass before a row left, or of one with a prompt that joined: a round for each takes longer."""

    def for_long(rests, rows, *_, **__):
        for row in rows:
            row.request.rest(rests.now, rests.now + 1000)

    monkeypatch.setattr(Rests, "let", for_long)
    widths, fit = [], PassWidths.fit
    monkeypatch.setattr(
        PassWidths, "fit", lambda own, tokens: widths.append((tokens, fit(own, tokens))) or widths[-1][1]
    )
    engine = Engine(target, "lookup", limits=Limits(plain_passes=4))
    lengths, emitted = [12] + 3 * [60], []
    for length in lengths:
        engine.submit(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True))
    joined = False
    while engine.busy:
        events = engine.step()
        emitted.append([len(event.pieces) for _, event in events])
        if joins and not joined and len(events) == 3:
            joined = bool(
                engine.submit([5, 6, 7, 8], SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True))
            )
    left = next(at for at, each in enumerate(emitted) if len(each) == 3)  # rounds after one with four rows
    assert any(tokens == 3 and width > 3 for tokens, width in widths)
    rounds = emitted[left:-1]
    assert sum(1 in each for each in rounds) <= 2 * joins  # the prompt's round, and its request's first decision
    assert max(map(max, rounds)) == 4


def test_a_draft_model_is_not_called_in_rounds_in_which_it_drafts_nothing(target, hopeless, monkeypatch):
    propose, limits = DraftModel.propose, []

    def watched(drafter, batch, given):
        limits.append(list(given))
        return propose(drafter, batch, given)

    monkeypatch.setattr(DraftModel, "propose", watched)
    engine = Engine(target, ["lookup", hopeless])
    for seed in range(3):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, seed=seed, ignore_eos=True))
    assert limits
    assert all(map(any, limits))


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("options", [{"drafter": "lookup"}, {"prediction": [9, 9, 9, 1, 2]}])
@pytest.mark.parametrize("seed", range(4))
def test_a_fixed_length_is_drafted_in_every_round_though_the_policy_would_rest(target, hopeless, options, seed):
    params = SamplingParams(max_new_tokens=200, seed=seed, ignore_eos=True)
    found = []
    for limits in (ONE, MANY):
        engine = Engine(target, ["lookup", "prompt-lookup"], limits=limits)
        request = engine.submit(PROMPTS[0], params, num_speculative_tokens=4, **options)
        while engine.busy:
            engine.step()
        found.append((request.completion.token_ids, request.completion.stats.drafted_by_position))
    assert found[0] == found[1]


@pytest.mark.parametrize("passes", [2, 3, 4, 16])
@pytest.mark.parametrize("drafter", ["lookup", "prompt-lookup", "model", "both"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_policy_knows_of_every_round_once(target, hopeless, monkeypatch, passes, drafter, temperature):
    """Whichever went together: of those that were decided, and of those that rest after them, as long as they do."""
    rest, rests = Cascade.rest, []

    def watched(cascade, *arguments):
        found = rest(cascade, *arguments)
        if found:
            rests.append(found)
            assert cascade._round.is_rest
            assert cascade._sleep._rested == 0
            assert cascade._sleep.left(cascade.policy) == found
        return found

    monkeypatch.setattr(Cascade, "rest", watched)
    made = {"model": hopeless, "both": ["lookup", hopeless]}.get(drafter, drafter)
    engine = Engine(target, made, limits=Limits(plain_passes=passes))
    known, rounds = engine.policy.rounds, 0
    for requests, prompt in enumerate(PROMPTS, start=1):
        params = SamplingParams(max_new_tokens=150, ignore_eos=True, temperature=temperature)
        *_, last = engine.stream(prompt, params)
        cascade = engine._loops.cascade
        if cascade._steady is not None:
            cascade._steady.tell()
        rounds += last.completion.stats.rounds
        told = engine.policy.rounds + cascade._sleep._rested - known
        assert rounds - requests <= told <= rounds  # the last token may have a round in which nothing can be drafted
    assert rests


@pytest.mark.parametrize("at", [0, 1, 2, 6])
@pytest.mark.parametrize("drafter", ["lookup", "model"])
def test_scores_of_no_use_after_a_decision_end_the_row_and_the_next_request_goes_on(
    target, hopeless, monkeypatch, at, drafter
):
    def spoil(scores):
        with torch.inference_mode():
            scores.logits[0, ..., 100] = float("nan")

    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=1)
    made = hopeless if drafter == "model" else drafter
    engine, one = Engine(target, made), Engine(target, made, limits=ONE)
    expected = one.generate(PROMPTS[0], params).token_ids
    assert engine.generate(PROMPTS[0], params).token_ids == expected
    request = engine.submit(PROMPTS[0], params)
    engine.step()
    with monkeypatch.context() as patch:
        watch(target, patch, at, spoil)
        while engine.busy:
            engine.step()
    assert isinstance(request.completion.error, NumericalError)
    assert request.completion.token_ids == expected[: len(request.completion.token_ids)]
    assert engine.generate(PROMPTS[0], params).token_ids == expected


@pytest.mark.usefixtures("quick_calibration")
@pytest.mark.parametrize("place", range(1, 12))
def test_a_stop_in_any_pass_after_a_decision_ends_the_row_there(target, hopeless, place):
    plain = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=1)
    tokens = Engine(target, hopeless, limits=ONE).generate(PROMPTS[0], plain).token_ids
    params = SamplingParams(max_new_tokens=60, stop_token_ids=(tokens[place],), seed=1, ignore_eos=True)
    engine, one = Engine(target, hopeless), Engine(target, hopeless, limits=ONE)
    for _ in range(2):
        stopped, expected = engine.generate(PROMPTS[0], params), one.generate(PROMPTS[0], params)
        assert stopped.token_ids == expected.token_ids == tokens[: tokens.index(tokens[place]) + 1]
        assert stopped.stats.rounds == expected.stats.rounds
    assert engine.generate(PROMPTS[0], plain).token_ids == tokens


def test_requests_that_wait_join_when_a_row_ends_though_nobody_is_told(target, monkeypatch):
    found = rounds_of(monkeypatch)
    engine = Engine(target, None, max_batch_size=2)
    lengths = [5, 30, 12]
    params = [SamplingParams(temperature=0, max_new_tokens=length, ignore_eos=True) for length in lengths]
    together = engine.generate(PROMPTS, params)
    assert found[0] == 4  # with the first row's last token
    assert [one.token_ids for one in together] == [
        Engine(target, None, limits=ONE).generate(prompt, one).token_ids
        for prompt, one in zip(PROMPTS, params, strict=True)
    ]


@pytest.mark.parametrize("tell", ["stream", "generate"])
@pytest.mark.parametrize("how", ["stop string", "end token", "stop token", "length", "least length"])
def test_a_row_by_itself_has_no_pass_behind_its_end(target, monkeypatch, tell, how):
    first = Engine(target, None, limits=ONE).generate(
        PROMPTS[0], SamplingParams(temperature=1.0, seed=5, max_new_tokens=30, ignore_eos=True)
    )
    last = first.token_ids[11]
    options = {
        "stop string": {"stop": (target.tokenizer.decode([last]),)},
        "end token": {},
        "stop token": {"stop_token_ids": (last,)},
        "length": {"max_new_tokens": 13},
        "least length": {"stop_token_ids": (last,), "min_new_tokens": 20},
    }[how]
    if how == "end token":
        monkeypatch.setattr(target, "eos_token_ids", (last,))
    params = SamplingParams(temperature=1.0, seed=5, **{"max_new_tokens": 30, **options})
    expected = Engine(target, None, limits=ONE).generate(PROMPTS[0], params)
    passes = watch(target, monkeypatch)
    engine = Engine(target, None)
    if tell == "stream":
        found = list(engine.stream(PROMPTS[0], params))[-1].completion
    else:
        found = engine.generate(PROMPTS[0], params)
    assert (found.token_ids, found.text, found.finish_reason, found.stop_reason) == (
        expected.token_ids, expected.text, expected.finish_reason, expected.stop_reason,
    )  # fmt: skip
    assert len(passes) - prompt_passes(target) == found.stats.rounds == len(found.token_ids)


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize(
    ("entries", "value"), [(slice(None), "nan"), (slice(None), "-inf"), (100, "inf"), (258, "nan")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_scores_of_no_use_end_a_row_by_itself_with_the_tokens_before(
    target, monkeypatch, at, entries, value, temperature
):
    def spoil(scores):
        with torch.inference_mode():
            scores.logits[0, ..., entries] = float(value)

    params = SamplingParams(temperature=temperature, max_new_tokens=20, ignore_eos=True, seed=1)
    expected = Engine(target, None, limits=ONE).generate(PROMPTS[0], params).token_ids
    engine = Engine(target, None)
    request = engine.submit(PROMPTS[0], params)
    events = engine.step()  # the prompt's
    watch(target, monkeypatch, at, spoil)
    while engine.busy:
        events += engine.step()
    assert isinstance(request.completion.error, NumericalError)
    assert request.completion.token_ids == expected[: 1 + at]
    assert [piece.token_id for _, event in events for piece in event.pieces] == expected[: 1 + at]
    assert request.completion.stats.emitted == 1 + at
    assert engine.generate(PROMPTS[0], params).token_ids == expected


def test_models_that_say_nothing_take_one_pass_a_round():
    assert LanguageModel.commits_late is False
    assert not load(module(), runner="hf").commits_late
    engine = Engine(load(module(), tokenizer=byte_tokenizer(), runner="hf"), None)
    events = list(engine.stream(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)))
    assert [len(event.pieces) for event in events] == [1] * 9


def test_a_trace_is_of_rounds_of_one_pass(target):
    params = SamplingParams(temperature=0, max_new_tokens=9, ignore_eos=True)
    events = list(Engine(target, None).stream(PROMPTS[0], params, trace=True))
    assert [len(event.pieces) for event in events] == [1] * 9
    assert all(event.trace is not None for event in events)

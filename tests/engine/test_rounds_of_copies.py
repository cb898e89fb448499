"""Rounds of a row by itself in which copies are drafted go together, too: they give what single rounds give."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from engine.test_drafted_rounds import MANY, ONE, STATS, Broken, counting, run, same
from foretoken import Engine, SamplingParams, load
from foretoken.drafters import Cascade, Lookup, PromptLookup, Suffix
from foretoken.drafters.continuations import Continuations
from foretoken.engine import decode_loop, plain, prompts, recording
from foretoken.errors import NumericalError, OutOfMemory
from models.native.checkpoints import in_rooms
from tiny import tiny_llama

PROMPTS = [[1, 2, 3, 1, 2], [7, 8], list(range(40, 60)) * 3, [4, 4, 4], [*range(250), *range(20)]]
"""Of outputs that repeat themselves, some from the beginning on; the last is so long that it is read at once."""
LENGTHS = (60, 23, 41, 50, 44)


def module(size=259, **fields):
    """A model that repeats itself, at temperature 1, too: most of its next tokens follow from the last one."""
    made = tiny_llama(**{"vocab_size": size, "seed": 1, "eos_token_id": size - 1} | fields)
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(4.0)
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.1)
    return made


def native(*arguments, **options):
    made = module(*arguments, max_position_embeddings=512, **options)
    tokenizer = byte_tokenizer() if made.config.vocab_size == 259 else None
    return load(made, tokenizer=tokenizer, runner="native", backend="openvino")


def chains(drafter):
    """The drafter as one of chains."""
    if isinstance(drafter, Lookup):
        drafter.trees = False
    return drafter


MAKERS = {
    "lookup": lambda: chains(Lookup()),
    "lookup of all requests": lambda: chains(Lookup(global_tokens=500)),
    "prompt lookup": PromptLookup,
    "suffix": Suffix,
    "suffix of all requests": lambda: Suffix(global_tokens=500),
}
TARGETS = {
    "openvino": native,
    "few tokens": lambda: native(6),
    "rooms": lambda: in_rooms(module(), widths=(1, 3, 4, 8)),
}


@pytest.fixture(scope="module")
def target():
    pytest.importorskip("openvino")
    return native()


@pytest.fixture
def learnt(monkeypatch):
    """What lookups learnt, in order: tokens that were read or judged by, and likely ones after a token."""
    found = []

    def watch(name, work):
        def watched(known, tokens):
            tokens = list(tokens)
            result = work(known, tokens)
            if tokens:
                found.append((name, tokens, result))
            return result

        monkeypatch.setattr(Continuations, name, watched)

    for name in ("read", "extend"):
        watch(name, getattr(Continuations, name))
    scored = Continuations.scored
    monkeypatch.setattr(Continuations, "scored", lambda *arguments: found.append(arguments[1:]) or scored(*arguments))
    return found


def taken(found):
    """The list's entries, which are removed."""
    entries, found[:] = list(found), []
    return entries


def known_by(drafter):
    """The measured rates of a lookup; nothing for other drafters."""
    return [drafter._engine[greedy]._levels for greedy in (False, True)] if isinstance(drafter, Lookup) else None


def pair_of(make, target, k, verifier="auto"):
    """Engines of single rounds, and of rounds that go together."""
    return [Engine(target, make(), verifier, num_speculative_tokens=k, limits=limits) for limits in (ONE, MANY)]


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("temperature", "k"), [(0.0, 1), (0.0, 6), (1.0, 5)])
def test_histories_are_those_of_single_rounds(name, make, temperature, k, together, learnt):
    pytest.importorskip("openvino")
    target, accepted, empty = TARGETS[name](), 0, 0
    one, many = pair_of(MAKERS[make], target, k, "block")
    for seed in range(2):
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
            prompt = [token % (target.vocab_size - 1) for token in prompt]
            if len(prompt) + length > target.max_length:
                continue
            params = SamplingParams(max_new_tokens=length, seed=seed, temperature=temperature)
            expected = one.generate(prompt, params)
            assert not together
            lessons = taken(learnt)
            assert bool(lessons) == make.startswith("lookup")
            same(many.generate(prompt, params), expected)
            assert taken(learnt) == lessons
            assert known_by(many.drafter) == known_by(one.drafter)
            if expected.stats.rounds > 3:
                assert any(done > 1 for done in taken(together))
            together.clear()
            accepted += expected.stats.accepted
            empty += expected.stats.rounds - expected.stats.drafts
    assert accepted > 50
    assert empty


@pytest.mark.parametrize("verifier", ["token", "block", "coupled", "traversal", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", ["lookup", "prompt lookup"])
def test_every_verifier_decides_as_in_single_rounds(target, together, learnt, verifier, temperature, make):
    one, many = pair_of(MAKERS[make], target, 4, verifier)
    for prompt in PROMPTS:
        params = SamplingParams(max_new_tokens=50, seed=3, temperature=temperature, ignore_eos=True)
        expected = one.generate(prompt, params)
        lessons = taken(learnt)
        same(many.generate(prompt, params), expected)
        assert taken(learnt) == lessons
    assert max(together) > MANY.plain_passes // 2


@pytest.mark.parametrize("make", ["lookup", "suffix"])
def test_drafts_that_may_branch_take_single_rounds(target, together, make):
    made = MAKERS[make]()
    if make == "lookup":
        made.trees = True
    engine = Engine(target, made, "traversal", num_speculative_tokens=6)
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    expected = Engine(target, None).generate(PROMPTS[0], params).token_ids
    assert engine.generate(PROMPTS[0], params).token_ids == expected
    assert not together


@pytest.mark.parametrize("place", range(1, 12))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_anywhere_ends_the_row_there(target, together, learnt, place, temperature):
    options = {"temperature": temperature, "max_new_tokens": 30, "seed": 5, "ignore_eos": True}
    one, many = pair_of(MAKERS["lookup"], target, 5)
    tokens = one.generate(PROMPTS[3], SamplingParams(**options)).token_ids
    taken(learnt)
    many.generate(PROMPTS[3], SamplingParams(**options))
    taken(learnt)
    for params in (SamplingParams(stop_token_ids=(tokens[place],), **options), SamplingParams(**options)):
        expected = one.generate(PROMPTS[3], params)
        lessons = taken(learnt)
        found = many.generate(PROMPTS[3], params)
        same(found, expected)
        assert taken(learnt) == lessons
        if params.stop_token_ids:
            assert found.token_ids == tokens[: tokens.index(tokens[place]) + 1]
            assert found.finish_reason == "stop"
    assert together


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("node", [0, 2])
@pytest.mark.parametrize(("entries", "value"), [(slice(None), "nan"), (slice(None), "-inf"), (100, "inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_of_no_use_end_the_row_with_the_tokens_before(
    target, monkeypatch, learnt, together, at, node, entries, value, temperature
):
    def spoil(scores):
        with torch.inference_mode():
            scores.logits[0, min(node, scores.logits.shape[1] - 1), entries] = float(value)
        return scores

    params = SamplingParams(temperature=temperature, max_new_tokens=40, ignore_eos=True, seed=1)
    expected = pair_of(MAKERS["lookup"], target, 3)[0].generate(PROMPTS[3], params)
    found = []
    for engine in pair_of(MAKERS["lookup"], target, 3):
        taken(learnt)
        request = engine.submit(PROMPTS[3], params)
        events = engine.step()  # the prompt's
        with monkeypatch.context() as patch:
            Broken(target, "forward", at, spoil, patch)
            while engine.busy:
                events += engine.step()
        completion = request.completion
        told = [piece.token_id for _, event in events for piece in event.pieces]
        assert told == completion.token_ids == expected.token_ids[: len(told)]
        error = None if completion.error is None else str(completion.error)
        assert error is None or isinstance(completion.error, NumericalError)
        found.append((told, error, completion.finish_reason, *(getattr(completion.stats, name) for name in STATS)))
        same(engine.generate(PROMPTS[3], params), expected)
        found[-1] += (taken(learnt),)
    assert together
    assert found[0] == found[1]


@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("whose", ["target", "drafter"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_in_a_later_round_leaves_the_tokens_before_it_and_the_engine_goes_on(
    target, monkeypatch, together, at, whose, error
):
    def fail(found):
        raise error

    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    expected = [Engine(target, None, limits=ONE).generate(prompt, params).token_ids for prompt in PROMPTS[2:4]]
    drafter = MAKERS["lookup"]()
    engine = Engine(target, drafter, num_speculative_tokens=3, max_batch_size=1)
    first, second = (engine.submit(prompt, params) for prompt in PROMPTS[2:4])
    begun = len(engine.step()[0][1].pieces)
    with monkeypatch.context() as patch:
        broken = Broken(*((target, "forward") if whose == "target" else (drafter, "_draft")), at, fail, patch)
        with pytest.raises(OutOfMemory if error is MemoryError else KeyboardInterrupt):
            run(engine)
    assert broken.passes == at + 1
    assert together == [at]
    tokens = first.completion.token_ids
    assert begun + at <= len(tokens) < 40
    assert tokens == expected[0][: len(tokens)]
    run(engine)
    assert second.completion.token_ids == expected[1]
    assert engine.generate(PROMPTS[2], params).token_ids == expected[0]


@pytest.mark.parametrize("at", [0, 2])
def test_a_request_that_is_cancelled_during_a_pass_ends_with_the_tokens_it_had(target, monkeypatch, together, at):
    params = SamplingParams(temperature=0, max_new_tokens=90, ignore_eos=True)
    expected = Engine(target, None).generate(PROMPTS[3], params).token_ids
    engine = pair_of(MAKERS["lookup"], target, 3)[1]
    request = engine.submit(PROMPTS[3], params)
    ((_, begun),) = engine.step()
    with monkeypatch.context() as patch:
        broken = Broken(target, "forward", at, lambda scores: request.cancel() or scores, patch)
        run(engine)
    assert broken.passes == at + 1
    assert together == [at + 1]
    assert request.completion.finish_reason == "cancelled"
    assert request.completion.token_ids == [piece.token_id for piece in begun.pieces]
    assert request.completion.stats.emitted == len(begun.pieces)
    assert engine.generate(PROMPTS[3], params).token_ids == expected


@pytest.mark.parametrize("kind", [Lookup, PromptLookup, Suffix])
@pytest.mark.parametrize("name", ["propose", "observe", "observe_seconds"])
@pytest.mark.parametrize("k", [3, "auto"])
def test_a_drafter_with_a_method_of_its_own_is_asked_by_it(target, together, kind, name, k):
    drafter = chains(counting(kind, name)())
    engine = Engine(target, drafter, "block", num_speculative_tokens=k)
    params = SamplingParams(temperature=0, max_new_tokens=60, ignore_eos=True)
    found = engine.generate(PROMPTS[2], params)
    assert not together
    assert found.stats.drafts > 3
    assert k == "auto" or found.stats.drafts <= drafter.asked


@pytest.mark.parametrize("make", MAKERS)
def test_a_method_that_is_replaced_in_the_drafter_itself_is_called(target, together, monkeypatch, make):
    drafter, asked = MAKERS[make](), []
    propose = drafter.propose
    monkeypatch.setattr(drafter, "propose", lambda *arguments: asked.append(1) or propose(*arguments))
    params = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True)
    found = Engine(target, drafter, "block", num_speculative_tokens=3).generate(PROMPTS[2], params)
    assert not together
    assert 0 < found.stats.drafts <= len(asked)


class Clock:
    """Time that passes with the target's passes, with each of their tokens, and whenever it is looked at.

    Args:
        target: whose passes take time from now on.
        patch: what patches it, and the engine's clocks.
        position: seconds of a further token of a pass.
        look: seconds of a look.
        plain_pass: seconds of a pass that goes together with other plain ones.
    """

    def __init__(self, target, patch, position, look, plain_pass):
        self.now, self.look, forward, decode_row = 0.0, look, target.forward, target.decode_row

        def passes(tokens, *arguments, **options):
            self.now += 0.004 + position * (tokens.shape[1] - 1)
            return forward(tokens, *arguments, **options)

        def passes_of_row(token, most, cache, next_token):
            def after(scores):
                self.now += plain_pass
                return next_token(scores)

            return decode_row(token, most, cache, after)

        patch.setattr(target, "forward", passes)
        patch.setattr(target, "decode_row", passes_of_row)
        for part in (recording, plain):
            patch.setattr(part, "perf_counter", lambda: self.now)

    def __call__(self):
        self.now += self.look
        return self.now


COSTS = {"cheap": (0.00001, 0.0, 0.0038), "dear": (0.0006, 0.0002, 0.0038), "rounds": (0.0001, 0.0, 0.002)}
"""What is dear: nothing, further tokens and copies, or a round of one pass. Seconds, as `Clock` takes them."""


def engine_of(make, patch, verifier, costs):
    """An engine under the policy, with a computed clock, and with the same seeds each time for requests without one."""
    seeds, target = count(1), native()
    patch.setattr(prompts, "fresh_seed", lambda: next(seeds))
    cascade = Cascade([make()], clock=Clock(target, patch, *costs))
    engine = Engine(target, cascade, verifier)
    cascade.measure([(1, 0.004), (33, 0.004 + 32 * costs[0])], [[]], together=costs[2] / 0.004)
    return engine


def values_of(thing, seen=None):
    """What an object consists of, as numbers, names, lists and dicts; each part once."""
    seen = set() if seen is None else seen
    if thing is None or isinstance(thing, bool | int | float | str):
        return thing
    if id(thing) in seen or callable(thing):
        return "…"
    seen.add(id(thing))
    if isinstance(thing, dict):
        return {str(key): values_of(value, seen) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set | frozenset):
        return [values_of(one, seen) for one in thing]
    slots = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(thing, name)]
    fields = {name: getattr(thing, name) for name in slots} | getattr(thing, "__dict__", {})
    # The ids of objects are in the first; results that are kept, in the second, don't depend on what is known alone.
    return {name: values_of(value, seen) for name, value in fields.items() if name not in ("_decided", "_tables")}


@pytest.mark.grid
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(("temperature", "verifier"), [(0.0, "block"), (1.0, "block"), (1.0, "token")])
@pytest.mark.parametrize("costs", COSTS)
def test_the_policy_learns_what_it_learns_of_single_rounds(
    monkeypatch, together, learnt, make, temperature, verifier, costs
):
    pytest.importorskip("openvino")
    histories = []
    for single in (True, False):
        with monkeypatch.context() as patch:
            if single:  # fewer passes of plain rounds, too, would change what is decided
                patch.setattr(decode_loop, "rounds_in_row", lambda *_, **__: None)
            engine, history = engine_of(MAKERS[make], patch, verifier, COSTS[costs]), []
            for prompt, length in zip(PROMPTS * 3, LENGTHS * 3, strict=True):
                params = SamplingParams(max_new_tokens=2 * length, temperature=temperature, ignore_eos=True)
                completion = engine.generate(prompt, params)
                cascade = engine.drafter
                learnt_rates = values_of([known_by(cascade.drafters[0]), cascade.policy, cascade._saved])
                history.append((completion, learnt_rates, taken(learnt)))
            histories.append(history)
        assert bool(together) != single
    for (expected, *lessons), (found, *others) in zip(*histories, strict=True):
        same(found, expected)
        assert others == lessons
    assert sum(done > 1 for done in together) > 3

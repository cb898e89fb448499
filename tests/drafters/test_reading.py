"""A draft model reads an output before it drafts: it tells which tokens it foresees, and drafts as if it had not."""

from __future__ import annotations

import pytest
import torch

from batches import batch_of, chain_of, sequence_of
from foretoken import Engine, SamplingParams, load
from foretoken.drafters import Cascade, DraftModel, NgramStorage
from foretoken.models.native.compilation import CompiledGraph
from foretoken.policy.lessons import Lessons
from foretoken.policy.request import READ
from models.native.checkpoints import in_rooms
from tiny import DEVICE, tiny_gpt2, tiny_llama

TEXT = [7, 3, 9, 30, 1, 1, 4, 22, 16, 5, 8, 2, 27, 13, 6, 11, 25, 19, 28, 10, 14, 31, 0, 12, 17, 20, 23, 26, 29, 15]


def native(**fields):
    pytest.importorskip("openvino")
    return load(tiny_llama(**fields), runner="native", backend="openvino")


MODELS = {
    "native": lambda **fields: native(**fields),
    "torch": lambda **fields: load(tiny_llama(**fields), runner="native", backend="torch"),
    "transformers": lambda **fields: load(tiny_gpt2(**fields)),
}


def output_of(prompt, tokens):
    sequence = sequence_of(prompt)
    sequence.tokens.extend(tokens)
    return sequence


def best_after(model, tokens, size):
    """The model's best token after each of these, by a pass over all of them."""
    cache = model.open(1)
    count = len(tokens)
    scores = model.forward(
        torch.tensor([tokens]), torch.tensor([range(-1, count - 1)]), torch.tensor([count]), cache, keep="all"
    )
    return scores.logits[0, :, :size].argmax(-1).tolist()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("prompt", "most"), [(5, READ), (20, READ), (28, READ), (5, 3), (1, 100)])
def test_what_is_foreseen_is_what_is_drafted_there(kind, prompt, most):
    model = MODELS[kind](seed=3)
    drafter, tokens = DraftModel(model), list(TEXT)
    best = best_after(model, TEXT, 32)
    for at in range(prompt, len(TEXT), 2):  # a model that is right for every other token
        tokens[at] = best_after(model, tokens[:at], 32)[-1]
    best = best_after(model, tokens, 32)
    sequence = output_of(tokens[:prompt], tokens[prompt:])
    assert drafter.reads(batch_of(sequence))
    right = drafter.read(batch_of(sequence), most)
    expected = [before == token for before, token in zip(best, tokens[1:], strict=False)]
    assert right == expected[-min(most, len(tokens) - prompt, len(tokens) - 1) :]
    assert any(right)
    assert prompt > 20 or not all(right)
    assert chain_of(drafter, sequence, 4) == chain_of(DraftModel(model), output_of(tokens[:prompt], tokens[prompt:]), 4)


@pytest.mark.parametrize("kind", MODELS)
def test_of_what_a_model_has_seen_nothing_is_told_again(kind):
    model = MODELS[kind](seed=3)
    drafter, best = DraftModel(model), best_after(model, TEXT, 32)
    sequence = output_of(TEXT[:4], TEXT[4:12])
    assert len(drafter.read(batch_of(sequence), READ)) == 8
    assert drafter.read(batch_of(sequence), READ) == []
    sequence.tokens.extend(TEXT[12:17])
    expected = [before == token for before, token in zip(best[11:], TEXT[12:17], strict=False)]
    assert drafter.read(batch_of(sequence), READ) == expected
    assert len(chain_of(drafter, sequence, 3)) == 3
    sequence.tokens.extend(TEXT[17:])  # what it drafted there is not part of it; of the first one it drafted
    expected = [before == token for before, token in zip(best[17:], TEXT[18:], strict=False)]
    assert drafter.read(batch_of(sequence), 100) == expected


@pytest.mark.parametrize(("own", "targets"), [(32, 40), (40, 32)])
def test_vocabularies_of_two_sizes(own, targets):
    """A model with more tokens drafts none that the target lacks; one with fewer reads others as its first one."""
    model = load(tiny_llama(vocab_size=own, seed=3))
    tokens = [*TEXT[:10], targets - 1, *TEXT[10:]]
    sequence = output_of(tokens[:4], tokens[4:])
    right = DraftModel(model).read(batch_of(sequence, vocab_size=targets), 100)
    best = best_after(model, [token if token < own else 0 for token in tokens], min(own, targets))
    assert right == [before == token for before, token in zip(best[3:], tokens[4:], strict=False)]


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}, {"min_new_tokens": 100}]
)
def test_rows_whose_drafts_are_not_the_best_tokens_are_not_read(params):
    sequence = sequence_of(TEXT[:4], **params)
    sequence.tokens.extend(TEXT[4:])
    batch = batch_of(sequence)
    reads = DraftModel(tiny_llama(seed=3)).reads(batch)
    assert reads == (batch.sampler.all_greedy and not batch.sampler.alters)
    assert not (reads and "temperature" in params)


def test_a_sequence_that_is_too_long_for_the_model_is_not_read():
    drafter = DraftModel(tiny_llama(seed=3, max_position_embeddings=16))
    assert drafter.reads(batch_of(output_of(TEXT[:4], TEXT[4:16])))
    assert not drafter.reads(batch_of(output_of(TEXT[:4], TEXT[4:17])))


def test_trees_and_methods_of_ones_own_are_not_read():
    class Own(DraftModel):
        def propose(self, batch, limits):
            return super().propose(batch, [min(limit, 1) for limit in limits])

    batch = batch_of(output_of(TEXT[:4], TEXT[4:]))
    assert not Own(tiny_llama(seed=3)).reads(batch)
    assert not DraftModel(tiny_llama(seed=3), tree="static").reads(batch)
    assert not NgramStorage().reads(batch)


def test_models_whose_passes_are_captured_by_their_sizes_do_not_read():
    """A size that no warm-up has captured would be captured within a request."""
    model, batch = in_rooms(tiny_llama(seed=3), widths=(1, 4)), batch_of(output_of(TEXT[:4], TEXT[4:]))
    assert model.drafts_chains
    assert not DraftModel(model).reads(batch)


def test_scores_that_are_no_numbers_tell_nothing():
    model = load(tiny_llama(seed=3))
    with torch.no_grad():
        model.module.get_output_embeddings().weight.fill_(float("nan"))
    sequence = output_of(TEXT[:4], TEXT[4:])
    assert DraftModel(model).read(batch_of(sequence), READ) == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_reading_that_fails_leaves_nothing_behind(kind, monkeypatch):
    model = MODELS[kind](seed=3)
    drafter, sequence, forward = DraftModel(model), output_of(TEXT[:4], TEXT[4:12]), type(model).forward

    def failing(*args, **options):
        forward(*args, **options)
        raise RuntimeError("not enough memory")

    assert len(chain_of(drafter, sequence_of(TEXT[:4]), 3)) == 3
    drafter.observe(batch_of(sequence), None, None, None)
    monkeypatch.setattr(type(model), "forward", failing)
    with pytest.raises(RuntimeError, match="memory"):
        drafter.read(batch_of(sequence), READ)
    monkeypatch.undo()
    sequence.tokens.extend(TEXT[12:20])  # it goes on without the model
    best = best_after(model, TEXT[:20], 32)
    right = drafter.read(batch_of(sequence), READ)
    assert right == [before == token for before, token in zip(best[3:], TEXT[4:20], strict=False)][-len(right) :]
    assert chain_of(drafter, sequence, 4) == chain_of(DraftModel(model), output_of(TEXT[:4], TEXT[4:20]), 4)


@pytest.fixture
def told(monkeypatch):
    """What a policy was told of each reading."""
    found, read = [], Lessons.read

    def watched(lessons, request, drafter, right, seconds, lag):
        read(lessons, request, drafter, right, seconds, lag)
        found.append((right, seconds, lag))

    monkeypatch.setattr(Lessons, "read", watched)
    return found


class Ticking(Cascade):
    """A cascade whose clock goes on by 0.1 ms whenever it is looked at, and whose rounds take 4 ms."""

    def __init__(self, *drafters):
        super().__init__(drafters, clock=self.tick)
        self.now = 0.0

    def tick(self):
        self.now += 0.0001
        return self.now

    def observe_seconds(self, seconds):
        super().observe_seconds(None if seconds is None else 0.004)


def engine_of(target, model, call, **options):
    """A drafter whose calls take so many plain rounds."""
    engine = Engine(target, Ticking(DraftModel(model)), **options)
    calls = [(1, 0.004 * call), (5, 0.004 * (call + 1.0))]
    engine.drafter.measure([(1, 0.004), (33, 0.0044)], [calls])
    return engine


@pytest.mark.grid
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_would_not_pay_by_what_is_assumed_is_read_before_it_drafts(kind, told):
    """It is the target itself, at a price that only a model pays that is nearly always right."""
    model = MODELS[kind](seed=1)
    engine, alone = engine_of(model, model, 1.4), Engine(model, None)
    params = SamplingParams(temperature=0.0, max_new_tokens=100, ignore_eos=True)
    drafted = 0
    for prompt in (TEXT[:5], TEXT[5:12], TEXT[20:]):
        found = engine.generate(prompt, params)
        assert found.token_ids == alone.generate(prompt, params).token_ids
        drafted += found.stats.drafted
    assert told
    right, seconds, lag = told[0]
    assert right == [True] * READ
    assert seconds == pytest.approx(0.0001)
    assert lag > READ
    assert drafted > 20


def test_requests_that_are_sampled_batched_or_of_a_fixed_length_are_not_read(told):
    model = load(tiny_llama(seed=1))
    engine = engine_of(model, model, 1.4)
    engine.generate(TEXT[:5], SamplingParams(temperature=1.0, max_new_tokens=100, ignore_eos=True))
    params = SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True)
    engine.generate([TEXT[:5], TEXT[5:9]], params)
    for length in (0, 1):
        engine = engine_of(model, model, 1.4)
        handle = engine.submit(TEXT[:5], params, num_speculative_tokens=length)
        while not handle.finished:
            engine.step()
    assert not told


def test_what_is_read_is_no_time_of_the_round(told, monkeypatch):
    """Else a pass would seem to have become slower whenever a model has read before it."""
    model, heard, learn = load(tiny_llama(seed=1)), [], Lessons.learn

    def watched(lessons, rows, emitted, positions, calls, seconds, *args, **options):
        heard.append((len(told), seconds))
        return learn(lessons, rows, emitted, positions, calls, seconds, *args, **options)

    monkeypatch.setattr(Lessons, "learn", watched)
    engine = engine_of(model, model, 1.4)
    engine.generate(TEXT[:5], SamplingParams(temperature=0.0, max_new_tokens=60, ignore_eos=True))
    assert told
    with_reading, later = [seconds for readings, seconds in heard if readings][:2]
    assert with_reading == pytest.approx(later - told[0][1])  # both drafted


def test_a_warm_up_runs_the_pass_that_reads(monkeypatch):
    """Its first run packs weights, which would take as long as a request's first twenty rounds."""
    model, ran, run = native(seed=3), [], CompiledGraph.run
    monkeypatch.setattr(CompiledGraph, "run", lambda graph, *args: ran.append(graph) or run(graph, *args))
    for drawn, times in ((True, 0), (False, 1), (False, 1)):
        DraftModel(model).warm_up(drawn)
        assert ran.count(model.backend._plain) == times


def test_devices():
    """What is read lies where the model is."""
    model = load(tiny_llama(seed=3))
    assert model.device.type == DEVICE.type
    assert DraftModel(model).read(batch_of(output_of(TEXT[:4], TEXT[4:])), READ)

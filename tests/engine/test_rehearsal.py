"""Rehearsal: draft models read an answer that nobody asked for, and what they foresee of it is a prior for requests."""

from __future__ import annotations

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken import Engine, SamplingParams, load
from foretoken.drafters import DraftModel, NgramStorage
from foretoken.engine import calibration, rehearsal
from foretoken.engine.rehearsal import TOKENS
from foretoken.policy.request import READ
from tiny import tiny_llama

GREEDY, DRAWN = SamplingParams(temperature=0.0, max_new_tokens=24), SamplingParams(max_new_tokens=24, seed=1)


def model(seed=1, *, tokenizer=True, name=None, **fields):
    made = tiny_llama(vocab_size=259, seed=seed, eos_token_id=258, **{"max_position_embeddings": 512, **fields})
    given = {"tokenizer": tokenizer if tokenizer is not True else byte_tokenizer()} if tokenizer else {}
    return load(made, runner="native", backend="torch", eager=True, name=name, **given)


@pytest.fixture
def read(monkeypatch):
    """What each model was given to read, and what it foresaw."""
    found, before = [], DraftModel.read

    def reading(self, batch, most):
        right = before(self, batch, most)
        found.append((list(batch.sequences[0].output), batch.sequences[0].scratch, right))
        return right

    monkeypatch.setattr(DraftModel, "read", reading)
    monkeypatch.setattr(calibration, "SECONDS", 1e6)  # however slow the machine is now
    monkeypatch.setattr(calibration, "_MOST", 6)
    return found


def rates(engine, *, sampled=False):
    (at,) = [at for at, free in enumerate(engine.policy.free) if not free]
    return engine.policy.rates(at, sampled=sampled)


def test_a_model_that_is_the_target_foresees_all(read):
    engine = Engine(model(), model())
    engine.generate([[5, 6, 7]], GREEDY)
    (tokens, scratch, right), *_ = read
    assert right == [True] * TOKENS
    assert len(tokens) == TOKENS
    assert scratch
    assert rates(engine).use > 0.99


def test_one_that_foresees_nothing_is_taken_for_useless_in_all_requests(read):
    engine = Engine(model(), model(seed=2))
    engine.warm_up()
    ((_, _, right),) = read  # one rehearsal for greedy requests and sampled ones
    assert sum(right) < TOKENS // 8
    assert max(rates(engine, sampled=sampled).use for sampled in (False, True)) < 0.5
    assert rates(engine).all.expected > 0.0
    assert rates(engine, sampled=True).all.expected == 0.0


def test_the_answer_is_the_targets_and_no_request_starts_from_it(read):
    target = model()
    engine = Engine(target, ["auto", model(seed=2)])
    outputs = [engine.generate([[5, 6, 7]], params)[0].token_ids for params in (GREEDY, DRAWN)]
    plain = Engine(target, None)
    assert outputs == [plain.generate([[5, 6, 7]], params)[0].token_ids for params in (GREEDY, DRAWN)]
    question = [{"role": "user", "content": rehearsal._QUESTION}]
    answer = plain.generate([question], SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True))
    assert read[0][0] == answer[0].token_ids
    first, second = (engine.generate([question], GREEDY)[0] for _ in range(2))
    assert first.token_ids == second.token_ids == answer[0].token_ids[:24]
    assert first.stats.cached == 0 < second.stats.cached  # of the rehearsal nothing is kept


def test_a_model_without_a_chat_template_continues_the_question(read):
    target = model(tokenizer=byte_tokenizer(chat=False))
    Engine(target, model(seed=2)).generate([[5, 6, 7]], GREEDY)
    params = SamplingParams(temperature=0.0, max_new_tokens=TOKENS, ignore_eos=True)
    assert read[0][0] == Engine(target, None).generate([rehearsal._QUESTION], params)[0].token_ids


def refusing():
    made = byte_tokenizer()
    made.chat_template = "{{ raise_exception('only poems') }}"
    return made


@pytest.mark.parametrize(
    ("make", "drafter", "seconds"),
    [
        (lambda: model(tokenizer=None), lambda: model(seed=2), 1e6),
        (lambda: model(tokenizer=refusing()), lambda: model(seed=2), 1e6),
        (lambda: model(max_position_embeddings=32), lambda: model(seed=2), 1e6),  # the question does not fit
        (lambda: model(max_position_embeddings=80), lambda: model(seed=2), 1e6),  # nor does its answer
        (model, lambda: model(seed=2), 1e-6),
        (model, lambda: "lookup", 1e6),
        (model, lambda: NgramStorage(), 1e6),
    ],
    ids=["no tokenizer", "template refuses", "question too long", "answer too long", "too slow", "copies", "n-grams"],
)
def test_where_nothing_can_be_rehearsed_requests_go_as_ever(read, monkeypatch, make, drafter, seconds):
    monkeypatch.setattr(calibration, "SECONDS", seconds)
    target = make()
    engine = Engine(target, drafter())
    output = engine.generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert output == Engine(target, None).generate([[5, 6, 7]], GREEDY)[0].token_ids
    assert not [one for one in read if one[1]]


def test_short_answers_are_read_where_time_is_short(read, monkeypatch):
    times = []

    def rehearse(target, cascade, verifier, limits, most):
        times.append(most)
        rehearsal.rehearse(target, cascade, verifier, limits, READ + 3)

    monkeypatch.setattr(calibration, "rehearse", rehearse)
    Engine(model(), model()).generate([[5, 6, 7]], GREEDY)
    assert len(read[0][0]) == len(read[0][2]) == READ + 3
    assert times[0] > TOKENS


def test_what_is_known_of_a_model_is_not_rehearsed(read, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    target, drafter = model(name="target"), model(name="drafter")
    engine = Engine(target, drafter)
    for _ in range(3):
        engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True))
    assert [scratch for _, scratch, _ in read].count(True) == 1
    engine.generate([[5, 6, 7]], DRAWN)  # in the same process
    read.clear()
    engine = Engine(target, drafter)  # in a later one
    assert not rates(engine).is_new
    engine.generate([[5, 6, 7]], GREEDY)
    assert not any(scratch for _, scratch, _ in read)


def test_models_that_draft_trees_are_not_asked(read):
    engine = Engine(model(), model(seed=2), tree="static")
    engine.generate([[5, 6, 7]], GREEDY)
    assert not read

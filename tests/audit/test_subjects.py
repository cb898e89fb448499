from __future__ import annotations

import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from audit.samplers import PlainSampler
from foretoken.audit import AuditError, CallableSubject, EngineSubject, Plan, Request, TransformersSubject, audit_worlds
from foretoken.audit.external import ExternalSubject, vllm_subject
from foretoken.audit.subjects import Sample, Speculation, check, transformers_options, transformers_subject
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams

REQUEST = Request((0, 1, 2), 3, 4, seed=5)


def ask(function, world):
    return audit_worlds(lambda _: CallableSubject(function, "it"), [world], Plan(tv=0.3), greedy=False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompt, count, n, params, seed: [[0] * n] * (count - 1), "texts where"),
        (lambda prompt, count, n, params, seed: [[0] * (n + 1)] * count, "tokens where"),
        (lambda prompt, count, n, params, seed: [[0] * (n - 1)] * count, "end token"),
        (lambda prompt, count, n, params, seed: [[8] * n] * count, "ids 0 to 7"),
        (lambda prompt, count, n, params, seed: [[0.5] * n] * count, "list of lists of token ids"),
        (lambda prompt, count, n, params, seed: np.zeros(n, dtype=int), r"shape \[3\]"),
        (lambda prompt, count, n, params, seed: None, "NoneType"),
        (lambda prompt, count, n, params, seed: 1 / 0, "ZeroDivisionError"),
        (lambda prompt: None, "TypeError"),
    ],
)
def test_what_is_no_sample_is_named(world, function, message):
    with pytest.raises(AuditError, match=message):
        ask(function, world)


def test_arrays_will_do(world):
    plain = PlainSampler(world)
    report = ask(lambda *request: torch.tensor(plain(*request)), world)
    assert report.verdict == "PASS"


def test_rounds_must_add_up():
    with pytest.raises(AuditError, match="rounds of text 0"):
        check([Sample([0, 0, 0, 0], [1, 2])], Request((0,), 1, 4), 8)


def test_seeds_are_distinct_and_reproducible():
    assert REQUEST.seeds() == REQUEST.seeds()
    assert len(set(Request((0,), 1000, 1).seeds())) == 1000


def test_the_engine_tells_its_rounds(world):
    subject = EngineSubject(Engine(world.target, world.drafter, "token", 2))
    (sample,) = subject.sample(Request(world.prompts[0], 1, 12, rounds=True))
    assert sum(sample.rounds) == 12
    assert max(sample.rounds) <= 3
    assert 0 < subject.speculation.accepted < subject.speculation.drafted
    batch = subject.sample(Request(world.prompts[0], 5, 12, logprobs=0))
    assert [len(one.tokens) for one in batch] == [12] * 5
    assert all(token in told for token, told in zip(batch[0].tokens, batch[0].top_logprobs, strict=True))


# transformers.


def test_transformers_defaults_are_switched_off():
    assert transformers_options(SamplingParams())["top_k"] == 0
    assert transformers_options(SamplingParams(temperature=0)) == {"do_sample": False, "repetition_penalty": 1.0}
    with pytest.raises(AuditError, match="presence_penalty"):
        transformers_options(SamplingParams(presence_penalty=1.0))


def test_transformers_without_speculation_passes(world):
    before = torch.random.get_rng_state()
    report = audit_worlds(lambda one: transformers_subject(one.target, mode="plain"), [world], Plan(tv=0.3))
    assert report.verdict == "PASS"
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("mode", ["assistant", "prompt-lookup", "early-exit"])
def test_transformers_modes_answer(world, mode):
    subject = transformers_subject(world.target, world.drafter, mode)
    assert isinstance(subject, TransformersSubject)
    samples = subject.sample(Request(world.prompts[0], 3, 5))
    assert [len(sample.tokens) for sample in samples] == [5, 5, 5]
    # What was heard of the rounds adds up; afterwards the model is as it was.
    assert [sum(sample.rounds) for sample in samples] == [5, 5, 5]
    assert subject.speculation.drafted > 0
    assert "_get_candidate_generator" not in vars(world.target)


def test_transformers_that_tell_nothing_of_their_rounds(world, monkeypatch):
    monkeypatch.setattr("foretoken.audit.subjects._listening", lambda module: nullcontext([]))
    subject = transformers_subject(world.target, world.drafter, "assistant")
    (sample,) = subject.sample(Request(world.prompts[0], 1, 5))
    assert (subject.speculation, sample.rounds) == (None, None)


def test_transformers_errors_are_named(world):
    with pytest.raises(AuditError, match="needs an assistant"):
        transformers_subject(world.target)
    with pytest.raises(AuditError, match="unknown mode 'magic'"):
        transformers_subject(world.target, mode="magic")
    subject = transformers_subject(world.target, mode="plain", options={"nonsense": 1})
    with pytest.raises(AuditError, match="nonsense"):
        subject.sample(REQUEST)


# Programs.

ECHO = """
import json, sys
print(json.dumps({"ready": True, "name": "echo", "details": {"version": 1}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    samples = [{"tokens": [seed % 8] * request["num_tokens"]} for seed in request["seeds"]]
    print(json.dumps({"samples": samples}), flush=True)
"""


def program(source, **options):
    return ExternalSubject([sys.executable, "-c", source], **options)


def test_a_program_samples():
    subject = program(ECHO)
    assert (subject.name, subject.details) == ("echo", {"version": "1"})
    samples = subject.sample(REQUEST)
    assert [sample.tokens for sample in samples] == [[seed % 8] * 4 for seed in REQUEST.seeds()]
    assert subject.speculation is None
    subject.close()


def test_a_program_tells_what_it_drafted():
    subject = program(
        ECHO.replace('"samples": samples', '"samples": samples, "speculation": {"drafted": 4, "accepted": 3}')
    )
    subject.sample(REQUEST)
    assert subject.speculation == Speculation(4, 3)
    subject.close()


READY = (
    'import json, sys, time\nprint(\'{"ready": true, "name": "x", "details": {}}\', flush=True)\nsys.stdin.readline()\n'
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys; sys.exit('no such model')", "status 1; its last words: no such model"),
        ('print(\'{"error": "out of memory"}\')', "did not start: out of memory"),
        ("print('hello')", "no JSON"),
        ("print('[1]')", "no JSON object"),
        ("print('{}')", "should have said that it is ready"),
        ("import time; time.sleep(60)", "within 2 seconds"),
    ],
)
def test_programs_that_do_not_start(source, message):
    with pytest.raises(AuditError, match=message):
        program(source, start_seconds=2)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("sys.exit(3)", "status 3"),
        ('print(\'{"error": "bad"}\')', "x failed: bad"),
        ("print('{\"samples\": [{}]}')", "holds no samples"),
        ("time.sleep(60)", "within 2 seconds"),
    ],
)
def test_programs_that_stop(rest, message):
    subject = program(READY + rest, answer_seconds=2)
    with pytest.raises(AuditError, match=message):
        subject.sample(REQUEST)
    subject._process.kill()
    subject.close()


def test_a_program_that_is_not_there():
    with pytest.raises(AuditError, match="can't be started"):
        ExternalSubject(["/no/such/python"])
    with pytest.raises(AuditError, match="unknown mode"):
        vllm_subject("python", "target", mode="magic")

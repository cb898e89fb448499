from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch

from audit.samplers import PlainSampler
from foretoken.audit import (
    AuditError,
    AuditPlan,
    CallableSubject,
    EngineSubject,
    ReferenceModel,
    SampleRequest,
    TransformersSubject,
    audit_model,
    audit_worlds,
)
from foretoken.audit.external import ExternalSubject, external_subject
from foretoken.audit.subjects import Sample, Speculation, check
from foretoken.audit.transformers_subject import transformers_options, transformers_subject
from foretoken.engine.engine import Engine
from foretoken.models import load
from foretoken.peers.launch import request
from foretoken.peers.process import WORKERS, Worker
from foretoken.sampling import SamplingParams
from tiny import tiny_llama

REQUEST = SampleRequest((0, 1, 2), 3, 4, seed=5)


def ask(function, world):
    return audit_worlds(lambda _: CallableSubject(function, "it"), [world], AuditPlan(tv=0.3), greedy=False)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompt, count, n, params, seed: [[0] * n] * (count - 1), "samples where"),
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
    with pytest.raises(AuditError, match="rounds of sample 0"):
        check([Sample([0, 0, 0, 0], [1, 2])], SampleRequest((0,), 1, 4), 8)


def test_an_end_token_that_only_the_subject_knows():
    """Its probability is known where it is the last of the tokens, whatever the model's config says ends a sample."""
    asked = SampleRequest((0,), 1, 4)
    check([Sample([0, 5], end_token=5)], asked, 8, (7,), named=True)
    for sample, named in ((Sample([0, 5], end_token=5), False), (Sample([0], ended=True), True)):
        with pytest.raises(AuditError, match="the last is no end token"):
            check([sample], asked, 8, (7,), named=named)


def test_seeds_are_distinct_and_reproducible():
    assert REQUEST.seeds() == REQUEST.seeds()
    assert len(set(SampleRequest((0,), 1000, 1).seeds())) == 1000


def test_the_engine_tells_its_rounds(world):
    subject = EngineSubject(Engine(world.target, world.drafter, "token", 2))
    (sample,) = subject.sample(SampleRequest(world.prompts[0], 1, 12, rounds=True))
    assert sum(sample.rounds) == 12
    assert max(sample.rounds) <= 3
    assert 0 < subject.speculation.accepted < subject.speculation.drafted
    batch = subject.sample(SampleRequest(world.prompts[0], 5, 12, logprobs=0))
    assert [len(one.tokens) for one in batch] == [12] * 5
    assert all(token in told for token, told in zip(batch[0].tokens, batch[0].top_logprobs, strict=True))


@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_passes_that_go_together_are_rounds_of_their_own(world, drafter):
    subject = EngineSubject(Engine(load(tiny_llama(seed=1), runner="native"), drafter))
    for _ in range(2):
        (sample,) = subject.sample(SampleRequest(world.prompts[0], 1, 40, rounds=True))
        assert sum(sample.rounds) == len(sample.tokens) == 40
        assert drafter or sample.rounds == [1] * 40
        assert len(sample.rounds) > 20


# transformers.


def test_transformers_defaults_are_switched_off():
    assert transformers_options(SamplingParams())["top_k"] == 0
    assert transformers_options(SamplingParams(temperature=0)) == {"do_sample": False, "repetition_penalty": 1.0}
    with pytest.raises(AuditError, match="presence_penalty"):
        transformers_options(SamplingParams(presence_penalty=1.0))


def test_a_checkpoints_min_p_is_switched_off(world, tmp_path, monkeypatch):
    """Of a sampled request; 1 would leave the likeliest token alone."""
    module = deepcopy(world.target)
    module.generation_config.min_p = 1.0
    subject = transformers_subject(module, mode="plain")
    assert len({sample.tokens[0] for sample in subject.sample(SampleRequest(world.prompts[0], 64, 1))}) > 1
    shutil.copytree(world.target_path, tmp_path / "target")
    (tmp_path / "target" / "generation_config.json").write_text('{"min_p": 1.0}')
    monkeypatch.syspath_prepend(str(WORKERS))
    import transformers_worker

    options = {"target": str(tmp_path / "target"), "dtype": "float32", "device": "cpu", "options": {}}
    _, run = transformers_worker.make({**options, "threads": torch.get_num_threads()})
    asked = request("plain", None, [world.prompts[0]] * 64, 1, {"temperature": 1.0}, [5] * 64)
    assert len({tokens[0] for tokens in run(asked)["tokens"]}) > 1
    for name in ("transformers_worker", "protocol"):
        sys.modules.pop(name, None)


def test_transformers_without_speculation_passes(world):
    before = torch.random.get_rng_state()
    report = audit_worlds(lambda one: transformers_subject(one.target, mode="plain"), [world], AuditPlan(tv=0.3))
    assert report.verdict == "PASS"
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("mode", ["assistant", "prompt-lookup", "early-exit"])
def test_transformers_modes_answer(world, mode):
    subject = transformers_subject(world.target, world.drafter, mode)
    assert isinstance(subject, TransformersSubject)
    samples = subject.sample(SampleRequest(world.prompts[0], 3, 5))
    assert [len(sample.tokens) for sample in samples] == [5, 5, 5]
    # The recorded rounds add up; afterwards the model is unchanged.
    assert [sum(sample.rounds) for sample in samples] == [5, 5, 5]
    assert subject.speculation.drafted > 0
    assert "_get_candidate_generator" not in vars(world.target)


def test_transformers_that_tell_nothing_of_their_rounds(world, monkeypatch):
    monkeypatch.setattr("foretoken.audit.transformers_subject._recorded_rounds", lambda module: nullcontext([]))
    subject = transformers_subject(world.target, world.drafter, "assistant")
    (sample,) = subject.sample(SampleRequest(world.prompts[0], 1, 5))
    assert (subject.speculation, sample.rounds) == (None, None)


def test_transformers_errors_are_named(world):
    with pytest.raises(AuditError, match="needs an assistant"):
        transformers_subject(world.target)
    with pytest.raises(AuditError, match="unknown mode 'magic'"):
        transformers_subject(world.target, mode="magic")
    subject = transformers_subject(world.target, mode="plain", options={"nonsense": 1})
    with pytest.raises(AuditError, match="nonsense"):
        subject.sample(REQUEST)


# Other engines, in a process of their own.


def external(fake, behaviour="sampled", answer_seconds=60.0, **options):
    command = [sys.executable, str(fake), json.dumps({"options": {"behaviour": behaviour}})]
    return ExternalSubject(Worker(command, answer_seconds=answer_seconds), "it", **options)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_another_engine_samples_with_a_seed_each(fake, batch):
    subject = external(fake, batch=batch)
    assert (subject.name, subject.details) == ("it", {"fake": "1.0"})
    samples = subject.sample(REQUEST)
    assert [sample.tokens for sample in samples] == [[seed % 8] * 4 for seed in REQUEST.seeds()]
    assert subject.speculation is None  # plain decoding of the fake engine tells nothing of drafts
    subject.close()


def test_another_engine_tells_its_end_tokens(fake):
    """The audit of a model takes its word: llama.cpp has end tokens that the model's config does not list."""
    subject = external(fake, "ending", batch=3)
    assert [(one.tokens, one.end_token) for one in subject.sample(SampleRequest((5,), 3, 4))] == [([5, 6, 7], 7)] * 3
    reference = ReferenceModel(tiny_llama(seed=1, vocab_size=50))
    report = audit_model(subject, reference, [[5]], SamplingParams(), AuditPlan(max_samples=2), num_tokens=4)
    assert report.verdict == "FAIL"  # it says the same each time
    subject.close()


def test_another_engine_tells_what_it_drafted(fake):
    subject = external(fake, mode="draft-model", k=2)
    subject.sample(REQUEST)
    subject.sample(REQUEST)
    assert subject.speculation == Speculation(48, 12)
    subject.close()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("die", "it failed: .*status 3"),
        ("broken", "it failed: ValueError: shapes differ"),
        ("no tokens", "holds no samples"),
        ("hang", "within 0.2 seconds"),
    ],
)
def test_what_goes_wrong_in_another_engine_is_said(fake, behaviour, message, monkeypatch):
    monkeypatch.setattr("foretoken.peers.process.POLITE_SECONDS", 0.2)  # it ignores SIGTERM
    subject = external(fake, behaviour, answer_seconds=0.2 if behaviour == "hang" else 60.0)
    with pytest.raises(AuditError, match=message):
        subject.sample(SampleRequest((0, 1, 2), 1, 32))
    subject.close()


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("gpt", {}, "unknown engine 'gpt'"),
        ("vllm-cpu", {"mode": "magic"}, "unknown mode 'magic'"),
        ("openvino", {}, "needs a drafter"),
        ("openvino", {"mode": "plain", "target": "/no/such/folder"}, "holds no config.json"),
        ("openvino", {"mode": "plain", "python": "/no/such/python"}, "can't be started"),
    ],
)
def test_another_engine_that_cannot_be_started(world, engine, options, message):
    with pytest.raises(AuditError, match=message):
        external_subject(engine, **{"target": world.target_path, **options})


def test_an_external_audit_ends_to_end(world):
    """transformers in a process of its own: the protocol carries sampling parameters, seeds and counts."""

    def subject(one):
        return external_subject("transformers", one.target_path, mode="plain", python=sys.executable)

    report = audit_worlds(subject, [world], AuditPlan(tv=0.6), greedy=False)
    assert report.verdict == "PASS", report.summary
    assert set(report.details) >= {"transformers", "torch", "mode"}

"""The audit of ``foretoken serve`` as a process of its own."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from foretoken.audit import AuditError, AuditPlan, SampleRequest, audit_worlds, make_worlds
from foretoken.audit.served import ServedSubject, alternating, claim_alternating, predictions
from foretoken.audit.world_corpus import world_index
from foretoken.drafters import get
from foretoken.index import Index
from foretoken.sampling import SamplingParams


@pytest.fixture
def world(tmp_path):
    (world,) = make_worlds(tmp_path, [("cousin", SamplingParams())], 2)
    return world


def serving(world, *more, **how):
    options = ["--target", world.target_path, "--drafter", "none", "--dtype", "float32", "--no-page", *more]
    return ServedSubject(options, **how)


def letters(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def test_the_claim_under_a_grammar_is_the_targets_without_what_it_forbids(world):
    free = [level.copy() for level in world.levels[0]]
    (again,) = make_worlds(world.path.parent, [("cousin", SamplingParams())], 2)
    claim_alternating(again)
    for depth, (level, whole) in enumerate(zip(again.levels[0], free, strict=True)):
        allowed = np.arange(8) < 4 if depth % 2 == 0 else np.arange(8) >= 4
        masked = np.where(allowed, whole, 0.0)
        np.testing.assert_allclose(level, masked / masked.sum(1, keepdims=True), atol=1e-12)
    grammar = re.compile(alternating(again))
    for number, outputs in enumerate(itertools.product(range(8), repeat=2)):
        fits = grammar.fullmatch(letters(outputs)) is not None
        assert fits == (again.joint_probs[0].reshape(64, 8)[number].sum() > 0)


def test_predictions_are_right_half_right_and_wrong(world):
    right, half, wrong = (predictions(world, kind)[world.prompts[0]].split() for kind in ("right", "half", "wrong"))
    assert half[1::2] == right[1::2]
    assert half[::2] == wrong[::2]
    assert sum(a == b for a, b in zip(right, wrong, strict=True)) < len(right) / 2
    with pytest.raises(AuditError, match="unknown prediction 'left'"):
        predictions(world, "left")


def test_a_server_follows_grammar_and_prediction_and_tells_what_it_drafted(world):
    claim_alternating(world)
    extra = {"structured_outputs": {"regex": alternating(world)}}
    subject = serving(world, extra=extra, predicted=predictions(world, "right"), concurrency=2)
    try:
        samples = subject.sample(SampleRequest(world.prompts[0], 8, 12))
        assert all(re.fullmatch(alternating(world), letters(one.tokens)) for one in samples)
        assert subject.speculation.drafted > 0
        other = subject.sample(SampleRequest((1, 2, 3), 1, 4))  # a prompt without a prediction
        assert len(other[0].tokens) == 4
    finally:
        subject.close()


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(AuditError, match=r"does not start: .*/no/such/folder"):
        ServedSubject(["--target", "/no/such/folder"])


def test_the_corpus_of_a_world_has_its_targets_text_and_is_made_once(world):
    index = world_index(world)
    made = index.stat().st_mtime_ns
    assert world_index(world) == index
    assert index.stat().st_mtime_ns == made
    size, _ = Index(index).find([0], 1, 1)
    assert size == 1
    assert get(f"retrieval:{index}").name.startswith("retrieval")


@pytest.mark.full
@pytest.mark.parametrize("how", ["grammar", "right", "half", "wrong"])
def test_the_server_passes(tmp_path, how):
    worlds = make_worlds(tmp_path)
    extra = {}
    if how == "grammar":
        for world in worlds:
            claim_alternating(world)
        extra = {"structured_outputs": {"regex": alternating(worlds[0])}}

    def subject(world):
        return ServedSubject(
            ["--target", world.target_path, "--drafter", world.drafter_path, "-k", "2", "--dtype", "float32"],
            extra=extra,
            predicted=None if how == "grammar" else predictions(world, how),
        )

    report = audit_worlds(subject, worlds, AuditPlan(tv=0.3))
    assert report.verdict == "PASS", report.summary

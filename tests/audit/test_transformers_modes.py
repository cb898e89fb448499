"""transformers' generators that need more than a causal assistant, in worlds of their own."""

from __future__ import annotations

import pytest

from foretoken.audit import AuditPlan, SampleRequest, audit_worlds, make_worlds
from foretoken.audit.transformers_modes import WORLD_MODES, in_world
from foretoken.audit.transformers_subject import transformers_subject
from foretoken.sampling import SamplingParams

K = 2


def subject(world, mode):
    module, assistant, switches = in_world(world, mode, K)
    return transformers_subject(module, assistant, mode, K, switches)


def worlds(folder, mode, claims=None):
    return make_worlds(folder, claims, K, architecture=WORLD_MODES[mode].architecture)


@pytest.mark.parametrize("mode", WORLD_MODES)
def test_every_mode_drafts_k_tokens_a_round_and_tells_its_rounds(tmp_path, mode):
    (world,) = worlds(tmp_path, mode, [("cousin", SamplingParams())])
    here = subject(world, mode)
    samples = here.sample(SampleRequest(world.prompts[0], 6, 10))
    assert [len(one.tokens) for one in samples] == [10] * 6
    assert all(one.rounds is not None and max(one.rounds) <= K + 1 for one in samples)
    assert here.speculation.drafted > 30
    assert here.speculation.accepted > 0


def test_greedy_outputs_are_those_of_the_target(tmp_path):
    for mode in WORLD_MODES:
        (world,) = worlds(tmp_path / mode, mode, [("cousin", SamplingParams())])
        request = SampleRequest(world.prompts[1], 1, 12, SamplingParams(temperature=0.0))
        plain = transformers_subject(world.target, mode="plain").sample(request)
        assert [one.tokens for one in subject(world, mode).sample(request)] == [one.tokens for one in plain], mode


@pytest.mark.full
@pytest.mark.parametrize(("mode", "verdict"), [("mtp", "PASS"), ("dflash", "PASS"), ("single-position", "FAIL")])
def test_the_verdict(tmp_path, mode, verdict):
    report = audit_worlds(lambda world: subject(world, mode), worlds(tmp_path, mode), AuditPlan(tv=0.3))
    assert report.verdict == verdict, report.summary

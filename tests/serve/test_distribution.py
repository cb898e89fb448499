"""The audit of our own server: what clients get over HTTP has the target's distribution, many of them at once."""

from __future__ import annotations

import pytest

from foretoken.audit import AuditPlan, audit_worlds, make_worlds
from foretoken.audit.endpoint import EndpointSubject
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams
from serve_harness import numbers, serving

QUICK = AuditPlan(tv=0.3)
CLIENTS = 16

FIELDS = {  # further fields of every request, which change nothing of the distribution
    "as it is": {},
    "block": {"speculation": {"verifier": "block"}},
    "coupled": {"speculation": {"verifier": "coupled", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    (world,) = make_worlds(tmp_path_factory.mktemp("worlds"), [("cousin", SamplingParams())])
    return world


def audit(world, plan=QUICK, verifier="token", fields=None, samples_per_request=4):
    """The report, and how many draft tokens the server accepted."""
    engine = Engine(
        world.target_path, world.drafter_path, verifier, 2, max_batch_size=4 * CLIENTS, dtype="float32", runner="hf"
    )
    with serving(engine) as running:
        subject = EndpointSubject(
            running.url, concurrency=CLIENTS, samples_per_request=samples_per_request, extra=fields or {}
        )
        report = audit_worlds(lambda _: subject, [world], plan)
        return report, numbers(running)['vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"}']


def test_the_server_passes_with_speculation_and_16_clients(world):
    report, accepted = audit(world)
    assert report.verdict == "PASS", report.summary
    assert accepted > 300


def test_a_lossy_verifier_fails(world):
    report, accepted = audit(world, verifier="token-unadjusted")
    assert report.verdict == "FAIL", report.summary
    assert accepted > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["cousin", "stranger"])
@pytest.mark.parametrize("name", FIELDS)
def test_every_request_passes(tmp_path, name, kind):
    for params in (SamplingParams(), SamplingParams(temperature=0.7, top_k=6, top_p=0.9)):
        (world,) = make_worlds(tmp_path / kind, [(kind, params)])
        report, _ = audit(world, AuditPlan(tv=0.15, max_seconds=600), fields=FIELDS[name], samples_per_request=8)
        assert report.verdict == "PASS", report.summary

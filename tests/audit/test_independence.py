"""Evidence on outputs among one another."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from audit.samplers import PlainSampler
from foretoken.audit import AuditError, AuditPlan, CallableSubject, SampleRequest, audit_worlds
from foretoken.audit.independence import Independence, Pairs

ENOUGH = math.log(100 * 38)


def gathered(make, calls=60, rows=32, length=3, *, neighbour=False):
    """Evidence from calls of ``make(rng, number, seed) -> [rows, length]`` uniforms, two orders of one transform."""
    rng, independence = np.random.default_rng(0), Independence(0)
    for number in range(calls):
        seed = number if neighbour else int(rng.integers(0, 2**31))
        values = np.clip(make(rng, number, seed, (rows, length)), 0, 1 - 1e-9)
        independence.add(
            seed, [seed + i * 8 for i in range(rows)], np.stack([values, values]), neighbour=neighbour and number > 0
        )
    return {part.name: part.log_e for part in independence.parts()}


def fair(rng, number, seed, shape):
    return rng.random(shape)


def equal(rng, number, seed, shape):
    """One output in ten is the one before it."""
    values = rng.random(shape)
    same = np.flatnonzero(rng.random(shape[0] - 1) < 0.1) + 1
    values[same] = values[same - 1]
    return values


def antithetic(rng, number, seed, shape):
    half = rng.random((shape[0] // 2, shape[1]))
    return np.concatenate([half, 1 - half])


def mirrored(rng, number, seed, shape):
    half = rng.random((shape[0] // 2, shape[1]))
    return np.concatenate([half, 1 - half[::-1]])


def twice(rng, number, seed, shape):
    """One uniform for two tokens."""
    return np.repeat(rng.random((shape[0], 2)), 2, axis=1)[:, : shape[1]]


def repeating(rng, number, seed, shape):
    """Every call with the same numbers, plus a little."""
    return (np.random.default_rng(7).random(shape) + 0.05 * rng.random(shape)) % 1


def drifting(rng, number, seed, shape):
    """The next seed's numbers are those of the last, plus a little."""
    return (np.random.default_rng(7).random(shape) + 0.01 * seed) % 1


def parity(rng, number, seed, shape):
    """Right over all seeds, but even ones lean to one side, odd ones to the other."""
    values = rng.random(shape)
    return np.where(rng.random(shape) < 0.2, values / 2 + 0.5 * (seed % 2), values)


@pytest.mark.parametrize(
    ("make", "name", "neighbour"),
    [
        (equal, "within a batch", False),
        (antithetic, "within a batch", False),
        (mirrored, "within a batch", False),
        (twice, "within an output", False),
        (repeating, "between calls", False),
        (drifting, "neighbouring seeds", True),
        (parity, "by the seed's value", False),
    ],
)
def test_each_dependence_is_found(make, name, neighbour):
    assert gathered(make, neighbour=neighbour)[name] > ENOUGH


def test_independent_outputs_are_not_accused():
    """1/E of 150 simulated audits: none of five pieces above 20 in more than 1/20 of them (Ville), looked at last."""
    high = dict.fromkeys(gathered(fair, 1), 0)
    for start in range(150):
        rng, independence = np.random.default_rng([start, 1]), Independence(0)
        for number in range(6):
            independence.add(number, range(8), rng.random((2, 8, 3)), neighbour=number % 2 == 1)
        for part in independence.parts():
            high[part.name] += part.log_e >= math.log(20)
    assert max(high.values()) <= 150 / 20


def test_the_mean_of_pairs_is_1():
    """By enumeration of three cells that follow one another, each the second of the pair before: 5^3 outcomes."""
    mean = 0.0
    for code in range(125):
        cells = np.array([code // 25, code // 5 % 5, code % 5])
        pairs = Pairs("", "", 1)
        pairs.add(0, cells[:-1], cells[1:])
        mean += math.exp(pairs.log_e) / 125
    assert mean == pytest.approx(1)


def test_seeds_of_a_request_differ():
    request = SampleRequest((1,), 4096, 3, seed=5)
    assert len(set(request.seeds())) == 4096
    assert replace(request, count=1, exact_seed=True).seeds() == [5]
    with pytest.raises(AuditError, match="an exact seed is that of one sample"):
        replace(request, exact_seed=True)


def test_the_audit_asks_twice_with_no_seed(world):
    """Seeded outputs are equal by design: a sampler whose row i has the seed plus i, as several engines do, passes."""
    asked = []

    class Rows(PlainSampler):
        def __call__(self, prompt, count, num_tokens, params, seed):
            asked.extend(range(seed, seed + count))
            rows = [super(Rows, self).__call__(prompt, 1, num_tokens, params, seed + i)[0] for i in range(count)]
            return rows

    report = audit_worlds(lambda one: CallableSubject(Rows(one)), [world], AuditPlan(tv=0.35), greedy=False)
    assert report.verdict == "PASS"
    assert len(set(asked)) == len(asked)
    neighbours = [b - a for a, b in pairwise(asked)].count(1)
    assert neighbours > 8


class Opposite(PlainSampler):
    """Pairs of outputs from u and 1 - u: each alone has its distribution."""

    def __call__(self, prompt, count, num_tokens, params, seed):
        rng = np.random.default_rng(seed)
        uniforms = rng.random((num_tokens, (count + 1) // 2))
        both = np.stack([uniforms, 1 - uniforms], axis=2).reshape(num_tokens, -1)[:, :count]
        outputs = [[] for _ in range(count)]
        for row in both:
            cumulative = self._probs(self.world.target_reference, prompt, outputs, params).cumsum(axis=1)
            tokens = (cumulative <= row[:, None] * cumulative[:, -1:]).sum(axis=1)
            for output, token in zip(outputs, tokens, strict=True):
                output.append(int(token))
        return outputs


def test_antithetic_outputs_fail_the_audit(world):
    report = audit_worlds(lambda one: CallableSubject(Opposite(one)), [world], AuditPlan(tv=0.3), greedy=False)
    assert report.verdict == "FAIL"
    assert max(report.findings, key=lambda one: one.log_e).name == "within a batch"

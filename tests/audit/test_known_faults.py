"""Evidence directed at known faults: exactly 1 in the mean under the claim, and sharp where the fault is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from audit.samplers import draw
from foretoken.audit.faults import FAULTS, Ends, Nodes, log_ratios
from foretoken.audit.shared import Shared, WorldOutputs

K = 2
ENOUGH = math.log(100 * 38)
"""A piece of evidence fails an audit of three worlds by itself."""


@pytest.fixture(scope="module")
def tables(worlds):
    """Each world's outputs: only its tables are used."""
    return [WorldOutputs(Shared(0, K, drafter=True), world) for world in worlds]


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_the_mean_under_the_claim_is_at_most_1(worlds, tables, number):
    """By enumeration, for every way of the fault; 1 to rounding, but for the likelihood of what the claim rules out."""
    for world, outputs in zip(worlds, tables, strict=True):
        for p, ratios in zip(world.joint_probs, outputs.ratios, strict=True):
            means = p @ np.exp(ratios[number])
            assert (means < 1 + 1e-9).all()
            if (p > 0).all():
                assert np.allclose(means, 1)


def test_the_mean_given_an_earlier_token_is_1(worlds, tables):
    """A martingale, so that outputs may end early and the audit may look when it likes: given the first token, the mean
    over the second and third is what the ratio was after the first."""
    world, size = worlds[0], worlds[0].vocab_size
    (levels, masses), (drafter, drafter_masses) = world.enumerated[0], world.drafter_enumerated[0]
    nodes = Nodes(levels[0], drafter[0], levels[0], masses[0], drafter_masses[0])
    for number, (fault, _) in enumerate(FAULTS.values()):
        tokens = np.arange(size)[:, None]
        short = np.exp(log_ratios(fault, nodes, tokens, np.zeros_like(tokens), K))
        whole = world.joint_probs[0][:, None] * np.exp(tables[0].ratios[0][number])
        assert np.allclose(whole.reshape(size, -1, whole.shape[1]).sum(1), levels[0].T * short)


class Speculative:
    """Writes the first three tokens of a world in rounds, one event after another; faults are methods to override."""

    offset = 0

    def __init__(self, world, prompt, seed):
        self.p, self.p_mass = world.enumerated[prompt]
        self.q, self.q_mass = world.drafter_enumerated[prompt]
        self.rng, self.size = np.random.default_rng(seed), world.vocab_size

    def ratio(self, p, q, p_mass, q_mass):
        return p / q

    def residual(self, p, q, p_mass, q_mass):
        rest = np.maximum(p - q, 0)
        return rest if rest.sum() > 1e-12 else p

    def bonus(self, p, q):
        return p

    def write(self):
        tokens, code, place = [], 0, 0
        while len(tokens) < 3:
            d = len(tokens)
            p, q, masses = self.p[d][code], self.q[d][code], (self.p_mass[d][code], self.q_mass[d][code])
            if d < self.offset:
                token, place = self.drawn(p), 0
            elif place == K:
                token, place = self.drawn(self.bonus(p, q)), 0
            else:
                token = self.drawn(q)
                with np.errstate(divide="ignore", invalid="ignore"):
                    accepted = self.rng.random() < self.ratio(p, q, *masses)[token]
                if accepted:
                    place += 1
                else:
                    token, place = self.drawn(self.residual(p, q, *masses)), 0
            tokens.append(token)
            code = code * self.size + token
        return code

    def drawn(self, p):
        return int(draw(p[None], self.rng)[0])


class Lenient(Speculative):
    def ratio(self, p, q, p_mass, q_mass):
        return p / (0.95 * q)


class Epsilon(Speculative):
    def residual(self, p, q, p_mass, q_mass):
        return np.maximum(p - q, 0) + 0.02


class NotTaken(Speculative):
    def residual(self, p, q, p_mass, q_mass):
        return p


class Bonus(Speculative):
    def bonus(self, p, q):
        return q


class Cold(Speculative):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.p = [p**1.06 / (p**1.06).sum(1, keepdims=True) for p in self.p]


class Loose(Speculative):
    def ratio(self, p, q, p_mass, q_mass):
        return p * p_mass / q

    def residual(self, p, q, p_mass, q_mass):
        rest = np.maximum(p * p_mass - q, 0)
        return rest if rest.sum() > 1e-12 else p


class LateBonus(Bonus):
    """The first token comes with the prompt: the bonus token is past the three, only its draft is seen."""

    offset = 1


def outcomes(worlds, tables, sampler, each):
    """log E of each fault's evidence over all worlds, from that many outputs after each prompt."""
    logs = dict.fromkeys(FAULTS, 0.0)
    for world, outputs in zip(worlds, tables, strict=True):
        for prompt, ratios in enumerate(outputs.ratios):
            written = sampler(world, prompt, 1000 + prompt)
            counts = np.bincount([written.write() for _ in range(each)], minlength=world.vocab_size**3)
            for name, ratio in zip(FAULTS, ratios, strict=True):
                logs[name] = logs[name] + counts @ ratio
    return {name: np.logaddexp.reduce(log) - math.log(len(log)) for name, log in logs.items()}


@pytest.mark.parametrize(
    ("sampler", "name", "each"),
    [
        (Lenient, "leniency", 3000),
        (Epsilon, "residual", 3000),
        (NotTaken, "residual", 1000),
        (Bonus, "bonus token", 1000),
        (Cold, "temperature off", 3000),
        (Loose, "not normalised", 3000),
    ],
)
def test_each_fault_is_found(worlds, tables, sampler, name, each):
    """With fewer outputs than the usual audit draws (about 4,000 after each prompt)."""
    assert outcomes(worlds, tables, sampler, each)[name] > ENOUGH


@pytest.mark.parametrize("sampler", [Speculative, LateBonus])
def test_right_samplers_are_not_accused(worlds, tables, sampler):
    """Rounds are where the evidence takes them to be, or one token later: no piece of it reaches 10."""
    assert max(outcomes(worlds, tables, sampler, 1000).values()) < math.log(10)


def test_false_alarms_of_each_fault_are_rare(worlds, tables):
    """1,000 samples of the claim's own multinomial: shares of e-values above 20 stay below 1/20 (Markov)."""
    rng = np.random.default_rng(5)
    for world, outputs in zip(worlds, tables, strict=True):
        counts = rng.multinomial(500, world.joint_probs[0], size=1000)
        for ratio in outputs.ratios[0]:
            logs = counts @ ratio
            values = np.logaddexp.reduce(logs, axis=1) - math.log(logs.shape[1])
            assert (values >= math.log(20)).mean() <= 1 / 20


def test_impossible_tokens_are_left_to_their_own_evidence(worlds, tables):
    """What rounding lets through the filters is excused there: here it must not weigh anything."""
    p = worlds[1].joint_probs[0]
    assert (p == 0).any()
    for ratio in tables[1].ratios[0]:
        assert (ratio[p == 0] == 0).all()
        assert np.isfinite(ratio).all()


@pytest.mark.parametrize("end", [0.002, 0.1, 0.6, 0.98])
def test_the_mean_of_end_tokens_is_1(end):
    probs = np.array([[end, 1 - end]])
    mean = 0.0
    for token in (0, 1):
        ends = Ends([0, 7])
        ends.add(probs, np.array([token]))
        mean += probs[0, token] * math.exp(ends.log_e)
    assert mean == pytest.approx(1)


@pytest.mark.parametrize(("share", "found"), [(0.95, True), (1.0, False), (1.05, True)])
def test_ends_that_are_five_percent_too_rare_are_found(share, found):
    rng = np.random.default_rng(3)
    e = rng.uniform(0.02, 0.3, 60_000)
    ends = Ends([1])
    ends.add(np.stack([1 - e, e], axis=1), (rng.random(len(e)) < share * e).astype(np.int64))
    assert (ends.log_e > math.log(100 * 20)) is found
    assert (ends.log_e < 0) is not found


@pytest.mark.parametrize("fault", FAULTS)
def test_ratios_of_tokens_that_hardly_can_come_are_numbers(fault):
    """Also where the drafter has no probability at all for some of them."""
    scores = np.array([[0.0, -250.0, -400.0], [-300.0, 0.0, -280.0], [-690.0, -100.0, 0.0]])
    p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    q = p[::-1].copy()
    q[:, -1] = 0.0
    q /= q.sum(-1, keepdims=True)
    one = np.ones((3, 1))
    outputs = np.stack(np.meshgrid(*[np.arange(3)] * 6, indexing="ij"), -1).reshape(-1, 6)
    at = np.concatenate([np.zeros((len(outputs), 1), np.int64), outputs[:, :-1]], axis=1)
    found = log_ratios(FAULTS[fault][0], Nodes(p, q, p[[1, 2, 0]], one, one), outputs, at, K)
    assert np.isfinite(found).all()


def test_an_end_token_that_is_listed_twice_counts_once():
    probs, tokens = np.tile([0.5, 0.3, 0.2], (50, 1)), np.arange(50) % 3
    logs = []
    for ends in ([2], [2, 2]):
        evidence = Ends(ends)
        evidence.add(probs, tokens)
        logs.append(evidence.log_e)
    assert logs[0] == logs[1]

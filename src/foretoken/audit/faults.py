"""Evidence directed at known faults of speculative sampling: far sharper on those than evidence against everything.

A fault is written down as what it is, another way to sample, and the evidence is the likelihood ratio of the outputs
under it and under the claim. Rounds are hidden: nobody needs to say where they begin. The likelihood of an output sums
over all ways in which rounds could have written it (`round_ratio`), with the drafter that the audit knows, k draft
tokens a round, and token-by-token verification. A subject that drafts otherwise is judged as rightly, only less
sharply: the alternative is then some other distribution, and the ratio still has mean 1 under the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from foretoken.audit import statistics as st
from foretoken.audit.evidence import Finding
from foretoken.audit.statistics import Floats, Ints

SCOPE = "known faults"
TINY = 1e-300


@dataclass(frozen=True)
class Nodes:
    """What is known of n contexts: distributions ``[n, V]``.

    Attributes:
        p: the claim.
        q: the drafter.
        before: the claim one token earlier; the claim itself at the first token.
        p_mass, q_mass: ``[n, 1]``, what filters left of p and q before they were normalised; 1 without filters.
    """

    p: Floats
    q: Floats
    before: Floats
    p_mass: Floats
    q_mass: Floats


def stacked(nodes: Sequence[Nodes]) -> Nodes:
    """Contexts one after another."""
    return Nodes(*(np.concatenate([getattr(one, field.name) for one in nodes]) for field in fields(Nodes)))


@dataclass(frozen=True)
class Way:
    """A way to sample a round, as parts ``[n, V]`` of distributions.

    ``accept + reject`` sums to 1 in each row, and so does ``bonus``: then outputs have a distribution, too.

    Attributes:
        accept: probability that this token is drafted and accepted.
        reject: that the draft is rejected and this token written instead.
        bonus: that this token is written after a draft that was accepted whole.
        place: the only place in the round (0 … k) where the fault is; None for all.
    """

    accept: Floats
    reject: Floats
    bonus: Floats
    place: int | None = None


def _normalised(x: Floats, otherwise: Floats) -> Floats:
    total = x.sum(axis=1, keepdims=True)
    return np.where(total > 1e-12, x / np.maximum(total, TINY), otherwise)


def _way(n: Nodes, accept: Floats, residual: Floats, bonus: Floats | None = None) -> Way:
    """Accepted parts, and the distribution of a token that takes the place of a rejected one."""
    rest = np.maximum(1 - accept.sum(axis=1, keepdims=True), 0.0)
    return Way(accept, rest * residual, n.p if bonus is None else bonus)


def _plain(p: Floats) -> Way:
    """Tokens of that distribution, wherever they are in a round."""
    return Way(np.zeros_like(p), p, p)


def _residual(n: Nodes) -> Floats:
    return _normalised(np.maximum(n.p - n.q, 0.0), n.p)


def _tilted(p: Floats, tilt: float) -> Floats:
    return _normalised(np.where(p > 0, p ** (1 + tilt), 0.0), p)


LENIENCIES = (0.95, 0.9, 0.8, 0.5)


def _lenient(n: Nodes, k: int) -> Iterator[Way]:
    """Accepted with probability ``min(1, p / (λ q))`` (the lenience of Leviathan, Kalman and Matias 2023)."""
    for leniency in LENIENCIES:
        yield _way(n, np.minimum(n.q, n.p / leniency), _residual(n))


EPSILONS = (0.003, 0.01, 0.03)
"""A token's, where there are 8 tokens; in larger vocabularies so much less that their sum stays the same."""


def _residual_off(n: Nodes, k: int) -> Iterator[Way]:
    """The residual with an epsilon added, cut off at one, or not taken: p in its place."""
    accept, difference = np.minimum(n.p, n.q), n.p - n.q
    for epsilon in EPSILONS:
        added = np.maximum(difference, 0.0) + epsilon * 8 / n.p.shape[1]
        yield _way(n, accept, _normalised(added, n.p))
        yield _way(n, accept, _normalised(np.maximum(difference - epsilon, 0.0), n.p))
    yield _way(n, accept, n.p)


SMALL = 64
"""Most tokens of a vocabulary whose best token is drawn alone; in larger ones, the distribution is sharpened."""


def _bonus_wrong(n: Nodes, k: int) -> Iterator[Way]:
    """The bonus token from the drafter, from the distribution before, too cold or too hot, or sometimes the best."""
    accept, residual, size = np.minimum(n.p, n.q), _residual(n), n.p.shape[1]
    best = np.eye(size)[n.p.argmax(axis=1)] if size <= SMALL else _tilted(n.p, 4.0)
    uniform = np.full_like(n.p, 1 / size)
    for share, wrong in (
        *((0.9, one) for one in (n.q, n.before, _tilted(n.p, 0.25), _tilted(n.p, -0.25), best, uniform)),
        *((0.2, one) for one in (n.q, best, uniform)),
    ):
        yield _way(n, accept, residual, (1 - share) * n.p + share * wrong)


TEMPERATURES = (-0.1, -0.05, -0.025, 0.025, 0.05, 0.1)


def _temperature(n: Nodes, k: int) -> Iterator[Way]:
    """A temperature that is off by 2.5 to 10 percent."""
    for tilt in TEMPERATURES:
        yield _plain(_tilted(n.p, tilt))


def _not_normalised(n: Nodes, k: int) -> Iterator[Way]:
    """Filtered probabilities that were not normalised before they were compared, or before they were added up."""
    for p, q in ((n.p * n.p_mass, n.q), (n.p, n.q * n.q_mass), (n.p * n.p_mass, n.q * n.q_mass)):
        ratio = np.minimum(p / np.maximum(q, TINY), 1.0)
        yield _way(n, n.q * ratio, _normalised(np.maximum(p - q, 0.0), n.p))
    # Adding up probabilities until a uniform number is exceeded never gets there: some token takes what is missing.
    size = n.p.shape[1]
    least = np.where(n.p > 0, n.p, np.inf).argmin(axis=1)
    last = size - 1 - (n.p[:, ::-1] > 0).argmax(axis=1)
    for taker in (n.p.argmax(axis=1), least, last):
        p = n.p * n.p_mass
        p[np.arange(len(p)), taker] += 1 - n.p_mass[:, 0]
        yield _plain(p)


def _place(n: Nodes, k: int) -> Iterator[Way]:
    """At one place of the round alone, a distribution that is too cold or too hot, or leans to the drafter."""
    share = np.where(n.p > 0, np.minimum(n.p, n.q) / np.maximum(n.p, TINY), 0.0)
    leaning = _normalised(np.where(n.p > 0, 0.9 * n.p + 0.1 * n.q, 0.0), n.p)
    for wrong in (_tilted(n.p, 0.2), _tilted(n.p, -0.2), leaning):
        for place in range(k + 1):
            yield Way(wrong * share, wrong * (1 - share), wrong, place)


Fault = Callable[[Nodes, int], Iterator[Way]]

FAULTS: dict[str, tuple[Fault, str]] = {
    "leniency": (_lenient, "Are outputs likelier if drafts are accepted too leniently?"),
    "residual": (_residual_off, "Are outputs likelier if rejected drafts are replaced from a wrong residual?"),
    "bonus token": (_bonus_wrong, "Are outputs likelier if the token after a whole draft is wrong?"),
    "temperature off": (_temperature, "Are outputs likelier at a temperature that is off by a few percent?"),
    "not normalised": (_not_normalised, "Are outputs likelier if what filters leave is not normalised?"),
    "place in the round": (_place, "Are outputs likelier if one place of the round is wrong?"),
}
"""Directed evidence by name: its ways to sample, and its question."""

FIRST = (0, 1)
"""Tokens before the first round: none, or one that an engine samples as it reads the prompt."""


def round_ratio(accept: Floats, reject: Floats, bonus: Floats, k: int, first: int) -> Floats:
    """Likelihood ratio of outputs that were written in rounds of k draft tokens, wherever the rounds begin.

    With R_t the ratio of "the first t tokens, and a round begins there": from t, j < k accepted tokens and a
    replacement lead to ``R_{t+j+1} += R_t a_t … a_{t+j-1} r_{t+j}``, a whole draft and its bonus token to
    ``R_{t+k+1} += R_t a_t … a_{t+k-1} b_{t+k}``, and the end of the output inside a draft is summed over likewise.

    Its mean under the claim is 1: it is the probability of the tokens under a way to sample (`Way`) over that under the
    claim, and probabilities sum to 1 over the tokens. So it stays for outputs that end early, by an end token: a
    likelihood ratio of ever more tokens is a martingale, and what ends it is one of the tokens.

    Args:
        accept, reject: ``[..., k, T]``, parts of each token at each place of a round, over its probability.
        bonus: ``[..., T]``, likewise.
        k: draft tokens of a round.
        first: tokens before the first round, which are right.

    Returns:
        ``[...]``.
    """
    length = bonus.shape[-1]
    begun = np.zeros((length + 1, *bonus.shape[:-1]))
    begun[min(first, length)] = 1.0
    total = np.zeros(bonus.shape[:-1])
    for t in range(length):
        # Held finite, for infinity times a part that is 0 is no number; a smaller weight keeps the mean at most 1.
        weight = np.minimum(begun[t], 1 / TINY)
        for j in range(k + 1):
            if t + j == length:
                total = total + weight
                break
            if j == k:
                begun[t + j + 1] += weight * bonus[..., t + j]
            else:
                begun[t + j + 1] += weight * reject[..., j, t + j]
                weight = np.minimum(weight * accept[..., j, t + j], 1 / TINY)
    return total + begun[length]


def log_ratios(fault: Fault, nodes: Nodes, tokens: Ints, at: Ints, k: int) -> Floats:
    """Log-likelihood ratios of outputs under each way of a fault.

    Args:
        fault: from `FAULTS`.
        nodes: the contexts.
        tokens: ``[n, T]`` outputs.
        at: ``[n, T]``, the context of each of their tokens.
        k: draft tokens of a round.

    Returns:
        ``[n, W]``: for each way, with none and with one token before the first round.
    """
    p = nodes.p[at, tokens]
    possible = np.asarray((p > 0).all(axis=1))
    p = np.maximum(p, TINY)
    right = np.minimum(nodes.p, nodes.q)[at, tokens] / p
    accepts, rejects, bonuses = [], [], []
    for way in fault(nodes, k):
        a, r, b = (part[at, tokens] / p for part in (way.accept, way.reject, way.bonus))
        accept, reject = np.repeat(a[:, None], k, axis=1), np.repeat(r[:, None], k, axis=1)
        if way.place is not None:
            others = [j for j in range(k) if j != way.place]
            accept[:, others], reject[:, others] = right[:, None], 1 - right[:, None]
            b = b if way.place == k else np.ones_like(b)
        accepts.append(accept)
        rejects.append(reject)
        bonuses.append(b)
    parts = np.stack(accepts, axis=1), np.stack(rejects, axis=1), np.stack(bonuses, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        ratios = np.concatenate([round_ratio(*parts, k, first) for first in FIRST], axis=1)
    # An impossible output has no ratio. It has no probability either, so that leaving it out adds nothing to the mean.
    return np.where(possible[:, None], np.log(np.clip(ratios, TINY, 1 / TINY)), 0.0)


class Directed:
    """Evidence for one fault, over all parts of an audit.

    The e-value is the mean over ways of ``product over outputs of their likelihood ratio``: a mean of test martingales.

    Args:
        name: a key of `FAULTS`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.scope = name, SCOPE
        self.fault, self._question = FAULTS[name]
        self._logs: Floats | None = None
        self._outputs = 0

    def add(self, log_ratio: Floats, counts: Ints) -> None:
        """Take up outputs: their `log_ratios` ``[n, W]``, and how often each was seen ``[n]``."""
        seen = counts @ log_ratio
        self._logs = seen if self._logs is None else self._logs + seen
        self._outputs += int(counts.sum())

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return 0.0 if self._logs is None else st.log_mean_exp(self._logs)

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            self._question,
            "the distribution computed here is the claim; another way of drafting makes this blunter, not wrong",
            self.log_e,
            self._outputs,
            "sequences",
        )


ENDS = (0.5, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 2.0)


class Ends:
    """Evidence that outputs end too seldom or too often.

    At each token, with e the claimed probability of an end token: ``c`` if it came, ``(1 - c e) / (1 - e)`` if not
    (``c e`` is held below 1). Its mean is ``e c + (1 - c e) = 1`` given the tokens before: a martingale, mixed over c.
    """

    name = "end tokens"

    def __init__(self, ends: Sequence[int]) -> None:
        self.scope = SCOPE
        self._ends = sorted(set(ends))  # each counts once: configurations may list one twice
        self._logs = np.zeros(len(ENDS))
        self._tokens, self._score, self._variance = 0, 0.0, 0.0

    def add(self, probs: Floats, tokens: Ints) -> None:
        """Count tokens ``[n]`` under distributions ``[n, V]``."""
        inside = [end for end in self._ends if end < probs.shape[1]]
        e = np.clip(probs[:, inside].sum(axis=1), 0.0, 1.0)
        came = np.isin(tokens, inside)
        open_ = (e > 0) & (e < 1 - 1e-9)
        e, came = e[open_], came[open_]
        for i, c in enumerate(ENDS):
            factor = np.minimum(c, (1 + 1 / e) / 2)  # half-way to certainty at most
            self._logs[i] += float(np.log(np.where(came, factor, (1 - factor * e) / (1 - e))).sum())
        self._tokens += len(tokens)
        self._score += float((came - e).sum())
        self._variance += float((e * (1 - e)).sum())

    @property
    def log_e(self) -> float:
        """See `Evidence`."""
        return st.log_mean_exp(self._logs)

    def finding(self, threshold: float, power: float) -> Finding:
        """See `Evidence`."""
        return Finding(
            self.name,
            self.scope,
            "Do outputs end as often as they should?",
            "the probability of an end token is known from its context",
            self.log_e,
            self._tokens,
            "tokens",
            z=self._score / self._variance**0.5 if self._variance else 0.0,
        )

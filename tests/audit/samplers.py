"""Samplers of known distribution, right and wrong, to audit the audit with."""

from __future__ import annotations

import hashlib
from weakref import WeakKeyDictionary

import numpy as np

from foretoken.audit import ReferenceModel, World
from foretoken.audit.reference import contexts, probabilities, shape


def draw(probs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A token from each distribution ``[n, V]``."""
    cumulative = probs.cumsum(axis=1)
    uniforms = rng.random(len(probs))[:, None] * cumulative[:, -1:]
    return (cumulative <= uniforms).sum(axis=1)


_DIGESTS: WeakKeyDictionary[ReferenceModel, bytes] = WeakKeyDictionary()
_KNOWN: dict[tuple[bytes, tuple[int, ...]], dict[tuple[int, ...], np.ndarray]] = {}


def _known(reference: ReferenceModel, prompt: tuple[int, ...]) -> dict[tuple[int, ...], np.ndarray]:
    """Logits computed for these weights and a prompt, by output so far: the same worlds are made many times."""
    if reference not in _DIGESTS:
        weights = b"".join(weight.detach().numpy().tobytes() for weight in reference.module.parameters())
        _DIGESTS[reference] = hashlib.sha256(weights).digest()
    return _KNOWN.setdefault((_DIGESTS[reference], prompt), {})


class PlainSampler:
    """Samples from the target alone, one token at a time, in float64.

    `fault` changes distributions ``[n, V]``; its second argument is what the drafter would say.
    """

    def __init__(self, world: World, fault=None) -> None:
        self.world, self.fault = world, fault

    def __call__(self, prompt, count, num_tokens, params, seed):
        rng = np.random.default_rng(seed)
        outputs = [[] for _ in range(count)]
        known = self.world.prompts.index(tuple(prompt)) if tuple(prompt) in self.world.prompts else None
        for position in range(num_tokens):
            if known is not None and position < self.world.depth and self.fault is None and params == self.world.params:
                codes = np.zeros(count, dtype=np.int64)
                for i in range(position):
                    codes = codes * self.world.vocab_size + np.array([output[i] for output in outputs])
                probs = self.world.levels[known][position][codes]
            else:
                probs = self._probs(self.world.target_reference, prompt, outputs, params)
                if self.fault is not None and not params.greedy:
                    probs = self.fault(
                        probs, lambda now=outputs: self._probs(self.world.drafter_reference, prompt, now, params)
                    )
            for output, token in zip(outputs, draw(probs, rng), strict=True):
                output.append(int(token))
        return outputs

    def _probs(self, reference, prompt, outputs, params):
        known = _known(reference, tuple(prompt))
        missing = [list(output) for output in dict.fromkeys(map(tuple, outputs)) if output not in known]
        found = reference.scores(prompt, [[*output, 0] for output in missing]) if missing else []
        computed = {tuple(output): rows[-1] for output, rows in zip(missing, found, strict=True)}
        if params.greedy or len(outputs[0]) < self.world.depth:  # those that are asked for again
            known |= computed
        scores = np.stack([computed[key] if key in computed else known[key] for key in map(tuple, outputs)])
        return probabilities(shape(scores, params, [contexts(prompt, [*output, 0])[-1] for output in outputs]), params)


def colder(probs, drafter):
    """As with a temperature of 0.8."""
    powered = probs**1.25
    return powered / powered.sum(axis=1, keepdims=True)


def leaning(probs, drafter):
    """A fifth of the drafter mixed in."""
    return 0.8 * probs + 0.2 * drafter()


def truncated(probs, drafter):
    """The likeliest five tokens only."""
    kept = np.where(probs >= np.sort(probs, axis=1)[:, -5:-4], probs, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


def permuted(probs, drafter):
    """The two likeliest tokens change places in one context of eight."""
    result = probs.copy()
    order = np.argsort(-probs, axis=1)
    for row in range(len(probs)):
        if probs[row, 0] > probs[row, 1:].mean():
            a, b = order[row, :2]
            result[row, [a, b]] = probs[row, [b, a]]
    return result

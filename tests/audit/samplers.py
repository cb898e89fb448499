"""Samplers of known law, right and wrong, to audit the audit with."""

from __future__ import annotations

import numpy as np

from foretoken.audit import World
from foretoken.audit.law import contexts, probabilities, shape


def draw(laws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A token from each law ``[n, V]``."""
    cumulative = laws.cumsum(axis=1)
    uniforms = rng.random(len(laws))[:, None] * cumulative[:, -1:]
    return (cumulative <= uniforms).sum(axis=1)


class PlainSampler:
    """Samples from the target alone, one token at a time, in float64.

    `fault` changes laws ``[n, V]``; its second argument is what the drafter would say.
    """

    def __init__(self, world: World, fault=None) -> None:
        self.world, self.fault = world, fault

    def __call__(self, prompt, count, num_tokens, params, seed):
        rng = np.random.default_rng(seed)
        texts = [[] for _ in range(count)]
        known = self.world.prompts.index(tuple(prompt)) if tuple(prompt) in self.world.prompts else None
        for place in range(num_tokens):
            if known is not None and place < self.world.depth and self.fault is None and params == self.world.params:
                codes = np.zeros(count, dtype=np.int64)
                for i in range(place):
                    codes = codes * self.world.vocab_size + np.array([text[i] for text in texts])
                laws = self.world.levels[known][place][codes]
            else:
                laws = self._laws(self.world.target_law, prompt, texts, params)
                if self.fault is not None and not params.greedy:
                    laws = self.fault(laws, lambda now=texts: self._laws(self.world.drafter_law, prompt, now, params))
            for text, token in zip(texts, draw(laws, rng), strict=True):
                text.append(int(token))
        return texts

    def _laws(self, law, prompt, texts, params):
        scores = np.stack([rows[-1] for rows in law.scores(prompt, [[*text, 0] for text in texts])])
        return probabilities(shape(scores, params, [contexts(prompt, [*text, 0])[-1] for text in texts]), params)


def colder(laws, drafter):
    """As with a temperature of 0.8."""
    powered = laws**1.25
    return powered / powered.sum(axis=1, keepdims=True)


def leaning(laws, drafter):
    """A fifth of the drafter mixed in."""
    return 0.8 * laws + 0.2 * drafter()


def truncated(laws, drafter):
    """The likeliest five tokens only."""
    kept = np.where(laws >= np.sort(laws, axis=1)[:, -5:-4], laws, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


def permuted(laws, drafter):
    """The two likeliest tokens change places in one context of eight."""
    result = laws.copy()
    order = np.argsort(-laws, axis=1)
    for row in range(len(laws)):
        if laws[row, 0] > laws[row, 1:].mean():
            a, b = order[row, :2]
            result[row, [a, b]] = laws[row, [b, a]]
    return result

"""Copies that a draft model goes on from, in one draft: the output's distribution, and the model's KV cache."""

from __future__ import annotations

import pytest

from distributions import g_test
from foretoken.draft import Draft
from foretoken.drafters import Cascade, Drafter, DraftModel
from foretoken.drafters.per_sequence import PerSequence
from foretoken.engine.engine import Engine
from foretoken.sampling import SamplingParams
from grid import ERROR_LEVEL, OPTIONS, draw, model, target, target_distribution
from tiny import tiny_llama

VOCABULARY = 32
PROMPT = [1, 9, 4, 7, 2]


class Claims(Drafter):
    """Drafts two tokens that follow from the last one, and says that they are likely; they mostly are not."""

    name = "claims"

    def __init__(self, right: list[int] | None = None) -> None:
        self.estimates: PerSequence[list[float]] = PerSequence(list)
        self.right = right

    def propose(self, batch, limits):
        rows = []
        for sequence, limit in zip(batch.sequences, limits, strict=True):
            last, done = sequence.tokens[-1], len(sequence.tokens) - len(PROMPT)
            tokens = [(7 * last + 3) % batch.vocab_size, (5 * last + 1) % batch.vocab_size]
            if self.right is not None and done % 3:  # the first one is right, the second one in a quarter of the cases
                tokens[0] = self.right[done]
                tokens[1] = self.right[done + 1] if done % 4 == 1 else (self.right[done + 1] + 1) % batch.vocab_size
            rows.append(tokens[:limit])
            self.estimates[sequence] = [0.95, 0.9][:limit]
        return Draft.from_lists(rows, batch.device)


class Watched(DraftModel):
    """A draft model that notes what its drafts began with."""

    def __init__(self, *args):
        super().__init__(*args)
        self.begun: list[int] = []

    def propose(self, batch, limits):
        self.begun += [len(first) for first, limit in zip(batch.begun, limits, strict=False) if limit]
        return super().propose(batch, limits)


@pytest.mark.grid
@pytest.mark.parametrize(("verifier", "option"), [("token", "plain"), ("block", "penalties"), ("traversal", "top_p")])
def test_extended_copies_leave_the_targets_distribution(verifier, option):
    assert option in OPTIONS
    drafter = Watched(model("llama", 2))
    cascade = Cascade([Claims(), drafter], costs=[0.0, 0.005])
    engine = Engine(target("llama", "cascade"), cascade, verifier, max_batch_size=512)
    samples = draw(engine, option, 2_500, 5)
    assert drafter.begun.count(1) + drafter.begun.count(2) > 1_000
    assert g_test(samples, target_distribution("llama", "cascade", option)) > ERROR_LEVEL


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_copies_that_were_wrong_the_models_cache_is_right_again(temperature):
    """The draft model is the target: whatever it drafts behind right tokens is right, if its cache is."""
    params = SamplingParams(temperature=temperature, seed=3, max_new_tokens=40, ignore_eos=True)
    target, drafter, wrong = tiny_llama(seed=1), Watched(tiny_llama(seed=1)), 0
    plain = Engine(target, None, "coupled")
    for first in range(5):
        prompt = [first, *PROMPT[1:]]
        wanted = plain.generate(prompt, params).token_ids
        cascade = Cascade([Claims([*wanted, 0, 0]), drafter], costs=[0.0, 0.005])
        for event in Engine(plain.target, cascade, "coupled").stream(prompt, params, trace=True):
            accepted = [one.accepted for one in event.drafted]
            if not all(accepted):
                assert accepted.index(False) < 2  # a copy
                wrong += accepted.index(False) == 1
        assert event.completion.token_ids == wanted
    assert wrong > 2
    assert {1, 2} & set(drafter.begun)


def test_rows_with_and_without_copies_get_in_a_batch_what_they_get_alone():
    prompts = [PROMPT, [3, 3], [5, 8, 1]]
    params = [SamplingParams(seed=seed, max_new_tokens=24, ignore_eos=True) for seed in range(3)]

    def engine():
        return Engine(tiny_llama(seed=1), Cascade([Claims(), Watched(tiny_llama(seed=2))], costs=[0.0, 0.01]), "token")

    together = [one.token_ids for one in engine().generate(prompts, params)]
    assert together == [engine().generate(prompt, one).token_ids for prompt, one in zip(prompts, params, strict=True)]

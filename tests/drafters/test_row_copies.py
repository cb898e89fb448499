"""Copies in rounds of a row that go together: a drafter drafts and learns as when it is asked for each round."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from batches import VOCAB_SIZE, batch_of, sequence_of
from foretoken.draft import Draft
from foretoken.drafters import Lookup, PromptLookup, Suffix
from foretoken.drafters.row_rounds import Drafted
from foretoken.verify import Verdict

MAKERS = {
    "lookup": Lookup,
    "lookup of all requests": lambda: Lookup(global_tokens=100),
    "prompt lookup": PromptLookup,
    "suffix": Suffix,
    "suffix of all requests": lambda: Suffix(global_tokens=100),
}


def known_of(drafter, sequence):
    """What a drafter knows of a sequence."""
    if isinstance(drafter, PromptLookup):
        return drafter.matches[sequence], drafter._tables[sequence]._ends
    if isinstance(drafter, Suffix):
        return drafter.matches[sequence], drafter._histories[sequence].automaton.size
    state = drafter._sequences[sequence]
    known = state.known and (len(state.known), state.known._last, state.known._successors, state.known.rates._levels)
    return state.asked, drafter.estimates[sequence], drafter.foreseen[sequence], known


def history(drafter, least, *, together):
    """Drafts of rounds of some sequences, and what the drafter knew after each; the target is random, and copies."""
    random, generator, found = Random(7), torch.Generator().manual_seed(7), []
    for _ in range(12):
        part = [random.randrange(VOCAB_SIZE + 4) for _ in range(random.randrange(2, 9))]
        sequence = sequence_of([*part, *random.sample(part, 2), *part[: random.randrange(len(part))]])
        batch = replace(batch_of(sequence), least=(least,))
        rounds = drafter.in_row(batch, 6) if together else None
        assert (rounds is not None) == together
        for _ in range(8):
            most, verified = random.randrange(1, 9), random.random()
            if rounds is None:
                chain = drafter.propose(batch, [min(most, 6)]).listed.tokens[0]
            else:
                (chain,) = rounds.propose(most).tokens
            cut = round(verified * len(chain))  # of which a policy has some verified
            accepted = random.randrange(cut + 1)
            emitted = [*chain[:accepted], random.choice([sequence.tokens[0], random.randrange(VOCAB_SIZE)])]
            logits = torch.randn((1, cut + 1, VOCAB_SIZE), generator=generator)
            if rounds is None:
                verdict = Verdict.from_lists([list(range(1, accepted + 1))], emitted[-1:])
                drafter.observe(batch, Draft.from_lists([chain[:cut]]), verdict, logits)
            else:
                rounds.observe(Drafted(cut, accepted, emitted), logits)
            found.append((chain, repr(known_of(drafter, sequence))))
            sequence.tokens += emitted
    return found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("least", [0.0, 0.1, 0.5])
def test_drafts_and_lessons_are_those_of_calls(make, least):
    expected = history(MAKERS[make](), least, together=False)
    assert history(MAKERS[make](), least, together=True) == expected
    drafts = [chain for chain, _ in expected]
    assert any(drafts)
    assert not all(drafts)
    assert max(map(len, drafts)) == 6 or least


@pytest.mark.parametrize("least", [0.3, 0.9])
def test_a_sequence_that_is_not_worth_reading_is_not_read(least):
    drafter, sequence = Lookup(), sequence_of([1, 2, 3, 4])
    rounds = drafter.in_row(replace(batch_of(sequence), least=(least + 0.1,)), 6)
    assert rounds.propose(5).tokens == [[]]
    rounds.observe(Drafted(0, 0, [5]), torch.zeros((1, 1, VOCAB_SIZE)))
    assert drafter._sequences[sequence].known is None
    assert drafter.foreseen[sequence] == []


@pytest.mark.parametrize("make", [Lookup, Suffix])
def test_drafts_that_may_branch_are_no_chains(make):
    drafter, sequence = make(), sequence_of([1, 2, 1, 3, 1])
    batch = batch_of(sequence, trees=True)
    assert drafter.in_row(batch, 6) is None
    assert drafter.in_row(replace(batch, drawn_only=(True,)), 6) is not None  # chosen tokens don't branch there
    if make is Lookup:
        drafter.trees = False
        assert drafter.in_row(batch, 6) is not None

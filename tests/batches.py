"""Batches without an engine: sequences of given tokens, and a drafter's drafts for them."""

from __future__ import annotations

import torch

from foretoken.draft import Draft
from foretoken.drafters import Batch, Drafter
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sequence import Sequence
from foretoken.verify import Verdict

VOCAB_SIZE = 32


def sequence_of(tokens: list[int], source: list[int] | None = None, **params) -> Sequence:
    """A request with these prompt tokens; greedy unless `params` set a temperature."""
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    return Sequence(list(tokens), len(tokens), sampling, sampling.seed or 0, source)


def batch_of(*sequences: Sequence, trees: bool = False, vocab_size: int = VOCAB_SIZE) -> Batch:
    size = len(sequences)
    sampler = Sampler([one.params for one in sequences], [one.seed for one in sequences], vocab_size=vocab_size)
    return Batch(
        list(sequences),
        sampler,
        seeds=torch.tensor([one.seed for one in sequences]),
        positions=torch.tensor([len(one.tokens) for one in sequences]),
        vocab_size=vocab_size,
        shared_noise=(False,) * size,
        trees=(trees,) * size,
    )


def chain_of(drafter: Drafter, sequence: Sequence, limit: int = 8, **options) -> list[int]:
    """The tokens drafted for a row that takes chains."""
    draft = drafter.propose(batch_of(sequence, **options), [limit])
    assert draft.is_chain
    return draft.tokens[0, : int(draft.counts[0])].tolist()


def paths(draft: Draft, row: int = 0) -> list[list[int]]:
    """The tokens on the path to each node of a row; an empty list for the root."""
    found: list[list[int]] = [[]]
    count = int(draft.counts[row])
    for token, parent in zip(draft.tokens[row, :count].tolist(), draft.parents[row, :count].tolist(), strict=True):
        found.append([*found[parent], token])
    return found


def paths_of(drafter: Drafter, sequence: Sequence, limit: int) -> list[list[int]]:
    """The paths of all nodes drafted for a row that takes trees."""
    return paths(drafter.propose(batch_of(sequence, trees=True), [limit]))[1:]


def follow(drafter: Drafter, sequence: Sequence, following: dict[int, list[int]], draft: Draft, trees: bool) -> None:
    """Run one greedy round: after token t the target predicts ``following[t]``, the likeliest token first.

    The drafter observes the verdict, and the sequence is extended.
    """
    found = paths(draft)
    logits = torch.zeros((1, len(found), VOCAB_SIZE))
    for node, path in enumerate(found):
        for rank, token in enumerate(following[(path or sequence.tokens)[-1]]):
            logits[0, node, token] = 9.0 - rank
    picks = logits[0].argmax(-1).tolist()
    node, path = 0, []
    while (longer := [*found[node], picks[node]]) in found:
        node = found.index(longer)
        path.append(node)
    verdict = Verdict(torch.tensor([path], dtype=torch.int64), torch.tensor([len(path)]), torch.tensor([picks[node]]))
    drafter.observe(batch_of(sequence, trees=trees), draft, verdict, logits)
    sequence.tokens += longer

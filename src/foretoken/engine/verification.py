"""From a batch's logits to its verdicts: the sampling parameters, the verifier's rule, and the coins, put together."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

import torch
from torch import Tensor

from foretoken.draft import Draft
from foretoken.limits import current_limits
from foretoken.randomness import Stream, uniforms
from foretoken.sampling import Sampler
from foretoken.sequence import Sequence
from foretoken.verify import AnyVerifier, Verdict, decide, is_coupled
from foretoken.verify.coupled import SharedNoiseVerifier

_FOLLOW = SharedNoiseVerifier()


def decide_batch(
    verifier: AnyVerifier,
    sampler: Sampler,
    sequences: AbstractSequence[Sequence],
    draft: Draft,
    logits: Tensor,
    keep_probs: bool = False,
) -> tuple[Verdict, Tensor | None]:
    """What every row of a batch keeps of its draft, and the token after that.

    Args:
        verifier: the rule.
        sampler: of the B rows.
        sequences: the rows' texts.
        draft: ``N`` tokens a row.
        logits: ``[B, N+1, V]``, the target's, finite.
        keep_probs: return the target's law too.

    Returns:
        The verdict, and the target's law at every node, ``[B, N+1, V]`` float32, or None.
    """
    follows = is_coupled(verifier)
    # Every lossless verifier follows the target's own picks when p is one-hot.
    if follows or (sampler.all_greedy and verifier.lossless):
        rule = verifier if is_coupled(verifier) else _FOLLOW
        verdict = rule.follow(draft, sampler.picks(logits, sequences, draft, noise=follows))
        return verdict, sampler.probabilities(logits, sequences, draft) if keep_probs else None
    assert not is_coupled(verifier)
    streams = torch.tensor([int(Stream.STOP), int(Stream.NEXT)], device=logits.device)
    coins = uniforms(sampler.seeds, sampler.positions(sequences)[:, None].expand(-1, 2), streams)
    size = len(sequences)
    most = current_limits().verify_entries
    at_once = max(1, most // max(1, logits[0].numel())) if logits.device.type == "cpu" and size else max(1, size)
    verdicts, laws = [], []
    for rows, part in sampler.parts(at_once):
        drafted = draft if part is sampler else draft.part(rows)
        probs = part.probabilities(logits[rows], sequences[rows], drafted)
        verdicts.append(decide(verifier, drafted, probs, coins[rows]))
        if keep_probs:
            laws.append(probs)
    return join(verdicts), torch.cat(laws) if keep_probs else None


def join(verdicts: AbstractSequence[Verdict], order: Tensor | None = None) -> Verdict:
    """The verdicts of several batches as one of all their rows.

    Args:
        verdicts: of B rows in all.
        order: ``[B]`` int64, which of those rows each row of the result is; None for one after another.
    """
    if len(verdicts) == 1 and order is None:
        return verdicts[0]
    depth = max(verdict.path.shape[1] for verdict in verdicts)
    paths = [torch.nn.functional.pad(verdict.path, (0, depth - verdict.path.shape[1])) for verdict in verdicts]
    counts, tokens = [verdict.counts for verdict in verdicts], [verdict.tokens for verdict in verdicts]
    joined = [torch.cat(values) for values in (paths, counts, tokens)]
    return Verdict(*(values if order is None else values[order] for values in joined))

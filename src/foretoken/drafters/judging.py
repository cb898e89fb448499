"""Compares a cascade's drafts with the emitted tokens, row by row."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence

from foretoken.draft import Draft
from foretoken.policy.policy import Policy
from foretoken.policy.request import Offer, Row
from foretoken.verify.base import Verdict


def follow(tokens: list[int], parents: list[int], emitted: list[int]) -> tuple[int, bool]:
    """How many emitted tokens a path of the draft has, and whether the draft has a wrong child after them."""
    last, right, missed = 0, 0, False
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):  # parents come first
        if parent == last and right < len(emitted):
            missed = token != emitted[right]
            if not missed:
                last, right = node, right + 1
    return right, missed


def verdict_of(verdict: Verdict, draft: Draft, takes: AbstractSequence[bool]) -> Verdict:
    """The verdict for the rows that it `takes`; other rows have accepted nothing, and their first new token follows."""
    if all(takes):
        return verdict
    # Other rows' paths are cleared too: they may be longer than any draft of this drafter.
    accepted = [path if mine else [] for path, mine in zip(verdict.accepted, takes, strict=True)]
    following = [
        drafted[path[0] - 1] if path and not mine else token
        for path, token, drafted, mine in zip(
            verdict.accepted, verdict.following, draft.listed.tokens, takes, strict=True
        )
    ]
    return Verdict.from_lists(accepted, following, draft.tokens.device)


def judge_row(
    policy: Policy,
    row: Row,
    offered: AbstractSequence[tuple[Offer, list[int], list[int]]],
    emitted: list[int],
    drafted: int,
    accepted: int,
) -> None:
    """Tell the policy which tokens of a row's drafts were emitted, verified or not.

    Args:
        policy: of the cascade.
        row: of the round that is over.
        offered: its drafts that were made before the choice, with their tokens and parents.
        emitted: its tokens.
        drafted: tokens of the draft that was verified, copied ones included.
        accepted: those of them that were accepted.
    """
    longest, free = 0, policy.free
    for offer, tokens, parents in offered:
        right, missed = follow(tokens, parents, emitted)
        longest = max(longest, right)
        if not offer.reach:
            policy.judge(row.request, offer.drafter, right + missed, right, offer.match)
    if (any(free[:-1]) or offered) and row.request.asked:
        row.request.foreseen = [True] * longest + [False] * (longest < len(emitted))
    drafter, copied = row.chosen.drafter, row.chosen.copied
    if drafter >= 0 and not free[drafter] and drafted > copied and accepted >= copied:
        if policy.kinds[drafter].trees and row.trees:
            policy.judge_tree(row.request, drafter, drafted, accepted)
        else:
            policy.judge(row.request, drafter, drafted - copied, accepted - copied)

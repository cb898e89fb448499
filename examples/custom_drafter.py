"""A drafter of your own: a tree of the tokens that followed the last token before, in the engine.

    python examples/custom_drafter.py

CONTRIBUTING.md explains the parts.
"""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

import foretoken
from foretoken.draft import Draft
from foretoken.drafters import Batch, Drafter, PerSequence


@dataclass
class Followers:
    """Of each token of a sequence, the tokens that followed it, the latest first."""

    seen: int = 1
    after: dict[int, list[int]] = field(default_factory=dict)

    def update(self, tokens: list[int]) -> None:
        """Enter the tokens that are new."""
        for position in range(self.seen, len(tokens)):
            known = self.after.setdefault(tokens[position - 1], [])
            if tokens[position] in known:
                known.remove(tokens[position])
            known.insert(0, tokens[position])
        self.seen = len(tokens)


class FollowerTree(Drafter):
    """Drafts a tree: below each node the tokens that followed its token before, the latest first.

    Args:
        branches: most children of a node.
    """

    name = "follower-tree"
    trees = True

    def __init__(self, branches: int = 2) -> None:
        self.branches = branches
        self._followers = PerSequence(Followers)

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """Up to ``limits[b]`` chosen tokens in row b, breadth first; a chain where the row takes no such tree."""
        rows, links = [], []
        for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True)):
            followers = self._followers[sequence]
            followers.update(sequence.tokens)
            branches = self.branches if batch.takes_chosen_trees(row) else 1
            nodes, parents = [sequence.tokens[-1]], list[int]()
            for parent, token in enumerate(nodes):  # breadth first: the list grows meanwhile
                for child in followers.after.get(token, [])[:branches]:
                    if len(parents) < limit:
                        nodes.append(child)
                        parents.append(parent)
            rows.append(nodes[1:])
            links.append(parents)
        return Draft.from_lists(rows, batch.device, links)


def main() -> None:
    target, _ = foretoken.tiny_pair()
    params = foretoken.SamplingParams(temperature=0.0, max_new_tokens=64)
    prompt = "1, 2, 3, 1, 2, 3, 1, 2,"
    plain = foretoken.Engine(target, None).generate(prompt, params)
    engine = foretoken.Engine(target, FollowerTree(), num_speculative_tokens=8)
    completion = engine.generate(prompt, params)
    print(f"{engine.drafter} with verifier {engine.verifier.name!r}")
    print(f"mean acceptance length: {completion.stats.mean_acceptance_length:.2f} tokens a target pass")
    print(f"the target's own output: {completion.token_ids == plain.token_ids}")


if __name__ == "__main__":
    main()

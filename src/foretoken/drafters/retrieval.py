"""Retrieval: draft what follows the sequence's longest suffix in a corpus."""

from __future__ import annotations

from collections.abc import Sequence as AbstractSequence
from heapq import heappop, heappush
from pathlib import Path

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.per_sequence import PerSequence
from foretoken.errors import ParameterError
from foretoken.index import Index, fingerprint
from foretoken.models.base import LanguageModel
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence

_SAMPLES = 64
"""Most occurrences that are looked at: of more, so many at equal distances in suffix order."""

Tree = tuple[list[int], list[int]]
"""Tokens, and of each the number of its parent node, as in `Draft`."""


class Retrieval(Drafter):
    """Drafts what follows the sequence's longest suffix in a corpus (REST, He et al. 2023, arXiv 2311.08252).

    The continuations of the longest suffix that occurs in the corpus make a tree; the nodes that most of them share are
    drafted, or the chain of the most frequent successors for rows whose verifier takes no trees. The tokens are chosen,
    not drawn. The corpus never changes, so that a seed gives one output.

    Args:
        index: the file that ``foretoken index`` or `foretoken.index.build` wrote.
        max_match: longest suffix that is looked up, in tokens; None for as many as the index is sorted by.
        min_match: shortest one.

    Raises:
        ParameterError: there is no such index, it is damaged, or the lengths are out of range.
    """

    name = "retrieval"
    trees = True
    own_threads = True

    def __init__(self, index: str | Path, max_match: int | None = None, min_match: int = 2) -> None:
        self.index = Index(index)
        depth = self.index.header.depth
        self.max_match = depth if max_match is None else max_match
        check_integer("max_match", self.max_match, 1, depth, cure="the index is sorted by so many tokens")
        check_integer("min_match", min_match, 1, self.max_match, cure="use 1 for any length, at most max_match")
        self.min_match = min_match
        self.matches: PerSequence[int] = PerSequence(int)
        """See `Drafter.matches`."""

    def check_target(self, target: LanguageModel) -> None:
        """Check that the corpus was tokenised with the target's tokenizer.

        Raises:
            ParameterError: it was not.
        """
        header = self.index.header
        made = f"index {str(self.index.path)!r} was made with the tokenizer of {header.tokenizer}"
        if target.tokenizer is None:
            if header.vocab_size > target.vocab_size:
                raise ParameterError(
                    f"{made}, which has {header.vocab_size:,} tokens, and {target.name} has {target.vocab_size:,}: "
                    "make one with the target's tokenizer, 'foretoken index … --tokenizer'"
                )
            return
        ours = fingerprint(target.tokenizer)
        if ours != header.fingerprint:
            raise ParameterError(
                f"{made} (fingerprint {header.fingerprint}), and {target.name} has another vocabulary (fingerprint "
                f"{ours}): make one for it, 'foretoken index … --tokenizer MODEL'"
            )

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """Trees of continuations, empty where no suffix of the sequence occurs in the corpus."""
        rows = [
            self._continue(sequence, limit, batch.takes_chosen_trees(row), batch.vocab_size)
            for row, (sequence, limit) in enumerate(zip(batch.sequences, limits, strict=True))
        ]
        return Draft.from_lists([tokens for tokens, _ in rows], batch.device, [parents for _, parents in rows])

    def _continue(self, sequence: Sequence, limit: int, branch: bool, vocab_size: int) -> Tree:
        self.matches[sequence] = 0
        if limit < 1:
            return [], []
        length, found = self.index.find(sequence.tokens[-self.max_match :], self.max_match, self.min_match)
        step = max(1, -(-len(found) // _SAMPLES))
        endings = [self.index.after(suffix, length, limit) for suffix in found[::step]]
        tree = _most_shared(endings, limit, branch, vocab_size)
        self.matches[sequence] = length if tree[0] else 0
        return tree


def _most_shared(endings: list[list[int]], budget: int, branch: bool, vocab_size: int) -> Tree:
    """The nodes that most of some continuations share, as a tree.

    Args:
        endings: the continuations.
        budget: most nodes.
        branch: whether the tree may branch; if not, each node has its most frequent successor alone.
        vocab_size: the target's; tokens from there on are left out.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # The most frequent node first, of equal ones the one nearer to the root, then the one that was found first.
    waiting: list[tuple[int, int, int, int, int, list[list[int]]]] = []
    found = 0

    def look(continuations: list[list[int]], depth: int, parent: int) -> None:
        nonlocal found
        groups: dict[int, list[list[int]]] = {}
        for tokens_after in continuations:
            if len(tokens_after) > depth and tokens_after[depth] < vocab_size:
                groups.setdefault(tokens_after[depth], []).append(tokens_after)
        chosen = groups.items() if branch else sorted(groups.items(), key=lambda item: -len(item[1]))[:1]
        for token, group in chosen:
            found += 1
            heappush(waiting, (-len(group), depth, found, token, parent, group))

    look(endings, 0, 0)
    while waiting and len(tokens) < budget:
        _, depth, _, token, parent, group = heappop(waiting)
        tokens.append(token)
        parents.append(parent)
        look(group, depth + 1, len(tokens))
    return tokens, parents

"""As which sequences OpenVINO's attention is told of a pass's tokens: whether a token is one by itself.

Attention has three kernels, which sum in different orders: one for a sequence of several new tokens, one for sequences
of one, and one for passes that have only such, and fewer of them than threads. So in bfloat16 the third digit of a
token's scores would depend on how many drafts stand beside it. Here each token whose scores are wanted is a sequence by
itself, all of them over the row's blocks, and a sequence of no token keeps the third kernel away. Products with weights
of 16 bits in bfloat16, and of 32 bits in float32, give a token the same bits in any company. So do passes then: **with
drafts or without, alone or in a batch, a greedy output is the same to the last bit**: for chains, and up to
`Limits.alike_tokens`.

A pass over one token is faster in the second kernel: behind 60, 130, 250, 400, 800 and 1,500 tokens it takes 0.69,
0.71, 0.73, 0.78, 0.94 and 1.09 ms there, and 0.79, 0.83, 0.86, 0.92, 1.09 and 1.42 ms in the third one. Passes over 4,
6, 9 and 17 tokens behind 250, which each of them reads by itself, take 0.92 to 1.03, 1.0, 1.0 to 1.1 and 1.1 to 1.2 of
what they take as one sequence (medians; the shipped target in bfloat16, two threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foretoken.limits import current_limits
from foretoken.models.native.cache import Feed
from foretoken.models.widths import MOST_ALIKE, SHORT_PROMPT


def first_wanted(feeds: Sequence[Feed], picks: Sequence[tuple[int, int]]) -> list[int | None]:
    """Of each feed, the first of its tokens among `picks`, which rise; None where there is none."""
    found = dict(reversed(picks))
    return [found.get(number) for number in range(len(feeds))]


def stands_alone(feed: Feed, wanted: int | None, *, alike: bool, single: bool) -> bool:
    """Whether each token of a feed is a sequence by itself; else all of them are one.

    Those of a row in one pass are of one kind, for a sequence does not see what one of several tokens writes in the
    same pass. Whether a prompt's are depends on its length alone: not on what is drafted after it, nor on how much of
    it was copied.

    Args:
        feed: a chain or a tree.
        wanted: its first token whose scores are wanted, with which a prompt ends. None where none are: the prompt goes
            on, and the engine computes so little of it only if it is short.
        alike: whether scores are to be the same beside other tokens, up to `Limits.alike_tokens`.
        single: whether the token of a feed of one is a sequence by itself in any case, since that is faster.
    """
    size = len(feed.tokens)
    if feed.parents is not None:
        return False
    if single and size == 1 and wanted is not None:
        return True
    most = current_limits().alike_tokens if alike else 0
    if wanted == 0:
        return size <= MOST_ALIKE and feed.start + size <= most
    return feed.start + (size if wanted is None else wanted) < min(SHORT_PROMPT, most)


@dataclass
class Sequences:
    """The inputs of attention that say where its sequences are.

    Attributes:
        starts: of each sequence, the slots of its row before its first token.
        begins: where each one's tokens begin in the pass, and their end.
        blocks: the blocks of all of them.
        block_begins: where each one's begin, and their end.
    """

    starts: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=lambda: [0])
    blocks: list[int] = field(default_factory=list)
    block_begins: list[int] = field(default_factory=lambda: [0])

    def add(self, start: int, size: int, blocks: Sequence[int]) -> None:
        """Add one sequence of so many tokens."""
        self.starts.append(start)
        self.begins.append(self.begins[-1] + size)
        self.blocks += blocks
        self.block_begins.append(len(self.blocks))

    def add_each(self, start: int, size: int, blocks: Sequence[int]) -> None:
        """Add as many sequences of one token, each of which attends to those before it."""
        first, before, count = self.begins[-1], len(self.blocks), len(blocks)
        self.starts += range(start, start + size)
        self.begins += range(first + 1, first + 1 + size)
        self.blocks += [*blocks] * size
        self.block_begins += range(before + count, before + count * size + 1, count)

    def close(self, padding: int, scratch: int) -> None:
        """Add what no row has: so many tokens of padding, which attend to nothing, and what keeps a kernel away.

        Args:
            padding: sequences of one token.
            scratch: the block that they write to.
        """
        self.starts += [0] * padding
        self.begins += range(self.begins[-1] + 1, self.begins[-1] + 1 + padding)
        self.block_begins += range(len(self.blocks) + 1, len(self.blocks) + 1 + padding)
        self.blocks += [scratch] * padding
        if len(self.starts) == self.begins[-1]:
            self.add(0, 0, [])

    def arrays(self) -> dict[str, Any]:
        """By their names as inputs of a graph."""
        return {
            "past_lens": self.starts,
            "subsequence_begins": self.begins,
            "block_indices": self.blocks,
            "block_indices_begins": self.block_begins,
        }

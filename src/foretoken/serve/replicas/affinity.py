"""Which replica a request goes to: the one that has its prefix, unless that is too busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

MOST_BLOCKS = 200_000
"""Blocks that are remembered: some 20 MB."""

MOST_HOLDERS = 4
"""Replicas that are remembered for a block, the latest."""


class PrefixIndex:
    """Remembers which replicas were sent which blocks, the latest used ones.

    Args:
        most: blocks that are remembered.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self._most = most
        self._holders: OrderedDict[int, list[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, blocks: Sequence[int], replica: str) -> None:
        """A request with these blocks was sent to a replica."""
        for block in reversed(blocks):  # so that the end of a prefix is forgotten before its beginning
            holders = self._holders.setdefault(block, [])
            if replica in holders:
                holders.remove(replica)
            holders.append(replica)
            del holders[:-MOST_HOLDERS]
            self._holders.move_to_end(block)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def shared(self, blocks: Sequence[int], replicas: Collection[str]) -> dict[str, int]:
        """Of each of the replicas, how many of the first blocks it was sent, one after the other."""
        counts = dict.fromkeys(replicas, 0)
        for depth, block in enumerate(blocks):
            found = [one for one in self._holders.get(block, ()) if counts.get(one) == depth]
            if not found:
                break
            for one in found:
                counts[one] = depth + 1
        return counts

    def forget(self, replica: str) -> None:
        """The replica has ended."""
        for block in [block for block, holders in self._holders.items() if replica in holders]:
            self._holders[block].remove(replica)
            if not self._holders[block]:
                del self._holders[block]


def ranked(shared: Mapping[str, int], loads: Mapping[str, int], slack: int) -> list[str]:
    """All replicas, the best one first.

    First those that are at most `slack` requests busier than the least busy one, by the prefix that they have, then by
    load; after them the others, by load. So the first one has at most `slack` requests more than the least busy one.

    Args:
        shared: of each replica, blocks of the request's prefix that it has.
        loads: of each replica, requests that are with it.
        slack: requests.
    """
    least = min(loads.values(), default=0)

    def key(replica: str) -> tuple[int, int, int, str]:
        busy = loads[replica] > least + slack
        return busy, 0 if busy else -shared.get(replica, 0), loads[replica], replica

    return sorted(loads, key=key)

"""One page of metrics out of those of all replicas."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

GONE = "gone"
"""The label ``engine`` of the sums over replicas that are gone and no longer told apart."""

MOST_GONE = 100
"""Replicas that are gone and still told apart, besides as many as were there at once: some 20 kB each."""

_ENGINE = 'engine="0"'
_HEADER = re.compile(r"# (HELP|TYPE) (\S+)(?: (.*))?")
_SAMPLE = re.compile(r"(?P<name>[^\s{]+)(?P<labels>\{.*\})?\s+(?P<value>\S+)(?:\s+\S+)?")
_PARTS = ("_bucket", "_sum", "_count")
_GROWING = ("counter", "histogram", "summary")


@dataclass(frozen=True)
class _Key:
    """Which sample it is, of whichever replica.

    Attributes:
        family: whose sample.
        name: of the sample, with its labels; ``engine`` is ``0``.
    """

    family: str
    name: str


class MetricsPages:
    """Makes one page of the pages of all replicas, again and again.

    A counter's total over all replicas never goes down: where a replica doesn't answer, its counters and histograms
    stay on the page as they were told last. Its gauges don't.

    Args:
        most_gone: replicas that are gone and told apart, besides as many as were there at once. Those that were gone
            first become one sum, with ``gone`` as their ``engine``.
    """

    def __init__(self, most_gone: int = MOST_GONE) -> None:
        self._most_gone = most_gone
        self._most_there = 0
        self._headers: dict[str, dict[str, str]] = {}
        self._counters: OrderedDict[str, dict[_Key, float]] = OrderedDict()
        self._gone: dict[_Key, float] = {}

    def merged(self, pages: Iterable[tuple[str, str]]) -> str:
        """All samples, each with its replica's name as the label ``engine``, and each family's header once.

        Args:
            pages: of each replica, its name and what it counts, in Prometheus' text format.
        """
        lines: dict[str, list[str]] = {}
        there = set()
        for replica, page in pages:
            there.add(replica)
            counters = self._counters.pop(replica, {})
            for key, value in self._samples(page):
                lines.setdefault(key.family, []).append(f"{_labelled(key, replica)} {value}")
                if self._grows(key.family):  # of two pages that overtook each other, the later one counts
                    counters[key] = max(float(value), counters.get(key, 0.0))
            self._counters[replica] = counters
        self._most_there = max(self._most_there, len(there))
        self._fold()
        kept = [(name, counters) for name, counters in self._counters.items() if name not in there]
        for replica, counters in [*kept, (GONE, self._gone)]:
            for key, total in counters.items():
                lines.setdefault(key.family, []).append(f"{_labelled(key, replica)} {total}")
        families = {**dict.fromkeys(self._headers), **dict.fromkeys(lines)}
        return "".join(f"{line}\n" for family in families for line in (*self._header(family), *lines.get(family, ())))

    def _samples(self, page: str) -> Iterator[tuple[_Key, str]]:
        """A page's samples with their values; its headers are remembered."""
        family = ""
        for line in page.splitlines():
            if header := _HEADER.fullmatch(line):
                family = header[2]
                self._headers.setdefault(family, {}).setdefault(header[1], line)
            elif not line.startswith("#") and (sample := _SAMPLE.fullmatch(line)):
                name, labels = sample["name"], sample["labels"] or ""
                own = family and name in (family, *(family + part for part in _PARTS))
                yield _Key(family if own else name, _with_engine(name, labels)), sample["value"]

    def _header(self, family: str) -> Iterable[str]:
        return self._headers.get(family, {}).values()

    def _grows(self, family: str) -> bool:
        return self._headers.get(family, {}).get("TYPE", "").rpartition(" ")[2] in _GROWING

    def _fold(self) -> None:
        """Sum up those that have been gone for the longest time."""
        while len(self._counters) > self._most_there + self._most_gone:
            _, counters = self._counters.popitem(last=False)
            for key, total in counters.items():
                self._gone[key] = self._gone.get(key, 0.0) + total


def _with_engine(name: str, labels: str) -> str:
    if _ENGINE in labels:
        return name + labels
    inner = labels[1:-1].rstrip(",")
    return f"{name}{{{_ENGINE}{',' if inner else ''}{inner}}}"


def _labelled(key: _Key, replica: str) -> str:
    return key.name.replace(_ENGINE, f'engine="{replica}"', 1)

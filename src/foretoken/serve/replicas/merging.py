"""One page of metrics out of those of all replicas."""

from __future__ import annotations

from collections.abc import Iterable

_ENGINE = 'engine="0"'


def merged(pages: Iterable[tuple[str, str]]) -> str:
    """All samples, each with its replica's name as the label ``engine``, and each family's header once.

    Args:
        pages: of each replica, its name and what it counts, in Prometheus' text format.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, page in pages:
        family: tuple[list[str], list[str]] = ([], [])
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
                is_new = not family[0]
                if is_new:
                    family[0].append(line)
            elif line.startswith("# TYPE "):
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                family[1].append(line.replace(_ENGINE, f'engine="{name}"', 1))
    return "".join(f"{line}\n" for header, samples in families.values() for line in (*header, *samples))

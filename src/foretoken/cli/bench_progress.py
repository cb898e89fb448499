"""How far a benchmark is: a line that changes on a terminal, a few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.cli.screen import Screen

if TYPE_CHECKING:
    from foretoken.bench.run import Progress

_LINES = 10


@contextmanager
def watching(screen: Screen, clock: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """Show progress: on a terminal at every run, elsewhere as a line at the beginning and after each tenth of the runs.

    Args:
        screen: where to.
        clock: seconds; the time that is left is judged by it.

    Yields:
        The progress callback of `foretoken.bench.run.measure`.
    """
    from foretoken.bench.turns import seconds_left

    started = clock()

    def described(made: int, planned: int, what: str) -> str:
        left = seconds_left(made, planned, clock() - started)
        return f"{made} of {planned} runs" + (f", about {duration(left)} left" if left else "") + f": {what}"

    if screen.notes.is_terminal:
        with screen.notes.status("starting …") as status:
            yield lambda made, planned, what: status.update(described(made, planned, what))
        return
    shown = -1

    def note(made: int, planned: int, what: str) -> None:
        nonlocal shown
        tenth = made * _LINES // planned
        if tenth > shown:
            shown = tenth
            screen.note(described(made, planned, what))

    yield note


def duration(seconds: float) -> str:
    """A time, roughly: ``40 s``, ``12 min``, ``2.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""What a choice's statistics gained from one of its events to the next."""

from __future__ import annotations

from foretoken.engine.outputs import DecodeStats


class Progress:
    """Follows the statistics of one choice.

    An event's statistics are those of the moment when it is read, so that what an event added is the difference to the
    last event's. Seconds are left out.
    """

    def __init__(self) -> None:
        self._seen = DecodeStats()

    def added(self, stats: DecodeStats) -> DecodeStats:
        """What was added since the last call."""
        seen = self._seen
        if stats.drafts == seen.drafts and _drafted(stats) == _drafted(seen):  # plain rounds alone
            rounds, emitted = stats.rounds, stats.emitted
            added = DecodeStats(rounds - seen.rounds, emitted=emitted - seen.emitted)
            seen.rounds, seen.emitted = rounds, emitted
            return added
        self._seen = now = _copy(stats)  # another thread goes on counting
        return _difference(now, seen)


def _drafted(stats: DecodeStats) -> tuple[int, int, list[int], list[int]]:
    return stats.drafted, stats.accepted, stats.drafted_by_position, stats.accepted_by_position


def _copy(stats: DecodeStats) -> DecodeStats:
    return DecodeStats(
        stats.rounds,
        stats.drafts,
        stats.emitted,
        stats.drafted,
        stats.accepted,
        list(stats.drafted_by_position),
        list(stats.accepted_by_position),
    )


def _difference(now: DecodeStats, seen: DecodeStats) -> DecodeStats:
    def positions(mine: list[int], before: list[int]) -> list[int]:
        return [value - (before[at] if at < len(before) else 0) for at, value in enumerate(mine)]

    return DecodeStats(
        now.rounds - seen.rounds,
        now.drafts - seen.drafts,
        now.emitted - seen.emitted,
        now.drafted - seen.drafted,
        now.accepted - seen.accepted,
        positions(now.drafted_by_position, seen.drafted_by_position),
        positions(now.accepted_by_position, seen.accepted_by_position),
    )

"""Progress of a choice: the difference of its statistics from one event to the next."""

from __future__ import annotations

from foretoken.engine.outputs import DecodeStats

PLAIN_ROUND = DecodeStats(rounds=1, emitted=1)
"""What most events add under load. One value for all of them: don't write to it."""


class Progress:
    """Follows the statistics of one choice.

    An event's statistics are those of the moment when it is read, so that what an event added is the difference to the
    last event's. Seconds are left out.
    """

    def __init__(self) -> None:
        self._seen = DecodeStats()

    def added(self, stats: DecodeStats) -> DecodeStats:
        """What was added since the last call. Don't write to it."""
        seen = self._seen
        if (  # plain rounds alone
            stats.drafts == seen.drafts
            and stats.drafted == seen.drafted
            and stats.accepted == seen.accepted
            and stats.drafted_by_position == seen.drafted_by_position
            and stats.accepted_by_position == seen.accepted_by_position
        ):
            now_rounds, now_emitted = stats.rounds, stats.emitted
            rounds, emitted = now_rounds - seen.rounds, now_emitted - seen.emitted
            seen.rounds, seen.emitted = now_rounds, now_emitted
            return PLAIN_ROUND if rounds == emitted == 1 else DecodeStats(rounds, emitted=emitted)
        self._seen = now = _copy(stats)  # another thread goes on counting
        return _difference(now, seen)


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

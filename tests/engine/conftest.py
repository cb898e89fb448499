"""What tests of rounds that go together watch."""

from __future__ import annotations

import pytest

from foretoken.engine.drafted import DraftedRounds


@pytest.fixture
def together(monkeypatch):
    """How many rounds went together each time."""
    found, run = [], DraftedRounds.run

    def watched(rounds, *arguments):
        try:
            return run(rounds, *arguments)
        finally:
            found.append(rounds.done)

    monkeypatch.setattr(DraftedRounds, "run", watched)
    return found

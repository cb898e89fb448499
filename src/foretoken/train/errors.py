"""What can go wrong in a training run."""

from __future__ import annotations

from foretoken.errors import ForetokenError


class TrainingError(ForetokenError):
    """A run can't begin, or can't go on: the message says what to mend; what was done so far is kept."""

"""State that a drafter keeps of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from foretoken.sequence import Sequence

State = TypeVar("State")


class PerSequence(Generic[State]):
    """The state of each sequence: made on first use, dropped with the sequence.

    Keys are the `Sequence` objects themselves, held weakly. A sequence that left a batch and came back finds its state
    as it was, however many tokens it has by then.

    Args:
        make: makes the state of a sequence that has none, without arguments.
    """

    def __init__(self, make: Callable[[], State]) -> None:
        self._make = make
        self._states: WeakKeyDictionary[Sequence, State] = WeakKeyDictionary()

    def __getitem__(self, sequence: Sequence) -> State:
        """The sequence's state, made now if there is none."""
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = self._make()
        return state

    def __setitem__(self, sequence: Sequence, state: State) -> None:
        self._states[sequence] = state

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._states

    def __len__(self) -> int:
        return len(self._states)

    def get(self, sequence: Sequence) -> State | None:
        """The sequence's state, None if there is none."""
        return self._states.get(sequence)

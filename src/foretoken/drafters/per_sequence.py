"""State that a drafter keeps of each sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

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
        # A plain dictionary of references: each look into a `WeakKeyDictionary` is a call of Python's more.
        states: dict[ref[Sequence], State] = {}

        def drop(gone: ref[Sequence]) -> None:
            states.pop(gone, None)

        self._states, self._drop = states, drop

    def __getitem__(self, sequence: Sequence) -> State:
        """The sequence's state, made now if there is none."""
        state = self._states.get(ref(sequence))
        if state is None:
            state = self._states[ref(sequence, self._drop)] = self._make()
        return state

    def __setitem__(self, sequence: Sequence, state: State) -> None:
        self._states[ref(sequence, self._drop)] = state

    def __contains__(self, sequence: Sequence) -> bool:
        return ref(sequence) in self._states

    def __len__(self) -> int:
        return len(self._states)

    def get(self, sequence: Sequence) -> State | None:
        """The sequence's state, None if there is none."""
        return self._states.get(ref(sequence))

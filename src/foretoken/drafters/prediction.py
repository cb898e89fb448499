"""Predicted outputs: drafts copied from the output that the user expects."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as AbstractSequence

from foretoken.draft import Draft
from foretoken.drafters.base import Batch, Drafter
from foretoken.drafters.per_sequence import PerSequence

_CONTEXT = 4  # output tokens that a place is recognised by; more found no better ones (benchmarks/prediction.py)
_NEARBY = 64  # places on either side that are looked at: bounds the time of a round
_GUESSES = 2  # tokens after an agreement for which a place is assumed: 8% of such drafts begin right, fewer later ones
_BEGINNING = 3  # matching tokens that the beginning of an output counts as: the rates there were alike


class Cursor:
    """A position in a prediction that follows the output.

    While the output agrees with the prediction the cursor moves along. After a token that differs, the cursor is put
    after the place in the prediction that agrees with most of the last 4 output tokens; of several such places the
    nearest one, where places before the last agreement count as four times as far. So it recovers after an insertion, a
    deletion or a replacement, and may copy a passage again. Where the last token does not occur in the prediction, it
    is assumed to replace one token.

    Args:
        prediction: token ids.
    """

    def __init__(self, prediction: AbstractSequence[int]) -> None:
        self._prediction = prediction
        self._places: dict[int, list[int]] = {}  # of each token, the positions after it
        for end, token in enumerate(prediction, start=1):
            self._places.setdefault(token, []).append(end)
        self._recent: list[int] = []  # the last output tokens
        self._agreed = self._since = 0  # where the last agreement ended, and output tokens since then
        self.position = 0
        """Position of the token that is expected next; the prediction's length at its end."""
        self.match = _BEGINNING
        """How many of the last output tokens agree with those before the position."""

    def extend(self, tokens: AbstractSequence[int]) -> None:
        """Follow tokens that were emitted."""
        for token in tokens:
            self._recent = [*self._recent[1 - _CONTEXT :], token]
            if self.position < len(self._prediction) and self._prediction[self.position] == token:
                self.position += 1
                self.match += 1
                self._agreed, self._since = self.position, 0
            else:
                self._since += 1
                self._find(token)

    def draft(self, limit: int) -> list[int]:
        """The next tokens of the prediction; none where the output has left it, and nothing of it is recognised."""
        if not self.match and self._since > _GUESSES:
            return []
        return list(self._prediction[self.position : self.position + limit])

    def _find(self, token: int) -> None:
        assumed = min(self._agreed + self._since, len(self._prediction))
        places = self._places.get(token, [])
        if len(places) > 2 * _NEARBY:
            middle = bisect_left(places, assumed)
            places = places[max(middle - _NEARBY, 0) : middle + _NEARBY]
        self.position, self.match = assumed, 0
        nearest = 0
        for place in places:
            match = self._agreement(place)
            distance = place - self._agreed if place >= self._agreed else 4 * (self._agreed - place)
            if (match, -distance) > (self.match, -nearest):
                self.position, self.match, nearest = place, match, distance

    def _agreement(self, place: int) -> int:
        """How many of the last output tokens stand before a place in the prediction."""
        match = 0
        for at, token in zip(range(place - 1, -1, -1), reversed(self._recent), strict=False):
            if self._prediction[at] != token:
                break
            match += 1
        return match


class Prediction(Drafter):
    """Drafts the next tokens of `Sequence.prediction`, in rows that have one.

    A chain of chosen tokens. `matches` is 1 for an assumed place, and one more for each output token before it that
    agrees with the prediction: acceptance is measured by it. A `Cascade` chooses between this drafter and the others.

    Takes some 100 bytes a token of the predictions of running sequences.
    """

    name = "prediction"
    own_threads = True

    def __init__(self) -> None:
        self.matches: PerSequence[int] = PerSequence(int)
        self._states: PerSequence[_State] = PerSequence(_State)

    def propose(self, batch: Batch, limits: AbstractSequence[int]) -> Draft:
        """The prediction from the cursor on; nothing at its end and where there is none."""
        rows: list[list[int]] = []
        for sequence, limit in zip(batch.sequences, limits, strict=True):
            if not sequence.prediction or limit <= 0:
                rows.append([])
                continue
            state, output = self._states[sequence], len(sequence.tokens) - sequence.prompt_length
            if state.cursor is None or output < state.seen:
                state.cursor, state.seen = Cursor(sequence.prediction), 0
            state.cursor.extend(sequence.tokens[sequence.prompt_length + state.seen :])
            state.seen = output
            tokens = state.cursor.draft(limit)
            self.matches[sequence] = 1 + state.cursor.match
            rows.append(tokens[: next((n for n, token in enumerate(tokens) if token >= batch.vocab_size), len(tokens))])
        return Draft.from_lists(rows, batch.device)


class _State:
    """What is kept of one sequence: a cursor, and how many output tokens it has followed."""

    def __init__(self) -> None:
        self.cursor: Cursor | None = None
        self.seen = 0

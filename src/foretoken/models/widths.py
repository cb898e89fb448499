"""Pass widths: how many tokens a pass is padded to, where a runtime is faster at some widths and at the last one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

from foretoken.context import Holding

_LEAST_OF_LARGE = 4
"""Passes over fewer tokens are padded to so many where many weights are bfloat16.

oneDNN's kernel for AVX-512 multiplies a matrix with four rows faster than with one or two: it read 34 GB/s of weights
for four, 29 for one and 26 for two on a machine whose memory gives 36 (and 41, 33 and 28 where it gives 59).
"""

LEAST_PADDED = 100_000_000
"""Bytes of weights from which on that is so. Weights that stay in the processor's caches are fastest with one row:
17 MB took 1.2 ms, and 1.6 ms with four."""

_PATIENCE, _PATIENCE_OF_LARGE = 28, 4
"""Padding, in tokens, that is spent before a pass of another width than the last one; see `PassWidths`.

A pass of another width costs 25 to 60 % more than one of the same: 1.2 ms of 2, where another token costs 0.06 ms, with
17 MB of weights; 5 ms of 37, where it costs 1.2 ms or more, with 900 MB.
"""


def patience_for(weight_bytes: int) -> int:
    """The patience of `PassWidths` for a model of so many bytes of weights."""
    return _PATIENCE_OF_LARGE if weight_bytes >= LEAST_PADDED else _PATIENCE


def least_for(weight_bytes: int, *, bfloat16: bool) -> int:
    """The least width of `PassWidths` for a model of so many bytes of weights."""
    return _LEAST_OF_LARGE if weight_bytes >= LEAST_PADDED and bfloat16 else 1


WIDE = 8
"""Tokens of a row in a pass from which on scores, keys and values do not depend on how many there are, where a backend
rounds alike otherwise. On OpenVINO attention rounds otherwise where a row has a single token, or its tokens are
sequences by themselves (`foretoken.models.native.sequences`), and layers of rounded weights where a pass has up to
four: scores differ in their third digit then, enough for a seed to give another output."""

SHORT_PROMPT = 32
"""Tokens of the longest prompt whose tokens are sequences by themselves on OpenVINO, as drafts are. Longer prompts are
rounded otherwise: where a seed must give one output, neither kind may copy from the other."""

MOST_ALIKE = 32
"""Tokens of a row in a pass, at most, that are rounded as tokens by themselves on OpenVINO where scores of all are
wanted: more are a prompt's."""

_own: ContextVar[int] = ContextVar("own_widths", default=0)


def own_widths(rows: int) -> AbstractContextManager[None]:
    """Have passes be as wide as their tokens, whatever ran before, where results depend on it (`PassWidths`).

    An engine does so in rounds with a request whose seed must give one output, and whose output depends on its drafts.

    Args:
        rows: how many there are: passes over a token of each are among these; 0 for no such request.
    """
    return Holding(_own, rows) if rows else nullcontext()


class PassWidths:
    """Chooses the width of a graph's passes, in tokens, so that most are as wide as the pass before.

    The runtime prepares every operation anew when the width changes, which may take as long as the pass. A pass over
    more tokens than the last width is as wide as it must be. One over fewer is padded to the last width, until the
    padding since the last pass that filled it has cost as much as a change. The speculation policy knows more, and
    says how wide the next pass is to be (`hold`). Results do not depend on the width but for rounding: the runtime may
    sum in another order. That is of no account but in rounds with `own_widths`.

    Args:
        patience: tokens of padding that are spent on one width; never more in one pass, unless it is held.
        least: no pass is narrower.
        tells: passes over up to so many tokens may be rounded otherwise where they are padded; so may those over a
            single token of each row.

    Attributes:
        last: the width of the last pass, narrow ones included; 0 before the first.
        padding: tokens of padding in all passes so far, without those of passes as wide as `least`; it only grows.
        changes: passes so far that were not as wide as the one before; likewise.
        narrow: widths, in rising order, of which passes over one row have graphs of their own. A change between them
            costs something, too: what lies between layers, and the code of each layer, are others in the processor's
            caches, and the weights, too, where graphs hold them by themselves (`foretoken.models.native.branching`).
    """

    def __init__(self, patience: int, least: int = 1, *, tells: int = 1) -> None:
        self.narrow: tuple[int, ...] = ()
        self._tells = tells
        self._planned = 0  # of these, for the next pass
        self._patience, self.least = patience, least
        self.last = self._spent = self._most = self._held = 0
        self.padding = self.changes = 0

    def hold(self, width: int) -> None:
        """Have the next pass be as wide as this, if it has no more tokens."""
        self._held = width

    def leave(self, tokens: int, passes: int) -> None:
        """Hold the next pass to its tokens if so many passes of them would else take more padding than a change does.

        Args:
            tokens: of each of the passes.
            passes: how many follow each other, of which nothing else is known.
        """
        if (self.last - tokens) * passes > self._patience:
            self.hold(max(tokens, self.least))

    def plan(self, tokens: int, width: int, *, alone: bool = False) -> tuple[int, bool]:
        """Hold the next pass, over so many tokens, to a width; to none with 0, where the patience decides.

        Args:
            tokens: of the pass.
            width: that it is to have.
            alone: they are of one row.

        Returns:
            Tokens that it takes as long as: those, or its width if it is padded beyond the least one. And whether it is
            not as wide as the last pass.
        """
        exact = next((size for size in self.narrow if size >= tokens), 0) if alone else 0
        if exact:
            wanted = tokens if self._is_own(tokens) else max(tokens, width)
            self._planned = next((size for size in self.narrow if size >= wanted), exact)
            return self._planned, self._planned != self.last
        if width:
            self.hold(max(width, tokens, self.least))
        wide = self.peek(tokens)
        return wide if wide > self.least else tokens, wide != self.last

    def narrow_for(self, tokens: int) -> int:
        """Which of the `narrow` widths the next pass has, over so many tokens of one row; 0 for none of them.

        A width that was planned is for this pass alone, whether it fits or not.
        """
        planned, self._planned = self._planned, 0
        exact = next((size for size in self.narrow if size >= tokens), 0)
        width = planned if exact and planned >= tokens else exact
        if width:
            self.padding += width - tokens
            self.take(width)
        return width

    def take(self, width: int) -> None:
        """The next pass has this width, whatever was planned."""
        self.hold(0)
        self.changes += width != self.last
        self.last, self._spent, self._most = width, 0, 0

    def peek(self, tokens: int) -> int:
        """What `fit` would return; nothing changes."""
        own, tokens = self._is_own(tokens), max(tokens, self.least)
        if own:
            return tokens
        if max(self._held, tokens) >= self.last or self._held >= tokens:
            return max(self._held, tokens)
        if self._would_spend(tokens) <= self._patience:
            return self.last
        most = max(self._most, tokens)
        return most if most - tokens <= self._patience else tokens

    def fit(self, tokens: int) -> int:
        """The width of the next pass, over so many tokens."""
        width = self.peek(tokens)
        self.padding += width - tokens if width > self.least else 0
        tokens = max(tokens, self.least)
        self.changes += width != self.last
        if width == self.last and self._held < tokens < width:
            self._spent, self._most = self._would_spend(tokens), max(self._most, tokens)
        else:
            self.last, self._spent, self._most = width, 0, 0
        self._held = 0
        return width

    def _is_own(self, tokens: int) -> bool:
        """Whether a pass over so many tokens may not be padded."""
        rows = _own.get()
        return rows > 0 and tokens <= max(rows, self._tells)

    def _would_spend(self, tokens: int) -> int:
        """Padding since the last pass that filled the width, that of a pass over so many tokens included."""
        return self._spent + self.last - tokens

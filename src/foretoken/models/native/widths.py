"""Pass widths: how many tokens a pass is padded to, since OpenVINO is faster at some widths and at the last one."""

from __future__ import annotations

from foretoken.models.native.paging import BLOCK

_FEW_ROWS, _PADDED_ROWS = 2, 4
"""Passes over so few tokens are padded to so many where many weights are bfloat16.

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


def fastest_rows(tokens: int) -> int:
    """The fewest rows, at least `tokens`, that oneDNN multiplies large bfloat16 matrices with at full speed."""
    return _PADDED_ROWS if tokens <= _FEW_ROWS else tokens


class PassWidths:
    """Chooses the width of a graph's passes, in tokens, so that most are as wide as the pass before.

    The runtime prepares every operation anew when the width changes, which may take as long as the pass. A pass over
    more tokens than the last width is as wide as it must be. One over fewer is padded to the last width, until the
    padding since the last pass that filled it has cost as much as a change. Results do not depend on the width but for
    rounding: the runtime may sum in another order.

    Args:
        patience: tokens of padding that are spent on one width; never more in one pass.
    """

    def __init__(self, patience: int) -> None:
        self._patience = min(patience, BLOCK - _PADDED_ROWS)  # padding has one block of slots
        self._width = self._spent = self._most = 0

    def fit(self, tokens: int) -> int:
        """The width of the next pass, over so many tokens."""
        width, _ = self.peek(tokens)
        if tokens >= self._width or self._would_spend(tokens) > self._patience:
            self._width, self._spent, self._most = width, 0, 0
        else:
            self._spent, self._most = self._would_spend(tokens), max(self._most, tokens)
        return width

    def peek(self, tokens: int) -> tuple[int, bool]:
        """What `fit` would return, and whether that is another width than the last one; nothing changes."""
        width = max(self._width, tokens)
        if self._would_spend(tokens) > self._patience:
            most = max(self._most, tokens)
            width = most if most - tokens <= self._patience else tokens
        return width, width != self._width

    def _would_spend(self, tokens: int) -> int:
        """Padding since the last pass that filled the width, that of a pass over so many tokens included."""
        return self._spent + self._width - tokens if tokens < self._width else 0

"""The rows of the target's KV cache: which request each belongs to, and which prefixes are copied between them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from itertools import count

from foretoken.engine.row import Row
from foretoken.limits import DEFAULT_LIMITS
from foretoken.models.base import Cache, LanguageModel
from foretoken.models.widths import SHORT_PROMPT, WIDE
from foretoken.sequence import shared_prefix_length

_versions = count()


@dataclass(eq=False)
class _Slot:
    """One row of the KV cache.

    Attributes:
        tokens: the request's own list, which grows; the cache row holds a prefix of it. Empty if it must not be copied
            from.
        row: the request; None once it has left.
        donor: the slot whose prefix this one copies as soon as it is cached; None if it waits for none.
        shared: tokens of that prefix.
        is_fresh_copy: it began with a copy, and no round has shown that the copy is good.
        prefilled: leading tokens whose keys and values were computed by passes over a prompt.
        prompt: tokens of the request's prompt.
    """

    tokens: list[int]
    row: Row | None
    donor: _Slot | None = None
    shared: int = 0
    is_fresh_copy: bool = False
    prefilled: int = 0
    prompt: int = 0


class PrefixCache:
    """The target's KV cache while rows join and leave, with copies of shared prefixes.

    A request whose prompt begins like the tokens of another one copies the KV cache of that prefix instead of
    computing it. Where the other one has not cached it yet, the request waits. A slot waits only for one that stands
    before it in the list, and leaving keeps the order: so no two wait for each other, and the first waits for none.
    When the last request has left, its cache rows stay until others join, which may copy from them.

    Keys and values of decoded tokens are rounded differently from those of prompt tokens. So a request whose seed must
    give one output copies those of prompt tokens alone, and not up to the end of its prompt: its last pass over the
    prompt is then rounded as if nothing had been copied (`WIDE`). Nor does it copy fewer than `SHORT_PROMPT` tokens:
    short prompts may be rounded otherwise than long ones, and so copy nothing from each other.

    Args:
        model: whose KV cache it is.
        shares: whether prefixes are copied at all.
        min_shared_prefix: fewest tokens that are copied.
        reproducible: whether a request's seed must give one output.

    Attributes:
        cache: the KV cache; row i belongs to ``rows[i]`` while there are rows.
        version: changes whenever rows do.
        rows: the running requests.
    """

    def __init__(
        self,
        model: LanguageModel,
        shares: bool,
        min_shared_prefix: int = DEFAULT_LIMITS.shortest_shared_prefix,
        reproducible: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self._model = model
        self._shares = shares and model.shares_prefixes
        self._min_shared_prefix = min_shared_prefix
        self._reproducible = reproducible
        self.clear()

    def clear(self) -> None:
        """Drop all rows and everything cached."""
        self.version = next(_versions)
        self.cache: Cache = self._model.open(0)
        self.rows: list[Row] = []
        self._slots: list[_Slot] = []

    def join(self, rows: AbstractSequence[Row]) -> None:
        """Append cache rows for new requests: copies of cached prefixes where possible, else empty ones."""
        lengths = dict(zip(self._slots, self.cache.lengths.tolist(), strict=True))
        joined: list[_Slot] = []
        sources: list[tuple[_Slot | None, int | None]] = []
        for row in rows:
            slot = _Slot(row.sequence.tokens if row.sequence.source is None else [], row)
            slot.prompt = len(slot.tokens)
            donor, shared = self._best_donor(slot, [*self._slots, *joined], lengths)
            slot.prefilled = max(0, len(slot.tokens) - WIDE)
            if donor is not None and shared > donor.prefilled:
                slot.prefilled = min(slot.prefilled, donor.prefilled)
            if donor is not None and lengths.get(donor, 0) >= shared:
                slot.is_fresh_copy, row.stats.cached = True, shared
                sources.append((donor, shared))
            else:
                slot.donor, slot.shared = donor, shared
                sources.append((None, 0))
            joined.append(slot)
        staying = self._slots if self.rows else []
        self._arrange([*staying, *joined], [*((slot, None) for slot in staying), *sources])

    def _best_donor(
        self, slot: _Slot, others: AbstractSequence[_Slot], lengths: dict[_Slot, int]
    ) -> tuple[_Slot | None, int]:
        """The slot with the longest prefix to copy, the first of equal ones, and the tokens of that prefix."""
        best: tuple[_Slot | None, int] = None, 0
        if not self._shares or len(slot.tokens) <= self._min_shared_prefix:
            return best
        reproducible = slot.row is not None and self._reproducible(slot.row)
        least = max(self._min_shared_prefix, SHORT_PROMPT) if reproducible else self._min_shared_prefix
        most = len(slot.tokens) - (WIDE if reproducible else 1)
        for other in others:
            shared = min(shared_prefix_length(slot.tokens, other.tokens, self._min_shared_prefix), most)
            if other.row is None:  # it will cache no more
                shared = min(shared, lengths[other])
            if reproducible:
                shared = min(shared, other.prefilled)
            if self._model.rounds_alike and shared <= other.prompt and _is_short(slot) != _is_short(other):
                continue  # of prompt tokens alone, which this prompt would have rounded otherwise
            if shared >= least and shared > best[1]:
                best = other, shared
                if shared == most:  # no other slot shares more
                    break
        return best

    def copy(self) -> None:
        """Give waiting rows their prefixes, of donors that have cached them by now."""
        if not any(slot.donor for slot in self._slots):
            return
        lengths = dict(zip(self._slots, self.cache.lengths.tolist(), strict=True))
        sources: list[tuple[_Slot | None, int | None]] = [(slot, None) for slot in self._slots]
        for index, slot in enumerate(self._slots):
            if slot.donor is None:
                continue
            if slot.donor not in lengths:
                slot.donor = None
            elif lengths[slot.donor] >= slot.shared:
                sources[index] = slot.donor, slot.shared
                slot.donor, slot.is_fresh_copy = None, True
                if slot.row is not None:
                    slot.row.stats.cached = slot.shared
        self._arrange(self._slots, sources)

    def leave_last(self, ended: AbstractSequence[bool]) -> None:
        """Have the rows whose prompt was cached up to the root compute its last token along with it, see `_again`."""
        if any(ended) and self._model.rounds_alike:
            both = zip(self._slots, ended, strict=True)
            self._arrange(self._slots, [(slot, slot.prompt - 1 if end else None) for slot, end in both])

    def waiting(self) -> list[bool]:
        """Of each row, whether it waits for a prefix."""
        return [slot.donor is not None for slot in self._slots]

    def awaited(self) -> list[bool]:
        """Of each row, whether others wait for its prefix."""
        donors = {slot.donor for slot in self._slots}
        return [slot in donors for slot in self._slots]

    def is_fresh_copy(self, row: Row) -> bool:
        """Whether the row began with a copy that no round has shown to be good."""
        return self._slots[self.rows.index(row)].is_fresh_copy

    def confirm(self, rows: AbstractSequence[Row]) -> None:
        """A round gave these rows usable scores: what they have copied is good."""
        for slot in self._slots:
            if slot.is_fresh_copy and slot.row in rows:
                slot.is_fresh_copy = False

    def recompute(self, rows: AbstractSequence[Row]) -> None:
        """Empty the cache rows of these requests: their copies turned out to be unusable."""
        sources: list[tuple[_Slot | None, int | None]] = []
        for slot in self._slots:
            if slot.row is not None and slot.row in rows:
                slot.is_fresh_copy, slot.row.stats.cached = False, 0
                sources.append((None, 0))
            else:
                sources.append((slot, None))
        self._arrange(self._slots, sources)

    def remove_finished(self) -> bool:
        """Let finished requests leave; whether there were any."""
        if not any(row.finished for row in self.rows):
            return False
        staying = [slot for slot in self._slots if slot.row is not None and not slot.row.finished]
        if staying:
            self._arrange(staying, [(slot, None) for slot in staying])
            return True
        for slot in self._slots:
            if slot.row is not None and slot.row.error is not None:
                slot.tokens = []
            slot.row = slot.donor = None
        self.rows = []
        return True

    def _arrange(
        self, slots: AbstractSequence[_Slot], sources: AbstractSequence[tuple[_Slot | None, int | None]]
    ) -> None:
        """Make these slots the rows of the cache.

        Args:
            slots: in the order of the rows.
            sources: of each, the present slot that it begins with, None for an empty one, and how many of its tokens it
                takes, None for all.
        """
        self.version = next(_versions)
        indices = {slot: index for index, slot in enumerate(self._slots)}
        again = [self._again(slot, keep) for slot, (_, keep) in zip(slots, sources, strict=True)]
        self.cache.select(
            [-1 if source is None else indices[source] for source, _ in sources],
            [keep if keep is None else keep - len(tokens) for (_, keep), tokens in zip(sources, again, strict=True)],
        )
        if any(again):
            self.cache.defer_prefill(again)
        self._slots = list(slots)
        self.rows = [slot.row for slot in slots if slot.row is not None]

    def _again(self, slot: _Slot, keep: int | None) -> list[int]:
        """Of the tokens that a row copies, the last one if the row's first pass is to compute it along with the root.

        Two tokens of a prompt are rounded as all of it in one pass; the root alone is not.
        """
        whole = keep is not None and keep == slot.prompt - 1 and not _is_short(slot)
        alike = self._model.rounds_alike and self._model.prefills_with_decode
        return slot.tokens[slot.prompt - 2 : slot.prompt - 1] if whole and alike else []


def _is_short(slot: _Slot) -> bool:
    return slot.prompt <= SHORT_PROMPT

"""Limits: the sizes at which work is split, or takes another way.

None of them changes what is generated: each chooses between ways that give the same tokens, by time or memory. They
stand in one place so that tests can make them small enough for every way to be taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from foretoken.errors import ParameterError

MAX_SPECULATIVE_TOKENS = 256
"""Most draft tokens of a round, nodes of a tree included: what a user may ask for, and what memory is planned for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes at which work is split or takes another way; all at least 1.

    Attributes:
        prefill_tokens: most tokens of a row in one prefill pass. Bounds the memory of activations and masks.
        shortest_shared_prefix: fewest tokens of a common prefix that are copied from another row's KV cache instead of
            computed again.
        verify_entries: most probabilities (rows × nodes × vocabulary) that are verified at once on a CPU. A few rows at
            a time stay in its cache, and in memory that the allocator does not give back in between.
        one_thread_logits: most logits of a round that one thread goes through about as fast as several.
        scalar_uniforms: most uniforms that are computed as plain integers, one after another.
        noise_blocks: most blocks of Philox (four words of noise each) that are computed at once on a CPU.
        noise_numbers: numbers of shared noise made at a time before they are added to scores and let go of.
        block: entries of a vocabulary that are summed, or searched for the largest, together.
        topk_block: the same for the k largest.
        topk_most: k above which torch's own top-k is as fast.
        topk_ties: entries beyond the k-th that are looked at for ties before whole rows are sorted.
        window: most probable tokens that top-p looks at before it goes through whole rows.
        window_ties: tokens beyond the k-th that top-k looks at for ties before it goes through whole rows.
        proof_entries: numbers of a table that `foretoken.verify.exact` works on at once.
    """

    prefill_tokens: int = 512
    shortest_shared_prefix: int = 32
    verify_entries: int = 1 << 20
    one_thread_logits: int = 4_000_000
    scalar_uniforms: int = 8
    noise_blocks: int = 1 << 13
    noise_numbers: int = 1 << 17
    block: int = 256
    topk_block: int = 64
    topk_most: int = 128
    topk_ties: int = 8
    window: int = 128
    window_ties: int = 16
    proof_entries: int = 4_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(f"limit {field.name} is {value!r}: give an integer of at least 1")


DEFAULT_LIMITS = Limits()

_current: ContextVar[Limits] = ContextVar("limits", default=DEFAULT_LIMITS)


def current_limits() -> Limits:
    """The limits in force: those of the innermost `use_limits`, else the defaults."""
    return _current.get()


@contextmanager
def use_limits(chosen: Limits) -> Iterator[None]:
    """Run with other limits; an engine does so with its own in each of its steps."""
    token = _current.set(chosen)
    try:
        yield
    finally:
        _current.reset(token)

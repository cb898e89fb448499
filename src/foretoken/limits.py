"""Limits: the sizes at which work is split, or another code path is taken.

None of them changes the output: each chooses between code paths that give the same tokens, by time or memory (those of
`host_logits`, `alike_tokens` and `prefill_tokens` round differently). Only with `forced_tokens`, which bounds drafts, a
seed may give another output. They are in one place so that tests can make them so small that every code path runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from foretoken.context import Holding
from foretoken.errors import ParameterError, shown

MAX_SPECULATIVE_TOKENS = 256
"""Most draft tokens (tree nodes included) in a round: the upper limit of num_speculative_tokens and of memory plans."""
TENTATIVE = 1 + MAX_SPECULATIVE_TOKENS
"""Tokens of a row in a KV cache beyond its sequence: the root and the draft after it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes at which work is split or another code path is taken; all at least 1.

    Attributes:
        prefill_tokens: most tokens of a row in one prefill pass. Bounds the memory of activations and masks.
        shortest_shared_prefix: length from which a common prefix is copied from another row's KV cache instead of
            computed again.
        alike_tokens: tokens of a sequence up to which OpenVINO gives a token the same scores to the last bit whatever
            stands beside it in a pass (`foretoken.models.native.sequences`). Attention takes longer for it, the more so
            the longer the sequence: behind 250 tokens passes over 6 and 17 take 1.0 and 1.1 to 1.2 of what they take
            without; behind 800 tokens 1.1 to 1.2 and 1.2 to 1.5.
        verify_entries: most probabilities (rows × nodes × vocabulary) that are verified at once on a CPU. A few rows at
            a time fit in the processor's cache, and the allocator reuses their memory.
        one_thread_logits: most logits of a round for which one thread is about as fast as several.
        host_logits: most logits of a round that are brought to the CPU where a GPU runs the target. Processing them
            there takes less time than launching a GPU's operators: 0.8 of it with 6 million logits of 32 rows.
        scalar_uniforms: most uniforms that are computed as plain integers, one after another.
        scalar_rows: most rows that tokens are drawn from one after another.
        noise_blocks: most blocks of Philox (four words of noise each) that are computed at once on a CPU.
        noise_numbers: values of shared noise that are generated at a time before they are added to scores and freed.
        block: entries of a vocabulary whose sum or maximum is computed together.
        topk_block: the same for the k largest.
        topk_most: k above which torch's own top-k is as fast.
        topk_whole: entries (rows × vocabulary) up to which torch's own top-k is as fast, too: right after a pass the
            processor's caches are empty, for which five operators pay more than one (0.2 ms for 70,000 entries).
        topk_ties: entries beyond the k-th that are checked for ties before whole rows are sorted.
        window: number of most probable tokens in which top-p is tried before it is applied to whole rows.
        window_ties: tokens beyond the k-th that top-k checks for ties before it is applied to whole rows.
        prediction_tokens: most tokens of a request's predicted output; longer ones are refused.
        plain_passes: most passes of a round in which nothing is drafted, where they take little time
            (`foretoken.engine.plain`): what else a round does is done once for all of them. Half as many rounds of a
            single row with drafts go together (`foretoken.engine.drafted`).
        untold_times: how many times as many passes, where nobody reads tokens before all requests are finished.
        forced_tokens: most tokens forced by a grammar that are verified in one round. A request with a seed and a
            grammar whose output depends on its drafts may get another output with another limit, from the same
            distribution.
        proof_entries: probabilities (drafts × nodes × vocabulary) that `foretoken.verify.exact` processes at once.
    """

    prefill_tokens: int = 512
    shortest_shared_prefix: int = 32
    alike_tokens: int = 256
    verify_entries: int = 1 << 20
    one_thread_logits: int = 4_000_000
    host_logits: int = 6_500_000
    scalar_uniforms: int = 24
    scalar_rows: int = 4
    noise_blocks: int = 1 << 13
    noise_numbers: int = 1 << 17
    block: int = 256
    topk_block: int = 64
    topk_most: int = 128
    topk_whole: int = 80_000
    topk_ties: int = 8
    window: int = 128
    window_ties: int = 16
    prediction_tokens: int = 1 << 16
    plain_passes: int = 16
    untold_times: int = 4
    forced_tokens: int = 32
    proof_entries: int = 4_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ParameterError(f"limit {field.name} is {value!r}: give an integer of at least 1")


DEFAULT_LIMITS = Limits()


def check_limits(value: object) -> Limits:
    """The value, checked to be `Limits`.

    Raises:
        ParameterError: it is not.
    """
    if not isinstance(value, Limits):
        raise ParameterError(f"limits is {shown(value)}: give foretoken.Limits(…), or leave it out")
    return value


_current: ContextVar[Limits] = ContextVar("limits", default=DEFAULT_LIMITS)


def current_limits() -> Limits:
    """The limits in force: those of the innermost `use_limits`, else the defaults."""
    return _current.get()


def use_limits(chosen: Limits) -> AbstractContextManager[None]:
    """Run with other limits; an engine does so with its own limits in each of its steps."""
    return Holding(_current, chosen)

"""The decode loops of an engine: made with its present settings, and kept between calls for their KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, Literal

from foretoken.drafters import Cascade, Drafter, NoDrafter, Vocab
from foretoken.drafters.factory import make_drafter
from foretoken.drafters.tree_plan import TreePlan
from foretoken.engine.cache_budget import Budget
from foretoken.engine.calibration import calibrate
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.membership import MakeSampler
from foretoken.engine.row import Row
from foretoken.engine.settings import measurement_key
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models import LanguageModel
from foretoken.policy.request import AUTO
from foretoken.verify import is_coupled


class Loops:
    """Makes decode loops, and keeps the one of the call that ended last: its KV cache may hold prefixes of the next.

    Args:
        target: the model whose distribution the output has.
        reuse_prefixes: keep loops at all.
        cache_memory: most bytes for the KV caches of all loops together; None for no limit.
        vocab: as in `Engine`, of drafters that are made here.
        load_options: the same.
        limits: of the loops.

    Attributes:
        drafter: of the loops to come.
        num_speculative_tokens: of the loops to come.
        cascade: the drafter under the policy, of the loops to come, shared by them.
        budget: for `cache_memory`; None without a limit.
    """

    drafter: Drafter
    cascade: Cascade
    num_speculative_tokens: int | Literal["auto"]

    def __init__(
        self,
        target: LanguageModel,
        *,
        reuse_prefixes: bool = True,
        cache_memory: int | None = None,
        vocab: Vocab = "auto",
        load_options: Mapping[str, Any] | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self.target = target
        self.reuse_prefixes, self._vocab, self._load_options = reuse_prefixes, vocab, load_options or {}
        self.budget = None if cache_memory is None else Budget(cache_memory, [target])
        self._idle: DecodeLoop | None = None
        self._taking = Lock()

    def draft_with(self, drafter: Any, tree: TreePlan | None = None) -> None:
        """Use a drafter from the next loop on, with a policy of its own; see `Engine` for both arguments."""
        made = make_drafter(drafter, self.target, tree=tree, vocab=self._vocab, **self._load_options)
        if made.hidden_layers:
            self.target.warm_up(made.hidden_layers)
        key = measurement_key(self.target, made)
        self.drafter = made
        self.cascade = made if isinstance(made, Cascade) else Cascade([made])
        self.cascade.check_target(self.target)
        self.cascade.keep_costs(key)
        self._calibrated: set[bool] = set()  # whether for sampled requests, whether for greedy ones
        self._warm: set[bool] = set()  # whether for drawn draft tokens, whether for chosen ones
        if self.budget is not None:  # what runs goes on holding its share of the same memory
            self.budget.models = [self.target, *made.models]

    def prepare(self, row: Row) -> None:
        """Before the first request of a kind, compile what its drafts need; measure what they cost if that matters.

        A request that can't be drafted for waits for neither.
        """
        length = self.num_speculative_tokens if row.num_speculative_tokens is None else row.num_speculative_tokens
        if length == 0 or row.max_accepted == 0:
            return
        sampled = not row.sequence.params.greedy
        self.warm_up(sampled and not is_coupled(row.verifier))
        drafts = bool(row.sequence.prediction) or not isinstance(self.drafter, NoDrafter)
        if length == AUTO and drafts and sampled not in self._calibrated:
            self._calibrated.add(sampled)
            calibrate(self.target, self.cascade, row.verifier, sampled=sampled, limits=self.limits)

    def warm_up(self, drawn: bool) -> None:
        """Compile what drafts of drawn tokens need, or those of chosen ones, if that has not been done."""
        if drawn not in self._warm:
            self._warm.add(drawn)
            self.drafter.warm_up(drawn)

    def make(self, make_sampler: MakeSampler | None = None) -> DecodeLoop:
        """A new loop without rows."""
        return DecodeLoop(
            self.target,
            self.drafter,
            self.num_speculative_tokens,
            self.cascade,
            make_sampler=make_sampler,
            limits=self.limits,
        )

    def take(self) -> DecodeLoop:
        """A loop without rows: the one of the last call, unless someone has it or a setting has changed since."""
        with self._taking:
            loop, self._idle = self._idle, None
        if loop is None or (loop.drafter, loop.lengths.num_speculative_tokens, loop.cascade) != (
            self.drafter,
            self.num_speculative_tokens,
            self.cascade,
        ):
            return self.make()
        return loop

    def put_back(self, loop: DecodeLoop) -> None:
        """Keep a loop whose rows have left for the next call."""
        # Under a limit, nothing is kept beside what others hold: they may be about to need it.
        if self.reuse_prefixes and self.target.shares_prefixes and (self.budget is None or not self.budget.held()):
            self._idle = loop

    def cache_use(self, lengths: Sequence[int], most: Sequence[int]) -> tuple[int, int]:
        """Bytes of KV cache of rows of these lengths, and the most that there may be.

        Args:
            lengths: tokens of each row.
            most: the same of the largest batch, which counts where there is no `cache_memory`.
        """
        if self.budget is not None:
            return self.budget.needs(lengths), self.budget.limit
        return self.target.cache_bytes(lengths), self.target.cache_bytes(most)

    def release(self) -> None:
        """Drop what is kept."""
        self._idle = None

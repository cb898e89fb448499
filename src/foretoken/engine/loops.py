"""The decode loops of an engine: made with its present settings, and kept between calls for their KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Literal

from foretoken.drafters import Cascade, Drafter, NoDrafter, Vocab
from foretoken.drafters.factory import make_drafter
from foretoken.drafters.tree_plan import TreePlan
from foretoken.engine.arguments import RequestArgs, request_of
from foretoken.engine.cache_budget import Budget
from foretoken.engine.calibration import calibrate
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.membership import MakeSampler
from foretoken.engine.outputs import Completion, StreamEvent
from foretoken.engine.prompts import Prompt, check_is_params, make_sequence
from foretoken.engine.row import Row
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.settings import check_num_speculative_tokens, measurement_key
from foretoken.errors import ForetokenError
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.models import LanguageModel
from foretoken.models.threads import release_threads
from foretoken.policy.request import AUTO
from foretoken.randomness import seed_with
from foretoken.sampling import GrammarCompiler, SamplingParams
from foretoken.verify import AnyVerifier, is_coupled

_READY_TOKENS = 8  # enough for rounds with and without drafts, so that a first request has nothing to allocate


class Loops:
    """Makes decode loops, and keeps the one of the call that ended last: its KV cache may hold prefixes of the next.

    Args:
        target: the model whose distribution the output has.
        reuse_prefixes: whether loops are kept at all.
        cache_memory: most bytes for the KV caches of all loops together; None for no limit.
        vocab: as in `Engine`, of drafters that are made here.
        load_options: of drafters that are loaded here, as in `Engine`.
        limits: of the loops.

    Attributes:
        drafter: of the loops to come.
        num_speculative_tokens: of the loops to come.
        cascade: the drafter under the policy, of the loops to come, shared by them.
        budget: for `cache_memory`; None without a limit.
        grammars: compiles those of requests.
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
        release_threads()  # that loading the target has started
        self.reuse_prefixes, self._vocab, self._load_options = reuse_prefixes, vocab, load_options or {}
        self.budget = None if cache_memory is None else Budget(cache_memory, [target])
        self._idle: DecodeLoop | None = None
        self._taking = Lock()
        self.grammars = GrammarCompiler(target.tokenizer, target.vocab_size, target.eos_token_ids, target.name)

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
        self._verifies = False  # whether the target has what its passes over drafts need
        if self.budget is not None:  # running requests still hold their share of the same memory
            self.budget.models = [self.target, *made.models]

    def prepare(self, row: Row) -> None:
        """Before the first request of a kind, compile what its drafts need, and measure costs if the policy uses them.

        Both are skipped for a request that can't be drafted for.
        """
        length = self.num_speculative_tokens if row.num_speculative_tokens is None else row.num_speculative_tokens
        if length == 0 or row.max_accepted == 0:
            return
        sampled = not row.sequence.params.greedy
        self.warm_up(sampled and not is_coupled(row.verifier))
        drafts = bool(row.sequence.prediction) or not isinstance(self.drafter, NoDrafter)
        if drafts and not self._verifies and not self.drafter.hidden_layers:
            self._verifies = True
            self.target.warm_up_verification()
        if length == AUTO and drafts and sampled not in self._calibrated:
            self._calibrated.add(sampled)
            calibrate(self.target, self.cascade, row.verifier, sampled=sampled, limits=self.limits)

    def decode_scratch(self, verifier: AnyVerifier, params: Sequence[SamplingParams]) -> None:
        """Decode a few tokens in a loop that is not kept; see `Engine.warm_up`."""
        params = tuple(map(check_is_params, params)) or (SamplingParams(), SamplingParams(temperature=0.0))
        # Graphs for a row by itself come first: what drafts cost is measured with what will run.
        self._warm_up_alone({not one.greedy and not is_coupled(verifier) for one in params})
        for one in params:
            short = replace(
                one, max_new_tokens=_READY_TOKENS, min_new_tokens=0, ignore_eos=True, stop_token_ids=(), seed=0
            )
            row = self.row(request_of([0], replace(short, stop=(), stop_token_ids=()), None, self.target), verifier)
            row.sequence.scratch = True
            scheduler = Scheduler(self.make(), 1, self.budget)
            scheduler.submit(row)
            scheduler.run()
            if row.error is not None:
                raise row.error

    def _warm_up_alone(self, kinds: set[bool]) -> None:
        """Compile what a row by itself needs: of the target, and of drafters, for drawn draft tokens or chosen ones.

        Both at the same time where no model uses torch's threads and no drafter needs hidden states of the target.

        Args:
            kinds: whether for drawn draft tokens, whether for chosen ones.
        """
        target = partial(self.target.warm_up, self.drafter.hidden_layers, alone=True)
        models = [self.target, *self.drafter.models]
        beside = len(models) > 1 and not self.drafter.hidden_layers and all(model.own_threads for model in models)
        if beside:
            self.target.warm_up_verification()  # it measures passes, which nothing may slow down
        else:
            target()
        with ThreadPoolExecutor(1, thread_name_prefix="foretoken-warm-up") as thread:
            compiled = thread.submit(target) if beside else None
            for drawn in kinds if self.num_speculative_tokens != 0 else ():
                self.warm_up(drawn)
                for model in self.drafter.models:
                    if model.drafts_chains:
                        model.warm_up_chains(drawn, alone=True)
            if compiled is not None:
                compiled.result()

    def row(
        self,
        request: RequestArgs,
        verifier: AnyVerifier,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        *,
        stream: bool = False,
    ) -> Row:
        """A request, ready to join a loop.

        Args:
            request: what is asked for.
            verifier: of this request.
            num_speculative_tokens: of this request alone; None for that of the loops to come.
            stream: see `Row`.

        Raises:
            ForetokenError: it can't be served.
        """
        prompt, params, prediction = request
        sequence = make_sequence(self.target, prompt, params, prediction, self.limits)
        if sequence.prediction and not is_coupled(verifier):
            # It may be an output of this very prompt and seed: drafts must not depend on the uniforms that verify them.
            sequence.seed = seed_with(sequence.seed, sequence.prediction)
        matcher = self.grammars.matcher(params.grammar) if params.grammar is not None else None
        row = Row(sequence, self.target, stream, verifier=verifier, matcher=matcher)
        if num_speculative_tokens is not None:
            row.num_speculative_tokens = check_num_speculative_tokens(num_speculative_tokens)
        if self.budget is not None:
            self.budget.check(row.max_length)
        self.prepare(row)
        return row

    def check(self, prompt: Prompt, params: SamplingParams, verifier: AnyVerifier) -> None:
        """Raise what `row` would about a prompt and its parameters, but not about a grammar; see `Engine.check`."""
        row = Row(make_sequence(self.target, prompt, params, None, self.limits), self.target, verifier=verifier)
        if self.budget is not None:
            self.budget.check(row.max_length)

    def complete(self, requests: Sequence[RequestArgs], verifier: AnyVerifier, max_batch_size: int) -> list[Completion]:
        """Decode requests together until all are finished; one that can't be served gets its error."""
        results: list[Completion | Row] = []
        for request in requests:
            try:
                results.append(self.row(request, verifier))
            except ForetokenError as error:
                results.append(Completion([], "", "error", error=error))
        loop = self.take()
        scheduler = Scheduler(loop, max_batch_size, self.budget)
        for row in results:
            if isinstance(row, Row):
                scheduler.submit(row)
        scheduler.run()
        self.put_back(loop)
        return [row.completion() if isinstance(row, Row) else row for row in results]

    def stream(self, row: Row) -> Iterator[StreamEvent]:
        """Serve one request, an event a round."""
        loop = self.take()
        scheduler = Scheduler(loop, 1, self.budget)
        scheduler.submit(row)
        try:
            while scheduler.busy:
                for _, event in scheduler.step():
                    if row.error is not None:
                        raise row.error
                    if not scheduler.busy:
                        self.put_back(loop)
                    yield event
        finally:  # the caller may have stopped iterating
            release_threads()

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
        """A loop without rows: that of the last call, unless another call has it or a setting has changed since."""
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
        """Keep a loop, whose rows have left, for the next call."""
        if not (self.reuse_prefixes and self.target.shares_prefixes):
            return
        if self.budget is None:
            self._idle = loop
            return
        with self.budget.changes:
            # Its memory belongs to those who hold or wait for some.
            if not self.budget.held() and not self.budget.waiting:
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

    def reuse(self, wanted: bool) -> None:
        """Whether to keep the target's KV cache between calls from now on; if not, free what is kept."""
        self.reuse_prefixes = wanted
        if not wanted:
            self.release()

    def release(self) -> None:
        """Free the KV cache that is kept."""
        self._idle = None

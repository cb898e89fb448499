"""Engine: generates with a target model and a drafter; one call, a stream, or requests that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as AbstractSequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, overload

from foretoken import verify
from foretoken.drafters import Drafter, Vocab
from foretoken.drafters.factory import names_model
from foretoken.drafters.tree_plan import Tree, plan_of
from foretoken.engine import settings
from foretoken.engine.arguments import request_of, requests_of
from foretoken.engine.cache_budget import parse_bytes
from foretoken.engine.decode_loop import DecodeLoop
from foretoken.engine.loops import Loops
from foretoken.engine.membership import MakeSampler
from foretoken.engine.outputs import Completion, Occupancy, StreamEvent
from foretoken.engine.profile import Profile, engine_arguments
from foretoken.engine.prompts import PredictedOutput, Prompt, is_single
from foretoken.engine.scheduler import Request, Scheduler
from foretoken.errors import PromptError, check_flag, refuse_unknown
from foretoken.limits import DEFAULT_LIMITS, Limits, check_limits
from foretoken.models import LanguageModel, load
from foretoken.policy.policy import Policy
from foretoken.policy.request import AUTO
from foretoken.sampling import SamplingParams
from foretoken.sampling.params import check_integer

Params = SamplingParams | AbstractSequence[SamplingParams] | None
Predictions = AbstractSequence[PredictedOutput | None] | None


class Engine:
    """Generates with a target model, speculatively wherever that is faster.

    Args:
        target: the model whose distribution the output has: a path, a hub id, a transformers model, or what
            `foretoken.load` returned.
        drafter: what proposes tokens. ``"auto"`` is `foretoken.drafters.Lookup`, which costs next to nothing, and a
            head if the target's folder has one. It may also be a name from `foretoken.drafters.names` that needs no
            model (``"prompt-lookup"``, ``"ngram-storage"``, …); a model in any of the forms of `target`; the folder of
            a head that was trained on the target (EAGLE-3, Medusa); a `Drafter`; or None to decode plainly. Of several
            in a list (``["auto", "path/of/a/model"]``), the policy takes what pays, round by round (`Cascade`). A model
            may have another vocabulary than the target: see `vocab`.
        verifier: a name from `foretoken.verify.names`, or a verifier; ``"auto"`` takes ``"traversal"`` for drafters of
            trees and ``"block"`` for all others.
        num_speculative_tokens: most tokens that are drafted a round, up to 256; 0 decodes plainly. ``"auto"`` takes
            what is fastest by measured costs and acceptance rates, round by round: 0 where speculation does not pay.
            For a request that names a seed and whose output depends on drafts, it goes by assumed costs and by that
            request's own rounds. For drafters of trees this is the number of nodes.
        tree: how a drafter drafts that can draft trees, such as a model: ``"none"`` for chains, ``"static"`` for the
            best shape for the number of nodes, with drawn tokens, ``"dynamic"`` for the most probable nodes; or a file
            with a shape or measured rates (see `foretoken.drafters.tree_plan.plan_of`). None leaves it to the drafter;
            models then draft chains.
        max_batch_size: most rows that are decoded at once; further requests wait for a free row.
        reuse_prefixes: keep the target's KV cache when the last request of a call has ended, so that the next call's
            requests copy the KV cache of prefixes that they share: a system prompt, or an earlier turn of a chat. The
            memory is the engine's until `release`.
        cache_memory: most bytes for the KV caches of target and drafter (a number, or ``"4GiB"``), counted with the
            lengths that requests may reach. Requests wait until they fit. Those that wait for a stream which only the
            caller can continue are refused. None sets no limit. Weights and activations come on top.
        vocab: what a draft model of another vocabulary drafts: ``"intersection"``, tokens that both vocabularies have
            (`SharedTokens`); ``"text"``, strings that the target's tokenizer encodes (`DraftedText`); ``"auto"``, the
            first if at least half of the draft model's tokens are shared, else the second. ``"same"`` refuses it.
        limits: sizes at which work is split or done in another way. They change no output's distribution. What a seed
            gives may depend on `forced_tokens`, and by rounding on `host_logits`, `alike_tokens` and `prefill_tokens`.
        load_options: options of `foretoken.load` for models given as paths, hub ids or transformers models.

    Raises:
        ModelError: a model can't be loaded, or the two don't fit together.
        ParameterError: an unknown drafter, verifier or option, or a value out of its range.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = AUTO,
        verifier: str | verify.AnyVerifier = AUTO,
        num_speculative_tokens: int | Literal["auto"] = AUTO,
        *,
        tree: Tree | None = None,
        max_batch_size: int = 32,
        reuse_prefixes: bool = True,
        cache_memory: int | str | None = None,
        vocab: Vocab = "auto",
        limits: Limits = DEFAULT_LIMITS,
        **load_options: Any,
    ) -> None:
        # Errors in arguments should be raised before models take their time to load.
        settings.check_num_speculative_tokens(num_speculative_tokens)
        self.max_batch_size = check_integer("max_batch_size", max_batch_size, 1, cure="lower it if memory runs out")
        settings.check_load_options(load_options, target, drafter, _OPTIONS)
        if not isinstance(verifier, str) or verifier != AUTO:
            verify.get(verifier)
        if tree is not None:
            tree = plan_of(tree)
        self.cache_memory = None if cache_memory is None else parse_bytes(cache_memory)  # bytes
        self.limits = check_limits(limits)
        self.target: LanguageModel = load(target, **{"drafted": names_model(drafter), **load_options})
        self._loops = Loops(
            self.target,
            reuse_prefixes=check_flag("reuse_prefixes", reuse_prefixes),
            cache_memory=self.cache_memory,
            vocab=vocab,
            load_options=load_options,
            limits=limits,
        )
        self.grammars = self._loops.grammars
        """Compiles grammars before the requests that have them; from any thread, even while others decode."""
        self.num_speculative_tokens = num_speculative_tokens
        self._loops.draft_with(drafter, tree)
        if isinstance(verifier, str) and verifier == AUTO:
            verifier = verify.usual(self.drafter.trees)
        self.verifier = verify.get(verifier)
        self._scheduler: Scheduler | None = None  # while submitted requests are not finished
        self._submitted = 0

    @classmethod
    def from_profile(
        cls, profile: str | Path | Profile, target: Any = None, *, sampled: bool | None = None, **options: Any
    ) -> Engine:
        """The engine that a profile of `foretoken tune` describes.

        Args:
            profile: a profile, or the file that holds one.
            target: the target in any form that `Engine` takes; None for the one that the profile names.
            sampled: whether requests will be sampled, or greedy, for the settings that are fastest for these; None for
                those that are fastest for both.
            options: of `Engine`; those that are given here win over the profile's.

        Raises:
            ProfileError: the profile can't be read, or was made for another target.
            ModelError: a model can't be loaded, or does not fit the target.
            ParameterError: a wrong option, or `profile` is neither a profile nor a path.
        """
        return cls(**engine_arguments(profile, target, options, _OPTIONS, sampled))

    def __repr__(self) -> str:
        named = {"target": self.target.name, "drafter": self.drafter.name, "verifier": self.verifier.name}
        sizes = {"num_speculative_tokens": self.num_speculative_tokens, "max_batch_size": self.max_batch_size}
        return f"Engine({', '.join(f'{name}={value!r}' for name, value in (named | sizes).items())})"

    @property
    def num_speculative_tokens(self) -> int | Literal["auto"]:
        """Most tokens that are drafted a round, from the next call on; running requests keep their value."""
        return self._loops.num_speculative_tokens

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, value: int | Literal["auto"]) -> None:
        self._loops.num_speculative_tokens = settings.check_num_speculative_tokens(value)

    @property
    def drafter(self) -> Drafter:
        """What proposes tokens, from the next call on; running requests keep their drafter.

        It may be set to anything that `Engine` takes as `drafter`; the verifier stays. Measurements of the previous
        drafter do not apply to the new one, and `cache_memory` covers the new one's KV caches.
        """
        return self._loops.drafter

    @drafter.setter
    def drafter(self, drafter: Any) -> None:
        self._loops.draft_with(drafter)

    @property
    def reuse_prefixes(self) -> bool:
        """Whether the target's KV cache is kept between calls."""
        return self._loops.reuse_prefixes

    @reuse_prefixes.setter
    def reuse_prefixes(self, value: bool) -> None:
        self._loops.reuse(check_flag("reuse_prefixes", value))

    @property
    def policy(self) -> Policy:
        """What chooses drafters and draft lengths where `num_speculative_tokens` is "auto"."""
        return self._loops.cascade.policy

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self,
        prompts: str | list[int] | list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        prediction: PredictedOutput | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: AbstractSequence[Prompt], params: Params = None, *, prediction: Predictions = None
    ) -> list[Completion]: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompts: str | list[int] | list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        n: int,
        prediction: PredictedOutput | None = None,
    ) -> list[Completion]: ...

    @overload
    def generate(
        self, prompts: AbstractSequence[Prompt], params: Params = None, *, n: int, prediction: Predictions = None
    ) -> list[list[Completion]]: ...

    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: Params = None,
        *,
        n: int | None = None,
        prediction: PredictedOutput | Predictions = None,
    ) -> Completion | list[Completion] | list[list[Completion]]:
        """Complete one prompt or a list of them.

        Args:
            prompts: a string, a list of token ids, a list of chat messages, or a list of any of these.
            params: how to sample: one for all, or one for each prompt; None takes the defaults of the target's makers
                (`LanguageModel.sampling_defaults`).
            n: completions of each prompt, the i-th with seed ``params.seed + i`` where a seed is named; their common
                prompt is prefilled once. None for one completion that is not in a list.
            prediction: the expected output, a string or token ids, from which drafts are made: the text before an edit,
                for example. The output's distribution does not depend on it. For a list of prompts a list with one, or
                None, for each.

        Returns:
            A completion for one prompt, a list of them for a list; with `n`, a list of n completions in its place. In
            a list a request that fails has ``finish_reason="error"`` and its `error`; the others go on.

        Raises:
            PromptError: a single prompt can't be used.
            ParameterError: wrong `params` for a single prompt, or `n` is not at least 1.
            NumericalError: the model gave a single prompt logits that nothing can be sampled from.
            OutOfMemory: memory ran out, or `cache_memory` is not enough for a single prompt.
        """
        single = is_single(prompts)
        count = 1 if n is None else check_integer("n", n, 1, cure="leave it out for one completion")
        requests = requests_of(prompts, params, prediction, count, self.target)
        completions = self._loops.complete(requests, self.verifier, self.max_batch_size)
        if single:
            for completion in completions:
                if completion.error is not None:
                    raise completion.error
        if n is None:
            return completions[0] if single else completions
        each = [completions[start : start + n] for start in range(0, len(completions), n)]
        return each[0] if single else each

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        prediction: PredictedOutput | None = None,
        trace: bool = False,
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, round by round.

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            params: as in `generate`.
            prediction: as in `generate`.
            trace: also report each round's draft, with p and q of every draft token, and how it was verified.

        Yields:
            One event a round, of one token or several; the last one holds the completion. Stop iterating to cancel.
        """
        if not is_single(prompt):
            raise PromptError("stream takes one prompt; for a list of them use generate")
        row = self._loops.row(request_of(prompt, params, prediction, self.target), self.verifier, stream=True)
        row.trace = check_flag("trace", trace)
        return self._loops.stream(row)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        verifier: str | verify.AnyVerifier | None = None,
        num_speculative_tokens: int | Literal["auto"] | None = None,
        drafter: str | None = None,
        tree: str | None = None,
        prediction: PredictedOutput | None = None,
        trace: bool = False,
        stream: bool = True,
        **unknown: Any,
    ) -> Request:
        """Take a request in, to be decoded together with others by the calls of `step` to come.

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            params: as in `generate`.
            verifier: of this request alone; None for the engine's.
            num_speculative_tokens: of this request alone, 0 to decode it plainly; None for the engine's.
            drafter: ``"none"``, or the name of one of the engine's drafters, to leave the others out; None for all.
            tree: ``"none"`` for drafts that do not branch; None for what the engine's drafter grows.
            prediction: as in `generate`.
            trace: see `stream`.
            stream: put text into the events; False may put it into the completion alone, which takes less time.
            unknown: other options; they are refused.

        Returns:
            The request: it can be cancelled, and has the completion once it is finished.

        Raises:
            PromptError: the prompt can't be used.
            ParameterError: an unknown verifier or option, or a draft length out of its range.
            RequestTooLarge: `cache_memory` is not enough for the request.
        """
        known = ("verifier", "num_speculative_tokens", "drafter", "tree", "prediction", "trace", "stream")
        refuse_unknown("Engine.submit", unknown, known)
        if not is_single(prompt):
            raise PromptError("submit takes one prompt: call it for each of a list")
        rule = self.verifier if verifier is None else verify.get(verifier)
        asked = request_of(prompt, params, prediction, self.target)
        row = self._loops.row(asked, rule, num_speculative_tokens, stream=check_flag("stream", stream))
        row.trace = check_flag("trace", trace)
        if drafter is not None:
            row.drafters = settings.check_drafter_choice(drafter, self.drafter)
        row.chains = tree is not None and settings.check_tree_choice(tree, self.drafter)
        if self._scheduler is None:
            self._scheduler = Scheduler(self._loops.take(), self.max_batch_size, self._loops.budget, self._submitted)
        request = self._scheduler.submit(row)
        self._submitted = self._scheduler.count
        return request

    def step(self) -> list[tuple[Request, StreamEvent]]:
        """Decode one round of the submitted requests; does nothing where there are none.

        Requests join as rows become free (`max_batch_size`) and leave as they finish. Long prompts are prefilled a
        chunk a round beside the decoding of others.

        Returns:
            An event for each request that got tokens or ended; its last one has its completion.

        Raises:
            OutOfMemory: the round did not fit; running requests end with that error, waiting ones stay.
        """
        if (scheduler := self._scheduler) is None:
            return []
        try:
            events = scheduler.step()
            if not scheduler.busy:
                self._loops.put_back(scheduler.loop)
        finally:
            if not scheduler.busy:
                self._scheduler = None
        return events

    @property
    def busy(self) -> bool:
        """Whether there are submitted requests that are not finished, so that `step` has something to do."""
        return self._scheduler is not None and self._scheduler.busy

    def occupancy(self) -> Occupancy:
        """How many rows, and how much KV cache, the submitted requests take up; any thread may call it."""
        if (scheduler := self._scheduler) is None:
            return Occupancy()
        lengths = [len(row.sequence.tokens) + len(row.sequence.source or ()) for row in list(scheduler.loop.rows)]
        used, most = self._loops.cache_use(lengths, [self.target.max_length] * self.max_batch_size)
        return Occupancy(len(lengths), scheduler.num_waiting, min(used / most, 1.0) if most else 0.0)

    def warm_up(self, *params: SamplingParams) -> None:
        """Do now what the first request would wait for: compile, allocate, and measure costs of drafts.

        Args:
            params: sampling parameters of the requests to come; without any, of a sampled and a greedy one.

        Raises:
            ForetokenError: such requests can't be served.
        """
        self._loops.decode_scratch(self.verifier, params)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Raise what `submit` would raise about tokens and parameters, grammars excepted; any thread may call it."""
        self._loops.check(prompt, params, self.verifier)

    def release(self) -> None:
        """Free the KV cache that is kept for the next call; see `reuse_prefixes`."""
        self._loops.release()

    def decode_loop(self, make_sampler: MakeSampler | None = None) -> DecodeLoop:
        """A new decode loop without rows, for callers that have requests of their own kind.

        Args:
            make_sampler: makes the sampler, which turns logits into distributions, for the rows of some sequences; None
                uses their sampling parameters.
        """
        for drawn in (True, False):  # the rows to come are not known
            self._loops.warm_up(drawn)
        return self._loops.make(make_sampler)


_OPTIONS = [name for name, option in signature(Engine).parameters.items() if option.kind is not option.VAR_KEYWORD]

"""The round loop: draft, score, verify, commit, for batches whose rows come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal, overload
from zlib import crc32

from foretoken import verify
from foretoken.drafters import Drafter, Vocab, is_name
from foretoken.drafters.factory import make_drafter
from foretoken.drafters.tree_plan import Tree, TreePlan, plan_of
from foretoken.engine.cache_budget import Budget, parse_bytes
from foretoken.engine.decode_loop import Rounds
from foretoken.engine.outputs import Completion, StreamEvent
from foretoken.engine.profile import Profile
from foretoken.engine.profile import read as read_profile
from foretoken.engine.prompts import Prompt, check_params, is_single, make_sequence
from foretoken.engine.row import Row
from foretoken.engine.scheduler import Request, Scheduler
from foretoken.errors import ForetokenError, ParameterError, PromptError
from foretoken.limits import DEFAULT_LIMITS, MAX_SPECULATIVE_TOKENS, Limits
from foretoken.models import LanguageModel, load
from foretoken.models.tiny_pair import is_shipped, load_part
from foretoken.policy.controller import AUTO, Controller, TreeController
from foretoken.policy.store import key_of
from foretoken.sampling import Sampler, SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.sequence import Sequence


class Engine:
    """Generates with a target model, speculatively where a drafter is given.

    Args:
        target: the model whose distribution the output has: a path, a hub id, a transformers model, or what
            `foretoken.load` returned.
        drafter: what guesses ahead: a name from `foretoken.drafters.names` that needs no model (``"prompt-lookup"``,
            ``"ngram-storage"``, …), a model in any of the forms of `target`, the folder of a head that was trained on
            the target (EAGLE-3, Medusa), a `Drafter`, None to decode plainly, or several of these in a list, the
            cheapest first: the first one that promises enough proposes (`Cascade`). A model may have another
            vocabulary than the target: see `vocab`.
        verifier: a name from `foretoken.verify.names`, or a verifier; ``"auto"`` takes ``"traversal"`` for drafters of
            trees and ``"token"`` for all others.
        num_speculative_tokens: most tokens that are drafted a round, k; 0 decodes plainly. ``"auto"`` takes what
            measured costs and acceptance make fastest, round by round, 0 where speculation doesn't pay; a request that
            names a seed then has a fixed k of 5 where its text would depend on k. For drafters of trees this is the
            number of nodes, and the fixed one is 8.
        tree: what a drafter does that can grow trees, a model among others: ``"none"`` for chains, ``"static"`` for
            the shape that is best for the number of nodes, drawn, ``"dynamic"`` for the likeliest nodes, or what
            `foretoken.drafters.tree_plan.plan_of` takes besides, such as a file with measured rates. None leaves it to
            the drafter; models draft chains then.
        max_batch_size: most rows that are decoded at once; further requests wait for a free row.
        reuse_prefixes: keep what the target has read when the last request of a call has ended, so that the next call's
            requests start from a copy where they begin alike: the same system prompt, or a conversation that goes on.
            The memory is the engine's until `release`.
        cache_memory: most bytes for the caches of target and drafter (a number, or ``"4GiB"``), by the lengths that
            texts may reach: requests wait until they fit; where only a stream that was begun could make room, they are
            refused. None sets no limit. Weights and passes come on top.
        vocab: what a drafter model of another vocabulary drafts: ``"intersection"``, the tokens that both have
            (`SharedTokens`); ``"text"``, text that is put into the target's tokens (`DraftedText`); ``"auto"`` the
            first if at least half of the drafter's tokens are shared, else the second; ``"same"`` refuses such a model.
        limits: sizes at which work is split or takes another way; they bound memory and never change the output.
        load_options: options of `foretoken.load` for models given as paths, hub ids or transformers models.

    Raises:
        ModelError: a model can't be loaded, or the two don't fit together.
        ParameterError: an unknown drafter or verifier, or a number out of its range.
    """

    def __init__(
        self,
        target: Any,
        drafter: Any = None,
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
        self.limits = limits
        self.num_speculative_tokens = num_speculative_tokens
        self.max_batch_size = check_integer("max_batch_size", max_batch_size, 1, cure="lower it if memory runs out")
        _check_options(load_options, target, drafter)
        if verifier != AUTO:
            verify.get(verifier)  # a wrong name should not cost the time that models take to load
        if tree is not None:
            tree = plan_of(tree)  # nor should a wrong tree
        self.target: LanguageModel = load(target, **load_options)
        self._load_options = load_options
        self._limit = None if cache_memory is None else parse_bytes(cache_memory)
        self._budget: Budget | None = None
        self._vocab = vocab
        self._draft_with(drafter, tree)
        trees = self.drafter.trees
        self.verifier = verify.get(("traversal" if trees else "token") if verifier == AUTO else verifier)
        self.reuse_prefixes = reuse_prefixes
        self._idle: list[Rounds] = []  # at most one: of the call that ended last
        self._scheduler: Scheduler | None = None  # while submitted requests are not finished
        self._submitted = 0

    @classmethod
    def from_profile(cls, profile: str | Path | Profile, target: Any = None, **options: Any) -> Engine:
        """The engine that a profile of `foretoken tune` describes.

        Args:
            profile: a profile, or the file that holds one.
            target: the target in any form that `Engine` takes; None for the one that the profile names.
            options: of `Engine`; those that are given here win over the profile's.

        Raises:
            ProfileError: the profile can't be read, or was made for another target.
            ModelError: a model can't be loaded, or does not fit the target.
            ParameterError: a wrong option.
        """
        name = str(profile.target if isinstance(profile, Profile) else profile)
        if not isinstance(profile, Profile):
            profile = read_profile(profile)
        target = profile.target if target is None else target
        source = target if target is None or isinstance(target, str | Path) else _source(target)
        profile.check_target(source, name)
        own = set(signature(cls).parameters)
        load_options = {option: value for option, value in options.items() if option not in own}
        model = _load_target(target, {**profile.load, **load_options})
        settings = {
            "drafter": profile.drafter,
            "verifier": profile.verifier,
            "num_speculative_tokens": profile.num_speculative_tokens,
            **{option: value for option, value in options.items() if option in own},
        }
        tree = settings.pop("tree", None if "drafter" in options else profile.tree_plan())
        drafter = make_drafter(
            settings.pop("drafter"),
            model,
            tree=None if tree is None else plan_of(tree),
            vocab=settings.get("vocab", "auto"),
            **{**profile.load_drafter, **load_options},
        )
        return cls(model, drafter, **settings)

    @property
    def num_speculative_tokens(self) -> int | Literal["auto"]:
        """Most tokens that are drafted a round, from the next call on; requests that run keep theirs."""
        return self._k

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, value: int | Literal["auto"]) -> None:
        self._k = check_k(value)

    @property
    def drafter(self) -> Drafter:
        """What guesses ahead, from the next call on; requests that run keep theirs.

        Set to anything that `Engine` takes as one; the verifier stays. What was learnt about the last one's costs does
        not count for the new one, and `cache_memory` holds for the new one's caches.
        """
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Any) -> None:
        self._draft_with(drafter)

    def _draft_with(self, drafter: Any, tree: TreePlan | None = None) -> None:
        self._drafter = make_drafter(drafter, self.target, tree=tree, vocab=self._vocab, **self._load_options)
        trees = self._drafter.trees
        key = _key_of(self.target, self._drafter)
        self._controller = (TreeController if trees else Controller)(key)
        self._drafter.keep_costs(key)
        if self._limit is not None:
            models = [self.target, *self._drafter.models]
            if self._budget is None:
                self._budget = Budget(self._limit, models)
            self._budget.models = models  # what runs goes on holding its share of the same memory

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: str | list[int] | list[dict[str, Any]], params: SamplingParams | None = None
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: AbstractSequence[Prompt], params: SamplingParams | AbstractSequence[SamplingParams] | None = None
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: Prompt | AbstractSequence[Prompt],
        params: SamplingParams | AbstractSequence[SamplingParams] | None = None,
    ) -> Completion | list[Completion]:
        """Complete one prompt or a list of them.

        Args:
            prompts: a text, a list of token ids, a list of chat messages, or a list of any of these.
            params: how to sample: one for all, or one for each prompt.

        Returns:
            A completion for one prompt, a list of them for a list. In a list a request that fails has
            ``finish_reason="error"`` and its `error`; the others are not touched by it.

        Raises:
            PromptError: a single prompt can't be used.
            NumericalError: the model gave a single prompt scores that nothing can be chosen from.
            OutOfMemory: memory ran out, or `cache_memory` is not enough for a single prompt.
        """
        if is_single(prompts):
            if params is not None and not isinstance(params, SamplingParams):
                raise ParameterError(f"one prompt takes one SamplingParams, not {type(params).__name__}")
            completion = self._complete([prompts], [params or SamplingParams()])[0]
            if completion.error is not None:
                raise completion.error
            return completion
        batch: AbstractSequence[Prompt] = prompts  # type: ignore[assignment]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(batch)
        if not isinstance(params, AbstractSequence):
            raise ParameterError(f"params is {params!r}: give one SamplingParams, or a list with one for each prompt")
        if len(params) != len(batch):
            raise ParameterError(f"{len(params)} SamplingParams for {len(batch)} prompts: give one, or one for each")
        return self._complete(batch, params)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, trace: bool = False
    ) -> Iterator[StreamEvent]:
        """Complete one prompt, round by round.

        Args:
            prompt: a text, a list of token ids, or a list of chat messages.
            params: how to sample.
            trace: also report each round's draft, with p and q of every drafted token.

        Yields:
            One event a round; the last one holds the completion. Stop iterating to cancel.
        """
        if not is_single(prompt):
            raise PromptError("stream takes one prompt; for a list of them use generate")
        row = self._row(prompt, SamplingParams() if params is None else params, stream=True)
        return self._stream(row, trace)

    def _stream(self, row: Row, trace: bool) -> Iterator[StreamEvent]:
        rounds = self._take(trace)
        scheduler = Scheduler(rounds, 1, self._budget)
        scheduler.submit(row)
        while scheduler.busy:
            for _, event in scheduler.step():
                if row.error is not None:
                    raise row.error
                if not scheduler.busy:
                    self._put_back(rounds)
                yield event

    def _take(self, trace: bool = False) -> Rounds:
        """Rounds without rows, those of the last call where nobody else has them and nothing was set anew since."""
        now = self.target, self._drafter, self._k, self._controller
        while self._idle:
            rounds = self._idle.pop()
            if (rounds.target, rounds.drafter, rounds.k, rounds.controller) == now:
                rounds.trace = trace
                return rounds
        return self.rounds(trace)

    def release(self) -> None:
        """Let go of what was kept for the next call; see `reuse_prefixes`."""
        self._idle.clear()

    def _put_back(self, rounds: Rounds) -> None:
        # Under a limit, nothing is kept beside what others hold: they may be about to need it.
        alone = self._budget is None or not self._budget.held()
        if self.reuse_prefixes and self.target.shares_prefixes and alone:
            self._idle[:] = [rounds]

    def _complete(
        self, prompts: AbstractSequence[Prompt], params: AbstractSequence[SamplingParams]
    ) -> list[Completion]:
        results: list[Completion | Row] = []
        for prompt, one in zip(prompts, params, strict=True):
            try:
                results.append(self._row(prompt, one))
            except ForetokenError as error:
                results.append(Completion([], "", "error", error=error))
        rounds = self._take()
        scheduler = Scheduler(rounds, self.max_batch_size, self._budget)
        for row in results:
            if isinstance(row, Row):
                scheduler.submit(row)
        scheduler.run()
        self._put_back(rounds)
        return [row.completion() if isinstance(row, Row) else row for row in results]

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        verifier: str | verify.AnyVerifier | None = None,
        num_speculative_tokens: int | Literal["auto"] | None = None,
    ) -> Request:
        """Take a request in, to be decoded together with others by the calls of `step` to come.

        Args:
            prompt: a text, a list of token ids, or a list of chat messages.
            params: how to sample.
            verifier: of this request alone; None for the engine's.
            num_speculative_tokens: of this request alone, 0 to decode it plainly; None for the engine's.

        Returns:
            The request: it can be cancelled, and has the completion once it is finished.

        Raises:
            PromptError: the prompt can't be used.
            ParameterError: an unknown verifier, or a number out of its range.
            OutOfMemory: `cache_memory` is not enough for the request.
        """
        if not is_single(prompt):
            raise PromptError("submit takes one prompt: call it for each of a list")
        row = self._row(prompt, SamplingParams() if params is None else params, stream=True)
        if verifier is not None:
            row.verifier = verify.get(verifier)
        if num_speculative_tokens is not None:
            row.num_speculative_tokens = check_k(num_speculative_tokens)
        if self._scheduler is None:
            self._scheduler = Scheduler(self._take(), self.max_batch_size, self._budget, first=self._submitted)
        request = self._scheduler.submit(row)
        self._submitted = self._scheduler.count
        return request

    def step(self) -> list[tuple[Request, StreamEvent]]:
        """One round for the submitted requests; nothing where there are none.

        Requests join as rows become free (`max_batch_size`) and leave as they finish. Long prompts are read a chunk a
        round beside the decoding of others.

        Returns:
            What each request got that took part, its completion in its last event.

        Raises:
            OutOfMemory: the round did not fit; the running requests end with that error, those that wait stay.
        """
        if self._scheduler is None:
            return []
        scheduler = self._scheduler
        try:
            events = scheduler.step()
            if not scheduler.busy:
                self._put_back(scheduler.rounds)
        finally:
            if not scheduler.busy:
                self._scheduler = None
        return events

    @property
    def busy(self) -> bool:
        """There are submitted requests that are not finished, so that `step` has something to do."""
        return self._scheduler is not None and self._scheduler.busy

    def _row(self, prompt: Prompt, params: SamplingParams, stream: bool = False) -> Row:
        check_params(self.target, params)
        row = Row(make_sequence(self.target, prompt, params), self.target, stream, verifier=self.verifier)
        if self._budget is not None:
            self._budget.check(row.max_length)
        return row

    def rounds(
        self, trace: bool = False, make_sampler: Callable[[AbstractSequence[Sequence]], Sampler] | None = None
    ) -> Rounds:
        """The loop itself, without rows yet, for callers that have their own idea of requests.

        Args:
            trace: see `stream`.
            make_sampler: what turns logits into laws, for rows of these sequences; None uses their sampling parameters.
        """
        return Rounds(self.target, self.drafter, self._k, self._controller, trace, make_sampler, self.limits)


def check_k(value: Any) -> int | Literal["auto"]:
    """A number of tokens to draft, or ``"auto"``.

    Raises:
        ParameterError: it is neither, or out of range.
    """
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        raise ParameterError(f"num_speculative_tokens is {value!r}: give a whole number, or 'auto'")
    return check_integer(
        "num_speculative_tokens", value, 0, MAX_SPECULATIVE_TOKENS, cure="use 0 for no speculation, or 'auto'"
    )


def _load_target(target: Any, options: dict[str, Any]) -> LanguageModel:
    return load_part("target", **options) if target is None else load(target, **options)


def _source(model: Any) -> str | None:
    """What a loaded model was loaded from; None for the shipped target."""
    if is_shipped(model):
        return None
    return model.name if isinstance(model, LanguageModel) else str(getattr(model.config, "name_or_path", ""))


def _key_of(target: LanguageModel, drafter: Drafter) -> str:
    """What is learnt about models and drafter is kept under this name."""
    models = [target, *drafter.models]
    described = [
        f"{type(model).__name__} {model.name} {model.dtype} {model.device} {model.quantize} {model.backend_name}"
        for model in models
    ]
    plan = drafter.tree
    grown = f"trees {crc32(repr(plan).encode()):08x}" if plan is not None and plan.branches else ""
    heads = [
        f"{part.name} {part.num_parameters or ''} {part.quantize or ''}".strip()
        for part in (drafter, *drafter.drafters)
    ]
    return key_of(*described, ",".join(heads), *filter(None, [grown]))


def _check_options(options: dict[str, Any], target: Any, drafter: Any) -> None:
    """Refuse unknown options that nothing is loaded with: nobody else would, and one may be a slip of the pen."""
    loaded = (target, *(drafter if isinstance(drafter, list | tuple) else (drafter,)))
    if not any(isinstance(model, str | Path) and not is_name(str(model)) for model in loaded):
        known = [name for name, option in signature(load).parameters.items() if option.kind is option.KEYWORD_ONLY]
        for name in options:
            if name not in known:
                raise ParameterError(
                    f"unknown option {name}={options[name]!r}: choose one of max_batch_size, {', '.join(known)}"
                )

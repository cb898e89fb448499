"""What can be audited: anything that, given a prompt and sampling parameters, returns sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from foretoken.audit.errors import AuditError
from foretoken.sampling.params import SamplingParams


@dataclass(frozen=True)
class Sample:
    """One sampled sample.

    Attributes:
        tokens: its token ids; an end token, if one ended it, included.
        rounds: how many tokens each round of speculation added, if the subject reports it.
        top_logprobs: for each token, the subject's own log-probabilities of the most probable tokens and of itself, if
            it reports them.
        ended: the subject says that an end token ended it, which may be missing in `tokens`.
        end_token: the last of `tokens`, if the subject says that this is an end token.
    """

    tokens: list[int]
    rounds: list[int] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    ended: bool = False
    end_token: int | None = None


@dataclass(frozen=True)
class SampleRequest:
    """A request to a subject: `count` independent continuations of one prompt.

    Attributes:
        prompt: token ids.
        count: samples wanted.
        num_tokens: tokens of each, unless an end token comes first.
        params: how to sample; its `seed`, `max_new_tokens` and `logprobs` are to be ignored.
        seed: key of the randomness of this request; `seeds` makes one for each sample from it.
        rounds: `Sample.rounds` is wanted, if it can be had.
        logprobs: this many `Sample.top_logprobs` are wanted; None for none.
        exact_seed: the one sample's seed is `seed` itself, not one made from it.

    Raises:
        AuditError: `count` is not 1 for an exact seed; `count` or `num_tokens` is below 1.
    """

    prompt: tuple[int, ...]
    count: int
    num_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    rounds: bool = False
    logprobs: int | None = None
    exact_seed: bool = False

    def __post_init__(self) -> None:
        for name, value in (("num_tokens", self.num_tokens), ("count", self.count)):
            if value < 1:
                raise AuditError(f"{name}={value}: give at least 1")
        if self.exact_seed and self.count != 1:
            raise AuditError(f"count={self.count}: an exact seed is that of one sample")

    def seeds(self) -> list[int]:
        """A seed below 2**31 for each sample, all different: with equal seeds, outputs may well be equal."""
        if self.exact_seed:
            return [self.seed]
        rng = np.random.default_rng(self.seed)
        seeds: dict[int, None] = {}
        while len(seeds) < self.count:
            seeds.update(dict.fromkeys(rng.integers(0, 2**31, size=self.count - len(seeds)).tolist()))
        return list(seeds)


@dataclass(frozen=True)
class Speculation:
    """How much a subject speculated: a PASS of one that never did says nothing about speculation.

    Attributes:
        drafted: tokens that were proposed and scored; None if only the accepted ones are reported.
        accepted: those of them that were accepted.
    """

    drafted: int | None = 0
    accepted: int = 0

    def __add__(self, other: Speculation) -> Speculation:
        drafted = None if self.drafted is None or other.drafted is None else self.drafted + other.drafted
        return Speculation(drafted, self.accepted + other.accepted)

    def __sub__(self, other: Speculation) -> Speculation:
        drafted = None if self.drafted is None or other.drafted is None else self.drafted - other.drafted
        return Speculation(drafted, self.accepted - other.accepted)


class Subject(Protocol):
    """A system that is audited."""

    name: str
    details: dict[str, str]
    """What a reader needs to find the same system again: versions, options."""

    speculation: Speculation | None
    """What it drafted and accepted so far; None if it does not report that."""

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Independent samples, as many as requested.

        Raises:
            AuditError: none can be had.
        """

    def close(self) -> None:
        """Give back what the subject holds."""


def check(
    samples: Sequence[Sample],
    request: SampleRequest,
    vocab_size: int | None,
    ends: Sequence[int] = (),
    told: bool = False,
    named: bool = False,
) -> None:
    """Check that samples fit their request.

    Args:
        samples: what the subject returned.
        request: to it.
        vocab_size: token ids are below it; None where that is not known.
        ends: tokens that may end a sample early.
        told: the subject's own word that a sample ended will do (`Sample.ended`).
        named: its word that the last token is an end token will do (`Sample.end_token`).

    Raises:
        AuditError: names the first thing that is wrong.
    """
    if len(samples) != request.count:
        raise AuditError(f"the subject returned {len(samples)} samples where {request.count} were asked for")
    for number, sample in enumerate(samples):
        tokens = sample.tokens
        for token in tokens:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise AuditError(
                    f"sample {number} holds the token {token}: the vocabulary has the ids 0 to {(vocab_size or 0) - 1}"
                )
        if len(tokens) > request.num_tokens:
            raise AuditError(f"sample {number} has {len(tokens)} tokens where {request.num_tokens} were asked for")
        known = {*ends, sample.end_token} if named else ends
        if len(tokens) < request.num_tokens and not (tokens and tokens[-1] in known) and not (told and sample.ended):
            raise AuditError(
                f"sample {number} has {len(tokens)} tokens where {request.num_tokens} were asked for, and the last is "
                "no end token: the subject must return all tokens that it sampled, the end token included"
            )
        if sample.rounds is not None and sum(sample.rounds) != len(tokens):
            raise AuditError(f"rounds of sample {number} add up to {sum(sample.rounds)}, its tokens are {len(tokens)}")


Function = Callable[[list[int], int, int, SamplingParams, int], Any]
"""``function(prompt, count, num_tokens, params, seed)`` returns `count` lists of `num_tokens` token ids."""


class CallableSubject:
    """A Python function.

    Args:
        function: called with prompt, count, num_tokens, params and seed; returns `count` sequences of token ids (a
            list of lists, an array, a tensor), or of `Sample`.
        name: what the report calls it.
    """

    speculation: Speculation | None = None

    def __init__(self, function: Function, name: str | None = None) -> None:
        self.name = name or getattr(function, "__qualname__", None) or repr(function)
        self.details: dict[str, str] = {"kind": "Python callable"}
        self._function = function

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Call the function."""
        try:
            result = self._function(
                list(request.prompt), request.count, request.num_tokens, request.params, request.seed
            )
        except Exception as error:
            raise AuditError(f"the callable {self.name} failed: {type(error).__name__}: {error}") from error
        if isinstance(result, torch.Tensor | np.ndarray):
            if result.ndim != 2:
                raise AuditError(
                    f"the callable {self.name} returned an array of shape {list(result.shape)}: it must be "
                    f"[{request.count}, {request.num_tokens}], a row of token ids for each sample"
                )
            result = result.tolist()
        try:
            return [row if isinstance(row, Sample) else Sample([_token(token) for token in row]) for row in result]
        except TypeError as error:
            raise AuditError(
                f"the callable {self.name} returned {type(result).__name__} where a list of lists of token ids was "
                f"wanted ({error})"
            ) from error

    def close(self) -> None:
        """Nothing to give back."""


def _token(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is no token id")
    return int(value)


class EngineSubject:
    """A Foretoken engine."""

    def __init__(self, engine: Any, name: str | None = None) -> None:
        from foretoken import __version__

        self.engine = engine
        drafter = engine.drafter.name
        self.name = name or f"Foretoken {engine.verifier.name} + {drafter}"
        self.details = {
            "foretoken": __version__,
            "verifier": engine.verifier.name,
            "drafter": drafter,
            "num_speculative_tokens": str(engine.num_speculative_tokens),
        }
        self.speculation: Speculation | None = Speculation()

    def sample(self, request: SampleRequest) -> list[Sample]:
        """Generate in batches, or one sample at a time if rounds are recorded: only a stream reports them."""
        params = [
            replace(
                request.params,
                seed=seed,
                max_new_tokens=request.num_tokens,
                min_new_tokens=0,
                logprobs=request.logprobs,
            )
            for seed in request.seeds()
        ]
        try:
            if request.rounds:
                return [self._stream(list(request.prompt), one) for one in params]
            completions = self.engine.generate([list(request.prompt)] * request.count, params)
        except Exception as error:
            raise AuditError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        for completion in completions:
            if completion.error is not None:
                raise AuditError(f"{self.name} failed: {completion.error}") from completion.error
        return [self._sample(completion, None) for completion in completions]

    def _stream(self, prompt: list[int], params: SamplingParams) -> Sample:
        rounds, completion, passes = list[int](), None, 0
        for event in self.engine.stream(prompt, params):
            plain = event.stats.rounds - passes == len(event.pieces)  # rounds that went together, a token each
            rounds += [1] * len(event.pieces) if plain else [len(event.pieces)]
            passes, completion = event.stats.rounds, event.completion
        return self._sample(completion, rounds)

    def _sample(self, completion: Any, rounds: list[int] | None) -> Sample:
        assert self.speculation is not None
        self.speculation += Speculation(completion.stats.drafted, completion.stats.accepted)
        logprobs = None
        if completion.logprobs is not None:
            logprobs = [{**entry.top, entry.token_id: entry.logprob} for entry in completion.logprobs]
        return Sample(list(completion.token_ids), rounds, logprobs)

    def close(self) -> None:
        """Nothing to give back."""

"""What can be audited: anything that, given a prompt and sampling parameters, returns sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from foretoken.audit.errors import AuditError
from foretoken.sampling.params import SamplingParams


@dataclass(frozen=True)
class Sample:
    """One sampled text.

    Attributes:
        tokens: its token ids; an end token, if one ended it, included.
        rounds: how many tokens each round of speculation added, where the subject tells.
        top_logprobs: for each token, the subject's own log-probabilities of the likeliest tokens and of itself, where
            it tells.
    """

    tokens: list[int]
    rounds: list[int] | None = None
    top_logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True)
class Request:
    """What a subject is asked for: `count` independent continuations of one prompt.

    Attributes:
        prompt: token ids.
        count: texts wanted.
        num_tokens: tokens of each, unless an end token comes first.
        params: how to sample; its `seed`, `max_new_tokens` and `logprobs` are to be ignored.
        seed: key of the randomness of this request; `seeds` makes one for each text from it.
        rounds: `Sample.rounds` is wanted, if it can be had.
        logprobs: this many `Sample.top_logprobs` are wanted; None for none.
    """

    prompt: tuple[int, ...]
    count: int
    num_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    rounds: bool = False
    logprobs: int | None = None

    def seeds(self) -> list[int]:
        """A seed below 2**31 for each text."""
        rng = np.random.default_rng(self.seed)
        return [int(seed) for seed in rng.integers(0, 2**31, size=self.count)]


@dataclass(frozen=True)
class Speculation:
    """How much a subject speculated: a PASS of one that never did says nothing about speculation.

    Attributes:
        drafted: tokens that were proposed and scored; None where only the accepted ones are told.
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
    """What it drafted and accepted so far; None where it does not tell."""

    def sample(self, request: Request) -> list[Sample]:
        """Independent samples, as many as asked for.

        Raises:
            AuditError: none can be had.
        """

    def close(self) -> None:
        """Give back what the subject holds."""


def check(samples: Sequence[Sample], request: Request, vocab_size: int | None, ends: Sequence[int] = ()) -> None:
    """Make sure that samples are what was asked for.

    Args:
        samples: what the subject returned.
        request: what it was asked.
        vocab_size: token ids are below it; None where that is not known.
        ends: tokens that may end a text early.

    Raises:
        AuditError: names the first thing that is wrong.
    """
    if len(samples) != request.count:
        raise AuditError(f"the subject returned {len(samples)} texts where {request.count} were asked for")
    for place, sample in enumerate(samples):
        tokens = sample.tokens
        for token in tokens:
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise AuditError(
                    f"text {place} holds the token {token}: the vocabulary has the ids 0 to {(vocab_size or 0) - 1}"
                )
        if len(tokens) > request.num_tokens:
            raise AuditError(f"text {place} has {len(tokens)} tokens where {request.num_tokens} were asked for")
        if len(tokens) < request.num_tokens and not (tokens and tokens[-1] in ends):
            raise AuditError(
                f"text {place} has {len(tokens)} tokens where {request.num_tokens} were asked for, and the last is no "
                "end token: the subject must return all tokens that it sampled, the end token included"
            )
        if sample.rounds is not None and sum(sample.rounds) != len(tokens):
            raise AuditError(f"the rounds of text {place} add up to {sum(sample.rounds)}, its tokens are {len(tokens)}")


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

    def sample(self, request: Request) -> list[Sample]:
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
                    f"[{request.count}, {request.num_tokens}], a row of token ids for each text"
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
        drafter = getattr(engine.drafter, "name", "?")
        self.name = name or f"Foretoken {engine.verifier.name} + {drafter}"
        self.details = {
            "foretoken": __version__,
            "verifier": engine.verifier.name,
            "drafter": drafter,
            "num_speculative_tokens": str(engine.num_speculative_tokens),
        }
        self.speculation: Speculation | None = Speculation()

    def sample(self, request: Request) -> list[Sample]:
        """Generate in batches, or text by text where rounds are wanted: only a stream tells them."""
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
        rounds, completion = [], None
        for event in self.engine.stream(prompt, params):
            rounds.append(len(event.pieces))
            completion = event.completion
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


class TransformersSubject:
    """`generate` of a transformers model.

    Args:
        module: the model.
        assistant: an assistant model, or None.
        options: further arguments of `generate`: ``prompt_lookup_num_tokens=3``, ``assistant_early_exit=1``, ….
        name: what the report calls it.
    """

    def __init__(
        self, module: Any, assistant: Any = None, options: dict[str, Any] | None = None, name: str | None = None
    ) -> None:
        import transformers

        self.module, self.assistant, self.options = module, assistant, dict(options or {})
        mode = "assistant model" if assistant is not None else ", ".join(f"{k}={v}" for k, v in self.options.items())
        self.name = name or f"transformers generate ({mode or 'plain'})"
        self.details = {"transformers": transformers.__version__, "torch": torch.__version__, "mode": mode or "plain"}
        # Plain decoding drafts nothing; the speculative modes are not known to have told before they do.
        self.speculation: Speculation | None = None if self.speculative else Speculation()

    @property
    def speculative(self) -> bool:
        """Whether a batch must be of one row."""
        keys = {"prompt_lookup_num_tokens", "assistant_early_exit", "assistant_model", "custom_generate"}
        return self.assistant is not None or bool(keys & set(self.options))

    def sample(self, request: Request) -> list[Sample]:
        """Call `generate`; its global random state is seeded for the call and put back afterwards."""
        options = {**transformers_options(request.params, self.name), **self.options}
        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        size = 1 if self.speculative else min(request.count, 256)
        device = self.module.device
        devices = [device] if device.type == "cuda" else []
        samples: list[Sample] = []
        prompt = torch.tensor([request.prompt], device=device)
        with torch.random.fork_rng(devices=devices), torch.inference_mode(), _listening(self.module) as rounds:
            torch.manual_seed(request.seed)
            while len(samples) < request.count:
                rows = min(size, request.count - len(samples))
                batch = prompt.expand(rows, -1)
                rounds.clear()
                try:
                    output = self.module.generate(
                        batch,
                        attention_mask=torch.ones_like(batch),
                        max_new_tokens=request.num_tokens,
                        **options,
                    )
                except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
                    raise AuditError(f"{self.name} failed: {type(error).__name__}: {error}") from error
                ends = _ends(self.module)
                told = self._rounds(rounds)
                for row in output[:, prompt.shape[1] :].tolist():
                    tokens = _until_end(row, ends)
                    samples.append(Sample(tokens, told if told and sum(told) == len(tokens) else None))
        return samples

    def _rounds(self, rounds: Sequence[Speculation]) -> list[int] | None:
        """Tokens of each round of the last call, if these were heard of."""
        if not rounds:
            return None
        self.speculation = sum(rounds, self.speculation or Speculation())
        return [one.accepted + 1 for one in rounds]

    def close(self) -> None:
        """Nothing to give back."""


@contextmanager
def _listening(module: Any) -> Iterator[list[Speculation]]:
    """Hear of every round of assisted generation, from what `generate` tells its candidate generator after each.

    That generator is no public part of transformers: where it is made, or told, in another way, nothing is heard.
    """
    rounds: list[Speculation] = []
    make = getattr(module, "_get_candidate_generator", None)
    if make is None:
        yield rounds
        return

    def listened(*args: Any, **kwargs: Any) -> Any:
        generator = make(*args, **kwargs)
        tell = getattr(generator, "update_candidate_strategy", None)
        if tell is not None:

            def told(input_ids: Any, scores: Any, num_matches: Any) -> Any:
                rounds.append(Speculation(int(scores.shape[1]) - 1, int(num_matches)))  # one score for each, one more
                return tell(input_ids, scores, num_matches)

            generator.update_candidate_strategy = told
        return generator

    module._get_candidate_generator = listened
    try:
        yield rounds
    finally:
        del module._get_candidate_generator


def transformers_options(params: SamplingParams, name: str = "transformers generate") -> dict[str, Any]:
    """Sampling parameters as arguments of `generate`, its own defaults (such as top_k = 50) switched off.

    Raises:
        AuditError: it has no such parameter.
    """
    for field_name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(params, field_name):
            raise AuditError(f"{field_name}={getattr(params, field_name)}: {name} has no such parameter; leave it out")
    options: dict[str, Any] = {"repetition_penalty": params.repetition_penalty}
    if params.greedy:
        return {"do_sample": False, **options}
    options.update(do_sample=True, temperature=params.temperature, top_k=params.top_k or 0, top_p=params.top_p)
    if params.min_p:
        options["min_p"] = params.min_p
    return options


def _ends(module: Any) -> list[int]:
    ends = getattr(module.generation_config, "eos_token_id", None)
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Cut the padding after an end token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def transformers_subject(
    module: Any,
    assistant: Any = None,
    mode: str = "assistant",
    num_speculative_tokens: int = 2,
    options: dict[str, Any] | None = None,
) -> TransformersSubject:
    """`generate` in one of its speculative modes.

    Args:
        module: the target.
        assistant: the assistant, for ``mode="assistant"``.
        mode: ``assistant``, ``prompt-lookup``, ``early-exit`` or ``plain``.
        num_speculative_tokens: tokens of prompt lookup. The other modes draft as many as their own schedule says; pass
            options to change that.
        options: further arguments of `generate`.
    """
    options = dict(options or {})
    if mode == "prompt-lookup":
        options.setdefault("prompt_lookup_num_tokens", num_speculative_tokens)
    elif mode == "early-exit":
        options.setdefault("assistant_early_exit", 1)
    elif mode not in ("assistant", "plain"):
        raise AuditError(f"unknown mode {mode!r}: choose one of assistant, prompt-lookup, early-exit, plain")
    if mode == "assistant" and assistant is None:
        raise AuditError("mode assistant needs an assistant model: name its folder with --drafter")
    return TransformersSubject(
        module, assistant if mode == "assistant" else None, options, f"transformers generate ({mode})"
    )

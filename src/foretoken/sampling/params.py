"""SamplingParams: how a request's tokens are chosen, and when it ends."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from foretoken.errors import ParameterError, refuse_unknown, shown
from foretoken.sampling.grammar import Grammar

DEFAULT_MAX_NEW_TOKENS = 256
CHECKPOINT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Parameters for which a checkpoint may have values of its own: `LanguageModel.sampling_defaults`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Names and meanings are those of vLLM and transformers.

    Attributes:
        temperature: logits are divided by it; 0 is greedy decoding.
        top_k: keep the k most probable tokens; 0, -1 and None keep all.
        top_p: keep the smallest set of most probable tokens with at least this much probability.
        min_p: drop tokens less probable than this times the most probable one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        presence_penalty: subtracted from the logit of each token in the output.
        frequency_penalty: subtracted from a token's logit once for each time it is in the output.
        logit_bias: added to the logits of these token ids; -inf bans a token.
        seed: key of all the request's randomness; None takes a fresh one.
        max_new_tokens: tokens to generate at most.
        max_tokens: another name of `max_new_tokens`, as in vLLM and OpenAI's API; an argument only, not an attribute.
        min_new_tokens: end and stop tokens are banned until this many are generated.
        stop_token_ids: further tokens that end the output.
        stop: strings that end the output.
        ignore_eos: continue after an end token.
        skip_special_tokens: leave special tokens, such as end tokens, out of the text.
        logprobs: report this many most probable tokens with each token; None reports nothing.
        grammar: what the output has to look like (`Grammar`); it is applied to the logits before all else. vLLM calls
            it structured outputs.

    Raises:
        ParameterError: a value is out of range or of the wrong type, there is no such parameter, or one was given
            without its name.
    """

    temperature: float = 1.0
    top_k: int | None = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    grammar: Grammar | None = None
    max_tokens: InitVar[int | None] = None

    def __new__(cls, *values: Any, **named: Any) -> SamplingParams:
        """Name the closest parameter where one is unknown; a dataclass would raise a TypeError that names none."""
        known = cls.__dataclass_fields__
        if values:
            raise ParameterError(f"{cls.__name__} takes its values by name: {cls.__name__}(temperature=0.7, top_p=0.9)")
        refuse_unknown(cls.__name__, (name for name in named if name not in known), known)
        first, second = named.get("max_new_tokens"), named.get("max_tokens")
        if first is not None and second is not None and first != second:
            raise ParameterError(
                f"max_new_tokens is {first!r} and max_tokens is {second!r}, two names of one value: give one of them"
            )
        return super().__new__(cls)

    def __post_init__(self, max_tokens: int | None) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # the way to normalise a field of a frozen dataclass

        keep("temperature", check_number("temperature", self.temperature, 0.0, cure="use 0 for greedy decoding"))
        top_k = -1 if self.top_k is None else check_integer("top_k", self.top_k, -1, cure="use 0 to keep all tokens")
        keep("top_k", max(top_k, 0))
        keep("top_p", check_number("top_p", self.top_p, 0.0, 1.0, above=True, cure="use 1 to keep all tokens"))
        keep("min_p", check_number("min_p", self.min_p, 0.0, 1.0, cure="use 0 to keep all tokens"))
        # Beyond these limits logits overflow in float32.
        penalty = check_number("repetition_penalty", self.repetition_penalty, 1e-10, 1e10, cure="use 1 for none")
        keep("repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            keep(name, check_number(name, getattr(self, name), -2.0, 2.0, cure="use 0 for none"))
        keep("logit_bias", _logit_bias(self.logit_bias))
        if self.seed is not None:
            keep("seed", check_integer("seed", self.seed, 0, 2**64 - 1, cure="leave it out for a fresh one"))
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, 1, cure="ask for at least one token")
            keep("max_new_tokens", max_tokens)
        keep(
            "max_new_tokens", check_integer("max_new_tokens", self.max_new_tokens, 1, cure="ask for at least one token")
        )
        keep("min_new_tokens", check_integer("min_new_tokens", self.min_new_tokens, 0, cure="use 0 for none"))
        if self.min_new_tokens > self.max_new_tokens:
            raise ParameterError(
                f"min_new_tokens is {self.min_new_tokens}, more than max_new_tokens, {self.max_new_tokens}: "
                "lower the one or raise the other"
            )
        keep("stop_token_ids", _token_ids(self.stop_token_ids))
        keep("stop", _strings(self.stop))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(f"{name} is {shown(getattr(self, name))}: use True or False")
        if self.logprobs is not None:
            keep("logprobs", check_integer("logprobs", self.logprobs, 0, cure="leave it out to report nothing"))
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ParameterError(
                f"grammar is {shown(self.grammar)}: give a Grammar, such as Grammar.regex('[0-9]+') or "
                "Grammar.json_schema({'type': 'object'})"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False, cure: str) -> float:
    """`value` as a finite float in [low, high], or in (low, high] with `above`.

    Raises:
        ParameterError: it is not; the message gives `name`, the limits and `cure`.
    """
    limit = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high < math.inf else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterError(f"{name} is {shown(value)}, not a number: give a number {limit}; {cure}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number == low):
        raise ParameterError(f"{name} is {shown(value)}, but must be a finite number {limit}: {cure}")
    return number


def check_integer(name: str, value: Any, low: int, high: int | None = None, *, cure: str) -> int:
    """`value` as an int in [low, high].

    Raises:
        ParameterError: it is not; the message gives `name`, the limits and `cure`.
    """
    limit = f"at least {low}" + (f" and at most {high}" if high is not None else "")
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ParameterError(f"{name} is {shown(value)}, not an integer: give an integer {limit}; {cure}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ParameterError(f"{name} is {number}, but must be {limit}: {cure}")
    return number


def _items(value: Any) -> tuple[Any, ...] | None:
    """The items of a list or a similar sequence; None for strings, mappings and what is not iterable."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        return None
    try:
        return tuple(value)
    except Exception:  # scalar arrays have an `__iter__`, too, and what is no sequence may raise what it likes
        return None


def _token_ids(value: Any) -> tuple[int, ...]:
    tokens = _items(value)
    if tokens is None:
        raise ParameterError(f"stop_token_ids is {shown(value)}: give a list of token ids")
    return tuple(check_integer("stop_token_ids", token, 0, cure="give token ids of the vocabulary") for token in tokens)


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    strings = _items(value)
    if strings is None:
        raise ParameterError(f"stop is {shown(value)}: give a string or a list of strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParameterError(f"stop contains {shown(string)}: give strings of at least one character")
    return strings


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ParameterError(f"logit_bias is {shown(value)}: give a mapping from token ids to numbers")
    bias = {}
    for token, number in value.items():
        token = check_integer("a token id in logit_bias", token, 0, cure="give token ids of the vocabulary")
        if isinstance(number, bool) or not isinstance(number, numbers.Real) or number != -math.inf:
            cure = "use -1e30 to ban a token"  # JSON has no -inf, which does the same
            number = check_number(f"logit_bias[{token}]", number, -1e30, 1e30, cure=cure)
        bias[token] = float(number)
    return bias or None

"""The bodies of OpenAI's API, with vLLM's further fields.

Sampling fields are `Any` here: `SamplingParams` checks them, and says what is wrong in the library's own words.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from foretoken.engine.settings import DrafterNames
from foretoken.errors import ForetokenError, shown
from foretoken.sampling import Grammar, SamplingParams
from foretoken.sampling.params import check_integer
from foretoken.serve.chat_messages import text_of
from foretoken.serve.errors import ApiError, api_error
from foretoken.serve.settings import ServeSettings
from foretoken.serve.speculation import PredictedOutput, Speculation
from foretoken.serve.strict import Strict
from foretoken.serve.structured import StructuredOutputs, format_grammar
from foretoken.serve.tools import ToolSet, read_tools

MOST_STOP_STRINGS = 64
LONGEST_STOP_STRING = 1_000
MOST_LOGIT_BIASES = 4_096
_TEMPLATE_DEFAULTS = {"add_generation_prompt": True, "continue_final_message": False}
"""What vLLM's clients send of chat templates by default."""
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


class StreamOptions(Strict):
    """What a stream tells besides its output."""

    neutral: ClassVar[Mapping[str, bool]] = {"include_obfuscation": False}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Controls(Strict):
    """What all APIs have in common: how to sample, and how to speculate."""

    model: str | None = None
    stream: bool = False
    speculation: Speculation | None = None
    min_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    structured_outputs: StructuredOutputs | None = None
    # Labels: they change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    def engine_settings(self, drafter: DrafterNames) -> dict[str, Any]:
        """Further arguments of `Engine.submit`.

        Args:
            drafter: the engine's.

        Raises:
            ApiError: as `Speculation.settings`.
        """
        return {} if self.speculation is None else self.speculation.settings(drafter)

    def asked_grammar(self) -> tuple[str, Grammar | None]:
        """The field that says what the output has to look like, and the grammar; None without one.

        Raises:
            ApiError: there are two such fields, or one can't be used.
        """
        asked = [(param, grammar) for param, grammar in self.grammars() if grammar is not None]
        if len(asked) > 1:
            message = f"{' and '.join(param for param, _ in asked)} each say what the output has to look like"
            raise ApiError(400, f"{message}: leave one out", asked[0][0])
        return asked[0] if asked else ("structured_outputs", None)

    def grammars(self) -> list[tuple[str, Grammar | None]]:
        """The fields that may say what the output has to look like, and what they ask for.

        Raises:
            ApiError: one can't be used.
        """
        given = self.structured_outputs
        return [("structured_outputs", None if given is None else given.as_grammar())]

    @property
    def whitespace(self) -> bool:
        """Whether spaces and newlines are allowed between the parts of JSON."""
        return self.structured_outputs is None or not self.structured_outputs.disable_any_whitespace

    def toolset(self) -> ToolSet | None:
        """The tools that the model may call; None for none.

        Raises:
            ApiError: they can't be used.
        """
        return None

    @abstractmethod
    def token_limit(self) -> tuple[str, Any]:
        """The field that limits the output, and its value."""

    def stop_strings(self) -> tuple[str, Any]:
        """The field that has the stop strings, and its value."""
        return "stop", self.stop

    def top_logprobs_field(self) -> tuple[str, int | None]:
        """The field that asks for log-probabilities, and how many of the most probable tokens to report."""
        return "logprobs", None


class Sampling(Controls):
    """What completions and chat have in common."""

    stream_options: StreamOptions | None = None
    n: int = 1
    best_of: int | None = None
    prediction: PredictedOutput | None = None
    max_tokens: Any = None
    max_completion_tokens: Any = None  # load clients send it on completions, too
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: Any = None

    def grammars(self) -> list[tuple[str, Grammar | None]]:
        """See `Controls`."""
        grammar = format_grammar(self.response_format, "response_format", whitespace=self.whitespace)
        return [*super().grammars(), ("response_format", grammar)]

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.stream_options
        return self.speculation is not None or (options is not None and options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether each chunk of a stream has the usage up to it."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def token_limit(self) -> tuple[str, Any]:
        """See `Controls`."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        return "max_completion_tokens", self.max_completion_tokens

    def predicted_text(self) -> str | None:
        """What the output is expected to be; None for nothing.

        Raises:
            ApiError: the prediction's content is neither a string nor parts of text.
        """
        return None if self.prediction is None else text_of(self.prediction.content, "prediction.content")

    def check_choices(self, prompts: int, param: str, settings: ServeSettings) -> None:
        """See to it that the request asks for a number of completions that the server allows, and options they have.

        Raises:
            ApiError: it does not.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options are for streams: leave them out, or set stream", "stream_options")
        if self.best_of not in (None, self.n):
            message = f"best_of is {shown(self.best_of)}, but served only where it equals n, {self.n}: leave it out"
            raise ApiError(400, message, "best_of", "unsupported_field")
        if not 1 <= (count := prompts * self.n) <= settings.max_choices:
            number = f"{count:,}" if count.bit_length() < 64 else "too many"  # Python writes no 4,300 digits
            raise ApiError(
                400,
                f"the request asks for {number} completions: ask for at least 1 and at most "
                f"{settings.max_choices:,}, by {param}",
                param,
            )


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    neutral: ClassVar[Mapping[str, bool]] = {"add_special_tokens": True}
    prompt: Any
    echo: bool = False
    logprobs: int | None = None

    @property
    def is_echo_alone(self) -> bool:
        """Whether nothing is to be generated: the prompt is to come back, with its log-probabilities for example."""
        _, limit = super().token_limit()
        return self.echo and limit == 0 and type(limit) is int

    def token_limit(self) -> tuple[str, Any]:
        """See `Controls`. Such a request is checked as one for a token."""
        name, limit = super().token_limit()
        return name, 1 if self.is_echo_alone else limit

    def top_logprobs_field(self) -> tuple[str, int | None]:
        """See `Sampling`."""
        return "logprobs", self.logprobs

    def prompts(self, settings: ServeSettings) -> list[str | list[int]]:
        """The prompts, one or several.

        Raises:
            ApiError: they are none, too many, or of a wrong type.
        """
        given = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_token(given[0])):
            given = [given]
        if not isinstance(given, list) or not given:
            raise ApiError(400, "prompt is no string, list of strings or list of token ids: give one of them", "prompt")
        for index, prompt in enumerate(given):
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_token, prompt))):
                message = f"prompt {index} is neither a string nor a list of token ids: give one of them"
                raise ApiError(400, message, "prompt")
            if not prompt:
                raise ApiError(400, f"prompt {index} is empty: give at least one token", "prompt")
        self.check_choices(len(given), "n" if len(given) == 1 else "prompt", settings)
        return given


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    neutral: ClassVar[Mapping[str, bool]] = {
        **_TEMPLATE_DEFAULTS,
        "add_special_tokens": False,
        "include_reasoning": True,
    }
    messages: Any
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    def toolset(self) -> ToolSet | None:
        """See `Controls`."""
        return read_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    def top_logprobs_field(self) -> tuple[str, int | None]:
        """See `Sampling`."""
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing, as vLLM's clients send it
            raise ApiError(400, "top_logprobs needs logprobs: true: set it, or leave top_logprobs out", "top_logprobs")
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Strict):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    neutral: ClassVar[Mapping[str, bool]] = {**_TEMPLATE_DEFAULTS, "return_token_strs": False}
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None

    def check_special_tokens(self) -> None:
        """See to it that special tokens are wanted where they are added: to prompts, and by the template to messages.

        Raises:
            ApiError: they are not.
        """
        if self.add_special_tokens is not None and self.add_special_tokens != (self.messages is None):
            what = "messages have those of the template alone" if self.messages is not None else "prompts have them"
            message = f"add_special_tokens can't be chosen, {what}: leave it out"
            raise ApiError(400, message, "add_special_tokens", "unsupported_field")


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


def check_model(name: str | None, settings: ServeSettings) -> None:
    """See to it that a request means the model that is served; without a name it does.

    Raises:
        ApiError: it means another one.
    """
    if name is not None and name != settings.model:
        message = f"the model {name[:200]!r} is not served: use {settings.model!r}, or leave it out"
        raise ApiError(404, message, "model", "model_not_found")


def check_sampling(body: Controls, settings: ServeSettings) -> None:
    """See to it that a request can be sampled as it says, before anything is tokenized; raises as `sampling_params`."""
    sampling_params(body, settings, settings.max_output_tokens)


def sampling_params(
    body: Controls, settings: ServeSettings, default_tokens: int, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """How a request samples.

    Args:
        body: the request.
        settings: with the server's caps.
        default_tokens: to generate at most, where the request does not say.
        defaults: of further parameters.

    Raises:
        ApiError: a field is out of its range, or above a cap.
    """
    name, limit = body.token_limit()
    top_name, top = body.top_logprobs_field()
    stop_name, stop = body.stop_strings()
    fields = (
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "seed", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    )  # fmt: skip
    given = {field: getattr(body, field) for field in fields if getattr(body, field) is not None}
    values: dict[str, Any] = {**defaults, **given}
    try:
        values["max_new_tokens"] = tokens = (
            min(default_tokens, settings.max_output_tokens)
            if limit is None
            else check_integer(name, limit, 1, settings.max_output_tokens, cure="ask for a number within it")
        )
        if body.min_tokens is not None:
            cure = f"{name} is {tokens}; use 0 for none"
            values["min_new_tokens"] = check_integer("min_tokens", body.min_tokens, 0, tokens, cure=cure)
        if top is not None:
            cure = "ask for a number within it"
            values["logprobs"] = check_integer(top_name, top, 0, settings.max_logprobs, cure=cure)
        if body.logit_bias is not None:
            values["logit_bias"] = _logit_bias(body.logit_bias)
        values["grammar"] = body.asked_grammar()[1]
        if stop is not None:
            _check_stop(stop, stop_name)
            values["stop"] = stop
        return SamplingParams(**values)
    except ForetokenError as error:
        told = api_error(error, settings.model, settings.model)
        if told.param == "stop":
            told = ApiError(told.status, stop_name + told.message.removeprefix("stop"), stop_name, told.code)
        raise told from None


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping) or len(value) > MOST_LOGIT_BIASES:
        message = f"logit_bias is no object of at most {MOST_LOGIT_BIASES:,} token ids: give one"
        raise ApiError(400, message, "logit_bias")
    if not all(token.isascii() and token.isdecimal() and len(token) < 16 for token in value):
        raise ApiError(400, "logit_bias has a key that is no token id: give ids of the vocabulary", "logit_bias")
    return {int(token): number for token, number in value.items()}


def _check_stop(stop: Any, name: str) -> None:
    strings = stop if isinstance(stop, list) else [stop]
    long = any(isinstance(text, str) and len(text) > LONGEST_STOP_STRING for text in strings)
    if long or len(strings) > MOST_STOP_STRINGS:
        message = (
            f"{name} has more than {MOST_STOP_STRINGS} strings, or one of more than {LONGEST_STOP_STRING:,} characters"
        )
        raise ApiError(400, f"{message}: give fewer or shorter ones", name)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

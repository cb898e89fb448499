"""Prompts as users pass them, made into sequences of tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from numbers import Integral
from typing import Any, Protocol, TypeGuard
from weakref import WeakKeyDictionary

from foretoken.errors import ParameterError, PromptError, PromptTooLong, shown
from foretoken.limits import DEFAULT_LIMITS, Limits
from foretoken.randomness import fresh_seed
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence

Message = Mapping[str, Any]
"""A chat message: ``{"role": …, "content": …}``."""

Prompt = str | AbstractSequence[int] | AbstractSequence[Message]
"""A string, token ids, or the messages of a chat."""


PredictedOutput = str | AbstractSequence[int]
"""What a request's output is expected to be: a string, or token ids."""

_SHRINKS = 4
"""Times the characters of its longest token that a token may stand for: see `_check_size`."""


class ReadsPrompts(Protocol):
    """What prompts need of a target: a `LanguageModel`, or a description of one that another process has."""

    @property
    def name(self) -> str:
        """See `LanguageModel`."""

    @property
    def tokenizer(self) -> Any:
        """See `LanguageModel`."""

    @property
    def vocab_size(self) -> int:
        """See `LanguageModel`."""

    @property
    def max_length(self) -> int:
        """See `LanguageModel`."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See `LanguageModel`."""

    @property
    def decoder_start_token_id(self) -> int | None:
        """See `LanguageModel`."""


_LONGEST: WeakKeyDictionary[ReadsPrompts, int] = WeakKeyDictionary()
"""Characters of the longest token, by model."""


def is_single(prompts: Prompt | AbstractSequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, bytes | bytearray | memoryview):
        raise PromptError("prompt is bytes: decode them to a string, or give a list of token ids")
    if not isinstance(prompts, AbstractSequence):
        cure = ": call its tolist()" if hasattr(prompts, "tolist") else ""
        raise PromptError(
            f"a prompt is a string, a list of token ids or a list of chat messages, not {type(prompts).__name__}{cure}"
        )
    if len(prompts) == 0:
        raise PromptError("prompt is an empty list: give at least one token, or at least one prompt")
    return isinstance(prompts[0], Integral | Mapping)


def each_prediction(prediction: Any, count: int) -> AbstractSequence[Any]:
    """The predictions of a list of prompts, None for those without one.

    Raises:
        ParameterError: it is no list with one for each.
    """
    if prediction is None:
        return [None] * count
    if isinstance(prediction, str | bytes | Mapping) or not isinstance(prediction, AbstractSequence):
        raise ParameterError(
            f"prediction is {shown(prediction)} for a list of prompts: give a list with one, or None, for each"
        )
    if len(prediction) != count:
        raise ParameterError(f"{len(prediction)} predictions for {count} prompts: give one, or None, for each")
    return prediction


def make_sequence(
    model: ReadsPrompts,
    prompt: Prompt,
    params: SamplingParams,
    prediction: PredictedOutput | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Sequence:
    """The sequence that a prompt starts, after a check that the model can follow the parameters.

    Args:
        model: the target.
        prompt: a single one.
        params: how to sample.
        prediction: what the output is expected to be.
        limits: of the prediction's length.

    Raises:
        PromptError: the prompt is empty, too long for the model, has tokens outside its vocabulary, or needs a
            tokenizer that the model does not have.
        ParameterError: the parameters name tokens that the model does not have, or forbid all that it has.
    """
    _check_params(model, check_is_params(params))
    if not is_single(prompt):
        raise PromptError("a prompt in a list is itself a list of prompts: lists of prompts don't nest")
    seed = params.seed if params.seed is not None else fresh_seed()
    tokens = encode(model, prompt)
    predicted = () if prediction is None else encode_prediction(model, prediction, limits=limits)
    if model.decoder_start_token_id is not None:
        return Sequence([model.decoder_start_token_id], 1, params, seed, tokens, predicted)
    if len(tokens) >= model.max_length:
        raise PromptTooLong(
            f"prompt has {len(tokens):,} tokens, the model {model.name} takes {model.max_length:,}, and at least one "
            "must be left for the output: shorten the prompt or use a model with a longer context"
        )
    return Sequence(tokens, len(tokens), params, seed, prediction=predicted)


def check_is_params(params: object) -> SamplingParams:
    """The parameters, checked to be `SamplingParams`.

    Raises:
        ParameterError: they are not.
    """
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"params is {shown(params)}: give SamplingParams")
    return params


def _check_params(model: ReadsPrompts, params: SamplingParams) -> None:
    bias, last = params.logit_bias or {}, model.vocab_size - 1
    for name, tokens in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
        for token in tokens:
            if token > last:
                raise ParameterError(
                    f"{name} has token {token}: the vocabulary of {model.name} has the ids 0 to {last:,}"
                )
    banned = {token for token, number in bias.items() if number == -math.inf}
    if params.min_new_tokens:
        banned |= {*params.stop_token_ids, *(token for token in model.eos_token_ids if 0 <= token <= last)}
    if len(banned) > last:
        raise ParameterError(
            f"all {last + 1:,} tokens of {model.name} are forbidden by logit_bias"
            + (f", or as end tokens by min_new_tokens={params.min_new_tokens}" if params.min_new_tokens else "")
            + ": leave at least one"
        )
    if params.stop and model.tokenizer is None:
        raise ParameterError(
            f"stop={list(params.stop)!r}: {model.name} was loaded without a tokenizer, so that stop strings can't be "
            "found: use stop_token_ids"
        )


def encode(
    model: ReadsPrompts, prompt: Prompt, tokenizer: Any = None, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """The prompt's tokens: strings get the special tokens that the tokenizer adds, token ids none.

    Args:
        model: the target.
        prompt: a single one.
        tokenizer: a copy of the model's, for another thread; None for the model's own.
        tools: of a chat, as its template takes them; None for none.

    Raises:
        PromptError: the prompt can't be used; `PromptTooLong` for a string that is far longer than the model's context.
    """
    tokenizer = model.tokenizer if tokenizer is None else tokenizer
    tokens: list[Any]
    if isinstance(prompt, str):
        _check_tokenizer(model)
        _check_text(prompt, "prompt")
        _check_size(model, tokenizer, prompt, "prompt", model.max_length, PromptTooLong)
        tokens = list(tokenizer(prompt).input_ids)
        if not tokens:
            raise PromptError("prompt is empty: give at least one character")
    elif isinstance(prompt[0], Mapping):
        tokens = _chat(model, prompt, tokenizer, tools)
    else:
        tokens = list(prompt)
    return _checked(model, tokens, "prompt")


def encode_prediction(
    model: ReadsPrompts, prediction: PredictedOutput, tokenizer: Any = None, limits: Limits = DEFAULT_LIMITS
) -> tuple[int, ...]:
    """The tokens of a predicted output, without special tokens; none for an empty one.

    Args:
        model: the target.
        prediction: a string, or token ids.
        tokenizer: as in `encode`.
        limits: with `Limits.prediction_tokens`.

    Raises:
        PromptError: it is neither, longer than `Limits.prediction_tokens`, or the model has no tokenizer.
    """
    tokens: list[Any]
    if isinstance(prediction, str):
        _check_tokenizer(model)
        _check_text(prediction, "prediction")
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        _check_size(model, tokenizer, prediction, "prediction", limits.prediction_tokens, PromptError)
        tokens = list(tokenizer(prediction, add_special_tokens=False).input_ids) if prediction else []
    elif isinstance(prediction, AbstractSequence) and not isinstance(prediction, bytes | bytearray | memoryview):
        tokens = list(prediction)
    else:
        raise PromptError(f"prediction is {shown(prediction)}: give a string, or a list of token ids")
    most = limits.prediction_tokens
    if len(tokens) > most:
        raise PromptError(
            f"prediction has {len(tokens):,} tokens, the limit is {most:,}: shorten it, or raise "
            "Limits.prediction_tokens"
        )
    return tuple(_checked(model, tokens, "prediction"))


def _checked(model: ReadsPrompts, tokens: AbstractSequence[Any], name: str) -> list[int]:
    if tokens and all(type(token) is int for token in tokens) and 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        return list(tokens)  # a prompt may be long, and is checked on the engine's thread
    for position, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise PromptError(f"token {position} of the {name} is {shown(token)}: token ids are integers")
        if not 0 <= int(token) < model.vocab_size:
            raise PromptError(
                f"token {position} of the {name} is {int(token):,}: the vocabulary of {model.name} has the ids "
                f"0 to {model.vocab_size - 1:,}"
            )
    return list(map(int, tokens))


def _chat(model: ReadsPrompts, messages: Any, tokenizer: Any, tools: list[dict[str, Any]] | None) -> list[int]:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise PromptError(f"chat message {index} is {shown(message)}: it needs the keys 'role' and 'content'")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not role:
            raise PromptError(
                f"the role of chat message {index} is {shown(role)}: give 'user', 'assistant' or 'system'"
            )
        # Without content a message may still hold something else, calls of tools for example.
        if not isinstance(content, str | list | tuple) and (content is not None or len(message) == 2):
            raise PromptError(f"the content of chat message {index} is {shown(content)}: give a string")
        if isinstance(content, str):
            name = f"the content of chat message {index}"
            _check_text(content, name)
            _check_size(model, tokenizer, content, name, model.max_length, PromptTooLong)
    _check_tokenizer(model)
    if not _has_template(tokenizer):
        raise PromptError(f"the tokenizer of {model.name} has no chat template: give the prompt as a string")
    try:
        encoded = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
        )
    except Exception as error:  # templates raise what they like
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if type(error).__name__ in ("TemplateSyntaxError", "SecurityError"):
            raise PromptError(
                f"the chat template that {model.name} is used with does not work ({reason}): mend it, or give another"
            ) from error
        raise PromptError(
            f"the chat template of {model.name} refuses the messages ({reason}): check their roles, order and contents"
        ) from error
    tokens = list(encoded["input_ids"])
    if not tokens:
        raise PromptError("prompt is empty: the chat template makes nothing of the messages")
    return tokens


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def as_message(model: ReadsPrompts, text: str) -> Prompt:
    """A text as a user's message where the model has a chat template, else as it is."""
    return [{"role": "user", "content": text}] if _has_template(model.tokenizer) else text


def _check_size(model: ReadsPrompts, tokenizer: Any, text: str, name: str, most: int, error: type[PromptError]) -> None:
    """Refuse a string that is far too long before it is tokenized, which takes seconds for some megabytes.

    Raises:
        PromptError: or what `error` is: even if each of its tokens were `_SHRINKS` times as long as the longest one,
            which leaves room for tokenizers that drop characters, they would be more than `most`.
    """
    if len(text) > most * _SHRINKS and len(text) > (longest := _longest_token(model, tokenizer)) * most * _SHRINKS:
        raise error(
            f"{name} has {len(text):,} characters, {model.name} takes {most:,} tokens there, and its longest one has "
            f"{longest:,} characters: shorten it"
        )


def _longest_token(model: ReadsPrompts, tokenizer: Any) -> int:
    """Characters of the longest token; `tokenizer` is the model's, or this thread's copy of it."""
    found = _LONGEST.get(model)
    if found is None:
        found = _LONGEST[model] = max(map(len, tokenizer.get_vocab())) if hasattr(tokenizer, "get_vocab") else 1 << 30
    return found


def _check_text(text: str, name: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{name} has half a surrogate pair, {text[error.start]!r}, at character {error.start:,}, which no encoding "
            "takes: decode the prompt's bytes with the right one"
        ) from error


def _check_tokenizer(model: ReadsPrompts) -> None:
    if model.tokenizer is None:
        raise PromptError(
            f"{model.name} was loaded without a tokenizer: load it with one, foretoken.load(model, tokenizer=…), or "
            "give the prompt as a list of token ids"
        )

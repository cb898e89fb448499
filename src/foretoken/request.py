"""From what a user passes as prompts to sequences of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Any, TypeGuard

from foretoken.errors import PromptError
from foretoken.models.base import LanguageModel
from foretoken.randomness import fresh_seed
from foretoken.sampling import SamplingParams
from foretoken.sequence import Sequence

Message = Mapping[str, Any]
"""A chat message: ``{"role": …, "content": …}``."""

Prompt = str | AbstractSequence[int] | AbstractSequence[Message]
"""A text, token ids, or the messages of a chat."""


def is_single(prompts: Prompt | AbstractSequence[Prompt]) -> TypeGuard[Prompt]:
    """Whether this is one prompt and not a list of them."""
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, AbstractSequence) and not hasattr(prompts, "__len__"):
        raise PromptError(
            f"a prompt is a string, a list of token ids or a list of chat messages, not {type(prompts).__name__}"
        )
    if len(prompts) == 0:
        raise PromptError("prompt is an empty list: give at least one token, or at least one prompt")
    return isinstance(prompts[0], int | Mapping)


def make_sequence(model: LanguageModel, prompt: Prompt, params: SamplingParams) -> Sequence:
    """The sequence that a prompt starts.

    Raises:
        PromptError: the prompt is empty, too long for the model, has tokens outside its vocabulary, or needs a
            tokenizer that the model does not have.
    """
    seed = params.seed if params.seed is not None else fresh_seed()
    tokens = encode(model, prompt)
    if model.decoder_start_token_id is not None:
        return Sequence([model.decoder_start_token_id], 1, params, seed, source=tokens)
    if len(tokens) >= model.max_length:
        raise PromptError(
            f"prompt has {len(tokens):,} tokens, the model {model.name} takes {model.max_length:,}, and at least one "
            "must be left for the output: shorten the prompt or use a model with a longer context"
        )
    return Sequence(tokens, len(tokens), params, seed)


def encode(model: LanguageModel, prompt: Prompt) -> list[int]:
    """The prompt's tokens: special tokens are added to texts as the tokenizer does, to token ids none."""
    if isinstance(prompt, str):
        tokens = list(_tokenizer(model)(prompt).input_ids)
        if not tokens:
            raise PromptError("prompt is empty: give at least one character")
    elif isinstance(prompt[0], Mapping):
        tokens = _chat(model, prompt)
    else:
        tokens = list(prompt)
    for place, token in enumerate(tokens):
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"token {place} of the prompt is {token!r}: token ids are integers")
        if not 0 <= token < model.vocab_size:
            raise PromptError(
                f"token {place} of the prompt is {token:,}: the vocabulary of {model.name} has the ids "
                f"0 to {model.vocab_size - 1:,}"
            )
    return tokens


def _chat(model: LanguageModel, messages: Any) -> list[int]:
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise PromptError(f"chat message {place} is {message!r}: it needs the keys 'role' and 'content'")
    tokenizer = _tokenizer(model)
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"the tokenizer of {model.name} has no chat template: give the prompt as a text")
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoded["input_ids"])


def _tokenizer(model: LanguageModel) -> Any:
    if model.tokenizer is None:
        raise PromptError(f"{model.name} was loaded without a tokenizer: give the prompt as a list of token ids")
    return model.tokenizer

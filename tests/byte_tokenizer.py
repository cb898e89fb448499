"""A tokenizer whose tokens are bytes and a few merges: characters span tokens, and any text round-trips."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """256 bytes, the merges ``th`` and ``the``, and ``<end>``, the end token (id 258)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token for token, symbol in enumerate([*alphabet, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    if chat:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped

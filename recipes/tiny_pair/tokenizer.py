"""The pair's tokenizer: byte-level BPE, so that any text survives the round trip, with a chat template."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, USER, ASSISTANT, PAD = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|pad|>"

# Digits one by one: a small model learns column arithmetic, never a table of number tokens. Runs of spaces are
# tokens of their own, since Python's indentation would otherwise cost four tokens a line.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+|\d| ?[^\s\w]+| ?_+|[\r\n]+[ \t]*|[ \t]+(?=\S)|[ \t]+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts` with `vocab_size` entries, the four special tokens and all 256 bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, USER, ASSISTANT, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # it would eat spaces before punctuation: no round trip
        model_max_length=max_length,
    )

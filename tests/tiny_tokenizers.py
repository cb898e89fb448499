"""Tokenizers of every common kind, trained on a few sentences, and the same one with its ids in another order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(first, second):\n    return first + second  # 12 + 345 = 357\n",
    "Grüße aus München: naïve café, 漢字かな交じり文, emoji 🙂 and 👩‍👩‍👧.",
    "He said: the other brother gathers his feathers together with the mother.",
]


def _wrapped(tokenizer: Tokenizer, **roles: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


@cache
def byte_bpe(size: int = 320, first: int = 0, end: str = "</s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE; another `first` sentence leads to other merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT[first:] * 2, trainer)
    return _wrapped(tokenizer, eos_token=end)


@cache
def wordpiece(size: int = 200) -> PreTrainedTokenizerFast:
    """As BERT has it: lower case, pieces of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return _wrapped(tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


@cache
def sentencepiece(size: int = 420) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: BPE of characters with ``▁`` for a space, bytes for what is missing, ``<s>`` before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for text in TEXT[:2] for word in text.split()]  # pieces don't span white space
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:3]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _wrapped(tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def unigram(size: int = 130) -> PreTrainedTokenizerFast:
    """As T5 has it: the likeliest pieces, with ``▁`` for a space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrapped(tokenizer, unk_token="<unk>", eos_token="</s>")


def letters(alphabet: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """One token a letter, in this order, and one for each merge."""
    names = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return _wrapped(tokenizer)


def permuted(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """The tokenizer with its ids in another order, and the new id of each old one."""
    order = list(range(len(tokenizer)))
    random.Random(seed).shuffle(order)
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["model"]["vocab"] = {name: order[token] for name, token in described["model"]["vocab"].items()}
    for token in described["added_tokens"]:
        token["id"] = order[token["id"]]
    roles = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _wrapped(Tokenizer.from_str(json.dumps(described)), **roles), order


def with_tokens(tokenizer: PreTrainedTokenizerFast, *names: str, special: bool = False) -> PreTrainedTokenizerFast:
    """A copy with more tokens, whole words to the tokenizer: ordinary ones, or special ones, which are no text."""
    copy = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()), **tokenizer.special_tokens_map
    )
    copy.add_tokens([AddedToken(name, normalized=False, special=special) for name in names])
    return copy

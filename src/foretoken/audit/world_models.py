"""The models of small worlds: tiny, random, sharp."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

DISTURBANCE = {"twin": 0.1, "cousin": 0.25, "stranger": 1.0}
"""Share of noise in a drafter's weights."""

LETTERS = "abcdefghijklmnopqrstuvwxyz"
"""The tokens."""


def _llama(vocab_size: int) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Architecture:
    """What a world's models are.

    Attributes:
        make: a model with the given number of tokens; its weights are drawn anew.
        embedding_scale: of the entries of its embedding table: 1 over what the model multiplies them by.
    """

    make: Callable[[int], Any]
    embedding_scale: float = 1.0


LLAMA = Architecture(_llama)


def make_pair(kind: str, vocab_size: int, seed: int, architecture: Architecture) -> tuple[Any, Any]:
    """Target and drafter, which is a `twin`, a `cousin` or a `stranger` of it."""
    target = _model(vocab_size, [seed, 2], architecture)
    drafter = _model(vocab_size, [seed, 3], architecture)
    share = DISTURBANCE[kind]
    with torch.no_grad():
        for parameter, other in zip(drafter.parameters(), target.parameters(), strict=True):
            if parameter.dim() > 1:
                parameter.copy_(other * math.sqrt(1 - share * share) + parameter * share)
    return target, drafter


def _model(vocab_size: int, seed: list[int], architecture: Architecture) -> Any:
    with torch.random.fork_rng(devices=[]):
        model = architecture.make(vocab_size)
    set_weights(model, np.random.default_rng(seed), vocab_size, architecture.embedding_scale)
    return model.eval().requires_grad_(False)


def set_weights(
    model: Any,
    rng: np.random.Generator,
    vocab_size: int,
    embedding_scale: float = 1.0,
    skip: Collection[int] = frozenset(),
) -> None:
    """Give a model random weights that make its distributions sharp: about one nat of entropy.

    Args:
        model: a transformers model.
        rng: draws the weights.
        vocab_size: rows of its tables of tokens.
        embedding_scale: see `Architecture`.
        skip: parameters that stay as they are, by `id`.
    """
    output = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in skip:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            noise = torch.from_numpy(rng.standard_normal(parameter.shape)).float()
            width = parameter.shape[-1]
            scale = 1.6
            if output is not None and parameter is output.weight:
                scale = 2.0
            elif parameter.shape[0] == vocab_size:
                scale = embedding_scale * math.sqrt(width)
            parameter.copy_(noise * scale / math.sqrt(width))


def make_tokenizer(vocab_size: int) -> Any:
    """One letter a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(LETTERS[:vocab_size])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=LETTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)

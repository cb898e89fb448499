"""A target that is worth learning from: a tiny Llama whose text repeats what was there, with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import tiny_llama

VOCAB = 48


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w0, w1, …."""
    words = {f"w{number}": number for number in range(VOCAB)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0")
    made.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
    return made


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(VOCAB, seed=3, num_hidden_layers=3).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve hundred prompts, of each kind that a line may be."""
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = []
    for number in range(1200):
        words = f"w{number % VOCAB} w{number // VOCAB} w{(number * 5 + 1) % VOCAB}"
        kinds = (
            {"prompt": words},
            {"question": words},
            {"messages": [{"role": "user", "content": words}, {"role": "assistant", "content": "w9"}]},
            {"conversations": [{"from": "human", "value": words}, {"from": "gpt", "value": "w9"}]},
        )
        lines.append(json.dumps(kinds[number % 4]))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file

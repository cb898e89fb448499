"""How a GGUF file wants to be sampled: the keys that llama.cpp reads."""

from __future__ import annotations

import pytest

from byte_tokenizer import byte_tokenizer
from foretoken.models import load
from tiny import tiny_llama

IN_FILE = {
    "general.sampling.temp": 0.5,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.75,
    "general.sampling.min_p": 0.125,
    "general.sampling.penalty_repeat": 1.25,
    "general.sampling.mirostat": 0,
}
WANTED = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}


@pytest.mark.parametrize("runner", ["gguf", "native"])
@pytest.mark.parametrize(("name", "metadata", "wanted"), [("sampled", IN_FILE, WANTED), ("unsampled", {}, {})])
def test_its_values_are_read(files, runner, name, metadata, wanted):
    _, path = files(name, lambda: tiny_llama(vocab_size=259, seed=1), byte_tokenizer(), **metadata)
    assert dict(load(path, runner=runner).sampling_defaults) == wanted

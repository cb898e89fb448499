"""Scores of GGUF files against the transformers models that they were made of."""

from __future__ import annotations

import pytest
import transformers as tf

from foretoken.models import gguf
from models.gguf.gguf_files import write
from models.reference import walk
from tiny import _llama_like, build, tiny_gemma2, tiny_gpt2, tiny_llama, tiny_mamba, tiny_qwen3


def tiny_qwen2(vocab_size=32, seed=0, **fields):
    return build(tf.Qwen2ForCausalLM, tf.Qwen2Config(**_llama_like(vocab_size, fields)), seed)


ROLLING_BACK = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "gpt2": tiny_gpt2,
    "gemma2": lambda: tiny_gemma2(query_pre_attn_scalar=8),
}
TOLERANCE = {"gpt2": 5e-3, "gemma2": 5e-3}
"""llama.cpp looks GELU up in a table of float16 numbers."""


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Models by architecture, each file written once; its transformers model is the attribute `module`."""
    folder = tmp_path_factory.mktemp("gguf")
    made = {}

    def loaded(kind, make, **options):
        if kind not in made:
            module = make()
            made[kind] = module, write(module, folder / f"{kind}.gguf")
        module, path = made[kind]
        model = gguf.load(path, kind, gguf.Options(**options))
        model.module = module
        return model

    return loaded


@pytest.mark.parametrize("kind", ROLLING_BACK)
def test_a_walk_over_trees_commits_and_copies_scores_as_transformers(load, kind):
    model = load(kind, ROLLING_BACK[kind])
    assert max(walk(model, size, seed, rounds=6) for size, seed in ((1, 0), (3, 1))) < TOLERANCE.get(kind, 1e-4)


@pytest.mark.parametrize(("rows", "sequences"), [(1, 2), (2, 3), (2, 5), (63, 64)])
def test_few_sequences_and_rows_of_a_context_give_the_same_scores(load, rows, sequences):
    model = load("llama", tiny_llama, rows=rows, sequences=sequences)
    assert max(walk(model, 3, seed, rounds=6) for seed in range(4)) < 1e-4


def test_a_state_that_can_not_be_rolled_back_is_computed_again(load):
    model = load("mamba", tiny_mamba)
    assert max(walk(model, size, seed) for size, seed in ((1, 0), (3, 1))) < 1e-4

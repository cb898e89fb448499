from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foretoken
from foretoken.peers.kinds import EngineKind
from peers.fakes import fake_kind, make_environments, make_fake


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied Llama checkpoint with random weights, without a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The shipped pair's drafter: the smallest trained checkpoint, tied."""
    return foretoken.tiny_pair_path() / "drafter"


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment for the fake engine."""
    return make_environments(tmp_path_factory.mktemp("peers"))


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake engine's program."""
    return make_fake(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def kind(fake: Path) -> EngineKind:
    """The fake engine; one process for all its modes."""
    return fake_kind(fake)

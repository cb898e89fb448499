from __future__ import annotations

from pathlib import Path

import pytest

import foretoken


@pytest.fixture(scope="session")
def shipped() -> Path:
    """The shipped pair's drafter: a small trained checkpoint with a tokenizer."""
    return foretoken.tiny_pair_path() / "drafter"

from __future__ import annotations

from pathlib import Path

import pytest

from peers.fakes import make_fake


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("fake"))

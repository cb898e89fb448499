"""A race of given speeds."""

from __future__ import annotations

import pytest
from given_speeds import plan

from foretoken.bench.records import Store
from foretoken.tune import search


@pytest.fixture
def race():
    def run(track, chosen=None, file=None):
        chosen = chosen or plan([name for name in track.speeds if isinstance(name, str) and "," not in name])
        store = Store(file, chosen.settings())
        return search(chosen, track, store, clock=lambda: track.now)

    return run

"""The server that most tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_harness import Running, serving, tiny_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for the tests of a module, which leave it as it is; its threads end with them."""
    with serving(tiny_engine()) as running:
        yield running

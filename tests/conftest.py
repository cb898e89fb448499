"""Shared by all tests: one thread (tiny models run faster with one), and `tests` on the import path."""

import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Costs measured in one test must not influence the next: no folder can be created below a file.
os.environ["FORETOKEN_CACHE"] = os.path.join(os.devnull, "nowhere")

# A background process of a shell ignores SIGINT, and so would the programs that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


GRID = 6
"""Of the cases of a test that is marked as a grid, `make test` runs every so many-th; `make test-grid` runs all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--grid", action="store_true", help=f"all cases of grids, not every {GRID}th")


@pytest.hookimpl(trylast=True)  # behind -k and -m: of what they leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `make test-grid`."""
    if config.getoption("--grid"):
        return
    seen: Counter[str] = Counter()
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        leave = item.get_closest_marker("grid") is not None and seen[test] % GRID > 0
        (left if leave else kept).append(item)
        seen[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection, and collect seldom: it takes up to a third of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_logstart() -> None:
    """Give a test one thread: a run of the benchmark sets torch's threads for all that its process does later."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeds_of_requests_without_one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a seed get one by the name of their test: what a test sees must not differ between runs."""
    draw = Random(request.node.nodeid)
    for module in ("foretoken.randomness", "foretoken.engine.prompts", "foretoken.integrations.transformers"):
        monkeypatch.setattr(f"{module}.fresh_seed", lambda: draw.getrandbits(63))


@pytest.fixture
def quick_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sweep will do for requests with seeds: what they draft does not depend on what is measured."""
    monkeypatch.setattr("foretoken.engine.calibration.SECONDS", 0.0)

"""Whether this processor gives a token the same bits in any company."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from foretoken.models import load
from foretoken.models.native.cache import Feed
from foretoken.models.processor import multiplies_rows_alike

TEXT = [1 + (7 * at) % 29 for at in range(300)]


def scores_of(backend, start, size):
    """``[size, V]``: of tokens of `TEXT` from `start` on, in one pass, behind those before."""
    cache = backend.open(1)
    backend.score(cache, [Feed(0, 0, TEXT[:start], 0, None)], [(0, start - 1)], ())
    feed, picks = Feed(0, start, TEXT[start : start + size], 0, None), [(0, node) for node in range(size)]
    return backend.score(cache, [feed], picks, ())[0]


@cache
def alike_folder(folder, dtype):
    """`skip_unless_alike` of a checkpoint, once for all tests that may share it.

    It makes no graphs of fixed sizes however much it runs, as a model that was just loaded has none.
    """
    model = skip_unless_alike(folder, dtype)
    model.backend.narrow.took = lambda *_: None
    return model


def skip_unless_alike(source, dtype):
    """The model, natively on OpenVINO; skips where it is not known whether few rows are multiplied as many are."""
    pytest.importorskip("openvino")
    if not multiplies_rows_alike():
        pytest.skip("needs a processor with AVX-512 for bfloat16, and without AMX: of others bits are not promised")
    model = load(source, runner="native", backend="openvino", dtype=dtype)
    whole = scores_of(model.backend, 16, 17)
    assert all(torch.equal(scores_of(model.backend, 16, size), whole[:size]) for size in (1, 2, 6))
    return model

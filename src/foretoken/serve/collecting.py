"""Objects of the loaded server that Python's garbage collector need not look at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def start_not_collected() -> Iterator[None]:
    """Have Python's garbage collector leave alone what is there now, until the block ends.

    Models, libraries and the application are more than 200,000 objects, and stay. To look through all of them takes
    0.1 s, in which nothing is decoded; some 200 requests make garbage enough for that to happen.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

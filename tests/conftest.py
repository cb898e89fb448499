"""Shared by all tests: one thread (tiny models run faster so), and `tests` importable as plain modules."""

import gc
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# What one test learns about costs must not steer the next one: nothing can be kept below a file.
os.environ["FORETOKEN_CACHE"] = os.path.join(os.devnull, "nowhere")

# Started in the background, a shell's child is deaf to Ctrl-C, and so would be the programs that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported stays: the garbage collector need not look through it again and again (a tenth of the time)."""
    gc.collect()
    gc.freeze()

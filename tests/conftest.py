"""Shared by all tests: one thread (tiny models run faster so), and `tests` importable as plain modules."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# What one run learns about costs must not steer the next one.
os.environ["FORETOKEN_CACHE"] = tempfile.mkdtemp(prefix="foretoken-tests-")
atexit.register(shutil.rmtree, os.environ["FORETOKEN_CACHE"], ignore_errors=True)

# Started in the background, a shell's child is deaf to Ctrl-C, and so would be the programs that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)

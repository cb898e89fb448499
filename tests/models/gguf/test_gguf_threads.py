"""Threads that computed for a thread don't outlast its requests: those of other threads would be slowed down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.models.threads import _runtimes
from tiny import tiny_llama

HEAD = """
import asyncio, os, signal, sys, time
import torch
from foretoken import AsyncEngine, Engine, SamplingParams, load
from foretoken.models.threads import release_threads

PARAMS = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)

def threads(expected=None):  # those that end take a moment
    end = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) != expected and expected is not None and time.monotonic() < end:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))

def compute(model):
    one = torch.tensor([[3]])
    model.forward(one, one * 0 - 1, one[0] * 0 + 1, model.open(1))

model = load(sys.argv[1], n_threads=2)
"""


def run(files, program):
    _, path = files("llama", tiny_llama)
    done = subprocess.run([sys.executable, "-c", HEAD + program, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.fixture(autouse=True)
def _openmp(load):
    load("llama", tiny_llama)
    maps = Path("/proc/self/maps")
    if not maps.exists() or "/libgomp" not in maps.read_text(errors="surrogateescape"):
        pytest.skip("nothing computes here with GNU's OpenMP")
    assert _runtimes()


def test_a_call_of_the_engine_leaves_no_threads_behind(files):
    before, computing, made, after, streamed, closed, failed = run(
        files,
        """
compute(model)
release_threads()
before = threads()
compute(model)
print(before, threads())
engine = Engine(model, None)
print(threads(before))
engine.generate([3, 4], PARAMS)
print(threads(before))
list(engine.stream([3, 4], PARAMS))
print(threads(before))
for event in engine.stream([3, 4], PARAMS):
    break
del event
print(threads(before))
engine.submit([3, 4], PARAMS)
engine.step()
engine.target.decode_row = None
try:
    engine.step()
except TypeError:
    print(threads(before))
""",
    )
    assert computing == before + 1  # else this shows nothing
    assert before == made == after == streamed == closed == failed


def test_an_engine_of_a_thread_of_its_own_keeps_none_between_requests(files):
    before, idle, scored = run(
        files,
        """
async def main():
    engine = Engine(model, None)
    engine.warm_up()
    before = threads()
    async with AsyncEngine(engine) as served:
        for _ in range(3):
            await served.generate([3, 4], PARAMS)
        print(before, threads(before + 1))
        await served.score([3, 4, 5])
        print(threads(before + 1))

asyncio.run(main())
""",
    )
    assert idle == scored == before + 1


def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have(files):
    (status,) = run(
        files,
        """
compute(model)
child = os.fork()
if not child:
    signal.alarm(60)  # ends it if it waits
    release_threads()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    )
    assert status == 7

"""A worker process: what it may do, and what is said when it does something else."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.errors import BenchError, Unsupported
from foretoken.bench.process import Worker

REQUEST = {"mode": "plain", "k": None, "prompts": [[3, 4]], "num_tokens": 32, "temperature": 0.0, "seed": 0}


def start(fake: Path, behaviour: str = "good", **times: float) -> Worker:
    options = {"options": {"behaviour": behaviour}}
    return Worker([sys.executable, str(fake), json.dumps(options)], **times)  # type: ignore[arg-type]


def state(worker: Worker) -> str:
    return Path(f"/proc/{worker._process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_it_answers_and_says_what_it_runs(fake: Path) -> None:
    worker = start(fake)
    try:
        assert worker.versions == {"fake": "1.0"}
        answer = worker.ask(REQUEST)
        assert answer["seconds"] == 1.0
        assert answer["tokens"] == [list(range(3, 35))]
    finally:
        worker.close()
    assert not worker.alive


def test_what_libraries_print_does_not_get_between_the_answers(fake: Path) -> None:
    worker = start(fake, "chatty")
    try:
        assert worker.ask(REQUEST)["seconds"] == worker.ask(REQUEST)["seconds"] == 1.0
    finally:
        worker.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_it_stands_still_unless_asked(fake: Path) -> None:
    worker = start(fake)
    try:
        worker.ask(REQUEST)
        deadline = time.monotonic() + 10
        while state(worker) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(worker) == "T"
    finally:
        worker.close()


def test_what_an_engine_cannot_do_is_no_failure(fake: Path) -> None:
    worker = start(fake, "can't")
    try:
        with pytest.raises(Unsupported, match=r"^it has no such mode$"):
            worker.ask(REQUEST)
    finally:
        worker.close()


def test_a_failure_leaves_the_worker_running(fake: Path) -> None:
    worker = start(fake, "broken")
    try:
        with pytest.raises(BenchError, match="ValueError: shapes differ"):
            worker.ask(REQUEST)
        assert worker.ask({**REQUEST, "num_tokens": 8})["seconds"] == 0.25
    finally:
        worker.close()


def test_a_worker_that_ends_is_noticed(fake: Path) -> None:
    worker = start(fake, "die")
    with pytest.raises(BenchError, match="status 3"):
        worker.ask(REQUEST)
    worker.close()


def test_one_that_takes_too_long_is_given_up(fake: Path) -> None:
    worker = start(fake, "slow", answer_seconds=0.2)
    with pytest.raises(BenchError, match="did not answer"):
        worker.ask(REQUEST)
    worker.close(patience_seconds=0.1)
    assert not worker.alive


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("no start", "RuntimeError: no such model"),
        ("die at start", "status 7.*the cat is on the keyboard"),
        ("babble", "'hello', which is no JSON"),
    ],
)
def test_a_worker_that_does_not_start_says_why(fake: Path, behaviour: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        start(fake, behaviour)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="can't be started"):
        Worker([str(tmp_path / "python")])


def test_everything_it_has_started_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(
        "import json, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'ready': True, 'versions': {'child': child.pid}}), flush=True)\n"
        "sys.stdin.read()\n"
    )
    worker = Worker([sys.executable, str(program)])
    child: Any = Path(f"/proc/{worker.versions['child']}")
    worker.close()
    deadline = time.monotonic() + 10
    while child.exists() and "Z" not in (child / "stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not child.exists() or " Z " in (child / "stat").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_no_worker_stays_behind_when_its_owner_is_killed(fake: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from foretoken.bench.process import Worker\n"
        "worker = Worker([sys.executable, sys.argv[1], '{\"options\": {}}'])\n"
        "print(worker._process.pid, flush=True)\n"
        "while ') T' not in open(f'/proc/{worker._process.pid}/stat').read(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(fake)], capture_output=True, text=True, check=False)
    worker, deadline = Path(f"/proc/{int(ended.stdout)}/stat"), time.monotonic() + 10
    while worker.exists() and ") Z" not in worker.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.exists() or ") Z" in worker.read_text()

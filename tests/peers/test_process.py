"""A worker process: what it may do, what is said when it does something else, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foretoken.peers.errors import PeerError, Unsupported
from foretoken.peers.process import Worker

REQUEST = {"mode": "plain", "k": None, "prompts": [[3, 4]], "num_tokens": 32, "params": {}, "seeds": [0]}
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ignores SIGTERM is killed soon, as nothing here cleans up after itself."""
    monkeypatch.setattr("foretoken.peers.process.POLITE_SECONDS", 0.2)


@contextmanager
def started(fake: Path, behaviour: str = "good", log: Path | None = None, **times: float) -> Iterator[Worker]:
    options = {"options": {"behaviour": behaviour, "log": None if log is None else str(log)}}
    worker = Worker([sys.executable, str(fake), json.dumps(options)], **times)  # type: ignore[arg-type]
    try:
        yield worker
    finally:
        worker.close()


def state(pid: int) -> str | None:
    """One letter; None where there is no such process, or nothing but its exit status."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if letter in "ZX" else letter


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_it_answers_and_says_what_it_runs(fake: Path) -> None:
    with started(fake) as worker:
        assert worker.versions == {"fake": "1.0"}
        answer = worker.ask(REQUEST)
        assert answer["seconds"] == 1.0
        assert answer["tokens"] == [list(range(3, 35))]
    assert not worker.alive
    with pytest.raises(PeerError, match="has ended"):
        worker.ask(REQUEST)


def test_what_libraries_print_does_not_get_between_the_answers(fake: Path) -> None:
    with started(fake, "chatty") as worker:
        assert worker.ask(REQUEST)["seconds"] == worker.ask(REQUEST)["seconds"] == 1.0


@needs_proc
def test_it_is_stopped_unless_asked(fake: Path) -> None:
    with started(fake) as worker:
        worker.ask(REQUEST)
        assert wait_until(lambda: state(worker.pid) == "T")


def test_what_an_engine_cannot_do_is_no_failure(fake: Path) -> None:
    with started(fake, "can't") as worker, pytest.raises(Unsupported, match=r"^it has no such mode$"):
        worker.ask(REQUEST)


def test_a_failure_leaves_the_worker_running(fake: Path) -> None:
    with started(fake, "broken") as worker:
        with pytest.raises(PeerError, match="ValueError: shapes differ"):
            worker.ask(REQUEST)
        assert worker.ask({**REQUEST, "num_tokens": 8})["seconds"] == 0.25


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("die", "ended with status 3"),
        ("children, die", "ended with status -9"),
        ("hang", "did not answer within 0.2 seconds"),
        ("rubbish", "which is no JSON object"),
    ],
)
def test_a_worker_that_fails_for_good_is_closed(fake: Path, behaviour: str, message: str) -> None:
    with started(fake, behaviour, answer_seconds=0.2 if behaviour == "hang" else 60) as worker:
        with pytest.raises(PeerError, match=message):
            worker.ask(REQUEST)
        assert not worker.alive
        if behaviour == "children, die":  # the one in a session of its own, see below
            os.kill(left(worker)[0][-1], signal.SIGKILL)


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(fake: Path, tmp_path: Path) -> None:
    with started(fake, "late", tmp_path / "log", answer_seconds=0.2) as worker:
        with pytest.raises(PeerError, match="did not answer"):
            worker.ask(REQUEST)
        (tmp_path / "log.now").touch()
        with pytest.raises(PeerError, match="has ended"):
            worker.ask({**REQUEST, "num_tokens": 8})


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("no start", "RuntimeError: no such model"),
        ("die at start", "status 7.*out of disk"),
        ("babble", "'hello', which is no JSON"),
    ],
)
def test_a_worker_that_does_not_start_says_why(fake: Path, behaviour: str, words: str) -> None:
    with pytest.raises(PeerError, match=words), started(fake, behaviour):
        pass


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("print('{}')", "instead of its ready message"),
        ("print('[' * 100_000)", "which is no JSON"),
        ("import os, time; os.close(1); time.sleep(600)", "ended with status unknown"),
    ],
)
def test_programs_that_say_something_else(source: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.peers.process.END_SECONDS", 0.1)
    with pytest.raises(PeerError, match=words):
        Worker([sys.executable, "-c", source])


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.peers.process.MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(PeerError, match="more than 1 MiB in one line"):
        Worker([sys.executable, "-c", "while True: print('x' * 65536, end='')"])


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="can't be started"):
        Worker([str(tmp_path / "python")])


# What stays behind.


def left(worker: Worker) -> tuple[list[int], Path]:
    """The worker and its children, and the file that it leaves in the folder for temporary files."""
    return [worker.pid, *map(int, worker.versions["children"].split(","))], Path(worker.versions["file"])


@needs_proc
@pytest.mark.parametrize("behaviour", ["children", "children, hang", "children, die"])
def test_its_children_and_files_go_with_it(fake: Path, behaviour: str) -> None:
    with started(fake, behaviour, answer_seconds=0.2 if "hang" in behaviour else 60) as worker:
        processes, file = left(worker)
        assert all(map(state, processes))
        assert file.exists()
        if behaviour == "children":
            worker.ask(REQUEST)
        else:
            with pytest.raises(PeerError):
                worker.ask(REQUEST)
        worker.close(patience_seconds=0.5)
    # The one in a session of its own can't be found once the worker that started it has been killed.
    assert not any(map(state, processes[: -1 if "die" in behaviour else None]))
    assert not file.parent.exists()
    if "die" in behaviour:
        os.kill(processes[-1], signal.SIGKILL)


OWNER = """
import json, os, signal, sys
from foretoken.peers import process
process.POLITE_SECONDS = 0.2
worker = process.Worker([sys.executable, sys.argv[1], json.dumps({"options": {"behaviour": sys.argv[2]}})])
print(json.dumps({"worker": worker.pid, **worker.versions}), flush=True)
if sys.argv[2] == "children, hang":
    worker.ask({"mode": "plain", "k": None, "prompts": [[3]], "num_tokens": 4})
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_proc
@pytest.mark.parametrize("behaviour", ["children", "children, hang"])
def test_nothing_stays_behind_when_the_owner_is_killed(fake: Path, behaviour: str) -> None:
    """Killed while the worker is stopped, and while it is busy and does not listen."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(fake), behaviour], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    told = json.loads(owner.stdout.readline())
    processes = [told["worker"], *map(int, told["children"].split(","))]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    for pid in processes:
        assert wait_until(lambda pid=pid: state(pid) is None), f"process {processes.index(pid)} still runs"
    assert wait_until(lambda: not Path(told["file"]).parent.exists())

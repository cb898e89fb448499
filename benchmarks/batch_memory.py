"""Memory of ``foretoken batch --ray`` over very many small requests, with the command killed in the middle.

    python benchmarks/batch_memory.py                      # 5,000 requests of four tokens, the shipped pair
    python benchmarks/batch_memory.py --requests 100000 --kill 0.5 -o memory.json

The resident memory of the command, of the engines (the largest one) and of all of Ray's other processes is read from
/proc (Linux) every few seconds; growth is a line fitted through the samples after `--warm` answers. With `--kill`, the
command gets SIGKILL once that part of the answers is there, and is run again. At the end each request has to have
exactly one answer, of status 200.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
LONGEST_END = 300.0
"""Seconds in which Ray's processes have to end once the command has."""


@dataclass(frozen=True)
class Sample:
    """Memory at one moment, in MiB.

    Attributes:
        run: 0 for the first start of the command, 1 after it was killed.
        seconds: since the first start.
        answers: in the file.
        command: of the process that reads and writes the files.
        engine: of the largest engine.
        ray: of all other processes below the command.
    """

    run: int
    seconds: float
    answers: int
    command: float
    engine: float
    ray: float


def parents() -> dict[int, int]:
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(file.parent.name)] = int(parent)
    return found


def below(pid: int) -> list[int]:
    known, found = parents(), [pid]
    for one in found:
        found += [child for child, parent in known.items() if parent == one]
    return found[1:]


def resident(pid: int) -> float:
    """MiB; 0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / MIB
    except OSError:
        return 0.0


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def is_engine(pid: int) -> bool:
    return "ray::_Engine" in command_line(pid)


def write_requests(file: Path, count: int, tokens: int) -> None:
    with file.open("w") as lines:
        for number in range(count):
            body = {"prompt": f"Chapter {number}. Once", "max_tokens": tokens, "seed": number, "ignore_eos": True}
            lines.write(json.dumps({"custom_id": f"request-{number}", "url": "/v1/completions", "body": body}) + "\n")


def answers_in(file: Path) -> int:
    """Lines of a file."""
    count = 0
    with suppress(FileNotFoundError), file.open("rb") as lines:
        while block := lines.read(MIB):
            count += block.count(b"\n")
    return count


def run(command: list[str], output: Path, until: float, every: float, samples: list[Sample], began: float) -> None:
    """Run the command, to its end or until there are so many answers."""
    number = samples[-1].run + 1 if samples else 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        seen: set[int] = set()
        try:
            while process.poll() is None:
                answers, others = answers_in(output), below(process.pid)
                seen.update(others)
                engines = [one for one in others if is_engine(one)]
                largest = max(map(resident, engines), default=0.0)
                rest = sum(resident(one) for one in others if one not in engines)
                now = time.monotonic() - began
                samples.append(Sample(number, now, answers, resident(process.pid), largest, rest))
                if answers >= until:
                    process.send_signal(signal.SIGKILL)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(every)
        finally:
            process.kill()
    ended = time.monotonic()
    while left := seen & set(parents()):
        if time.monotonic() > ended + LONGEST_END:
            sys.exit(f"these processes have not ended: {[(one, command_line(one)[:80]) for one in sorted(left)]}")
        time.sleep(0.2)
    print(f"all processes had ended {time.monotonic() - ended:.1f} s after the command", flush=True)
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(f"{' '.join(command)} ended with status {process.returncode}")


def growth(samples: list[Sample], warm: int, requests: int) -> dict[str, float]:
    """MiB for each 10,000 answers, once a run has given `warm` of them; of the run that has most.

    Processes end once all answers are there: samples from then on are left out.
    """
    lines = {}
    for number in {one.run for one in samples}:
        its = [one for one in samples if one.run == number]
        lines[number] = [one for one in its if its[0].answers + warm <= one.answers < requests]
    longest = max(lines.values(), key=len)
    if len(longest) < 3:
        return {}
    answers = [float(one.answers) for one in longest]
    return {
        name: 10_000 * statistics.linear_regression(answers, [asdict(one)[name] for one in longest]).slope
        for name in ("command", "engine", "ray")
    }


def check(requests: int, output: Path) -> None:
    told = [json.loads(line) for line in output.open()]
    names = Counter(one["custom_id"] for one in told)
    assert len(names) == requests, f"{requests - len(names):,} requests have no answer"
    assert set(names.values()) == {1}, "requests have several answers"
    assert {one["response"]["status_code"] for one in told} == {200}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--kill", type=float, default=0.0, help="part of the answers; 0: not at all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between samples")
    parser.add_argument("--warm", type=int, default=2_000, help="answers of a run before growth counts")
    parser.add_argument("--option", action="append", default=[], help="of foretoken batch, --option=--drafter=none")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        requests, output = Path(folder) / "requests.jsonl", Path(folder) / "responses.jsonl"
        write_requests(requests, given.requests, given.tokens)
        command = [sys.executable, "-m", "foretoken", "batch", str(requests), "-o", str(output)]
        command += ["--ray", "local", "--jobs", str(given.jobs), *given.option]
        began = time.monotonic()
        if given.kill:
            run(command, output, given.kill * given.requests, given.every, samples, began)
            print(f"killed with {answers_in(output):,} answers there", flush=True)
        run(command, output, given.requests + 1, given.every, samples, began)
        check(given.requests, output)
    for one in samples[:: max(len(samples) // 20, 1)]:
        print(
            f"{one.run} {one.seconds:7.1f} s {one.answers:8,} answers: command {one.command:6.1f}, "
            f"engine {one.engine:6.1f}, rest of Ray {one.ray:7.1f} MiB"
        )
    grown = growth(samples, given.warm, given.requests)
    told = {"requests": given.requests, "seconds": samples[-1].seconds, "mib_per_10000": grown}
    print(json.dumps(told))
    if given.output:
        given.output.write_text(json.dumps({**told, "samples": [asdict(one) for one in samples]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

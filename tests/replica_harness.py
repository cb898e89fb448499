"""``foretoken serve --replicas`` as a process, with a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tiny
from byte_tokenizer import byte_tokenizer
from replica_processes import below, command_line
from serve_harness import Answer, Running

LONGEST = 300
"""Seconds that nothing here comes near: a test that hangs ends."""

ADDRESS = re.compile(r"(\S+) at http://([\d.]+):(\d+)/v1")


@dataclass(frozen=True)
class Cluster(Running):
    """A server with replicas that runs."""

    process: subprocess.Popen[str]

    def replicas(self) -> list[int]:
        return [one for one in below(self.process.pid) if "ServeReplica:foretoken:replica" in command_line(one)]

    def ask(self, **body: Any) -> Answer:
        return self.post("/v1/completions", {"max_tokens": 12, "ignore_eos": True, **body})

    def counts(self, name: str) -> dict[str, float]:
        """What the replicas count, by replica."""
        found = re.findall(rf'^{re.escape(name)}{{engine="(\w+)".*}} (\S+)$', self.get("/metrics").text, re.MULTILINE)
        return {replica: float(value) for replica, value in found}

    def gateway(self, name: str) -> float:
        (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(value)


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def tiny_target(folder: Path) -> Path:
    """A target of one's own below a folder."""
    target = folder / "tiny-target"
    tiny.tiny_llama(vocab_size=259, seed=1, eos_token_id=258, max_position_embeddings=4096).save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    return target


@contextmanager
def replicas_of(target: Path, options: Sequence[str]) -> Iterator[Cluster]:
    """Serve until the block ends; all processes end with it."""
    command = [sys.executable, "-m", "foretoken", "serve", "--target", str(target), "--port", "0", "--eager", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment) as it:
        try:
            assert it.stderr is not None
            said = []
            for line in it.stderr:
                said.append(line)
                if found := ADDRESS.search(line):
                    break
            else:
                pytest.fail("".join(said))
            yield Cluster(int(found[3]), None, it)  # type: ignore[arg-type]
        finally:
            if it.poll() is None:
                for one in [*below(it.pid), it.pid]:
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)

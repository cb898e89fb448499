"""The config file that is shipped, carried out by Ray Serve's own commands on clusters of this machine."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from replica_harness import LONGEST
from replica_processes import below

pytest.importorskip("ray", reason="needs the extra ray")

EXAMPLE = Path(__file__).parents[3] / "examples" / "replicas.yaml"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in bound:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in bound]


def write_config(file: Path, port: int, fewest: int = 1) -> None:
    """The example for one small machine, with up to two replicas."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["http_options"].update(host="127.0.0.1", port=port)
    (application,) = config["applications"]
    application["args"].update(host="127.0.0.1", replicas="1-2", replica_cpus=1, gateways=1)
    application["deployments"][0]["autoscaling_config"].update(min_replicas=fewest, max_replicas=2)
    file.write_text(yaml.safe_dump(config))


def complete(port: int) -> dict[str, Any]:
    body = json.dumps({"prompt": "Once", "max_tokens": 8, "ignore_eos": True, "seed": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def replicas(port: int) -> set[str]:
    """The names of those that run."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return set(re.findall(r'^vllm:num_requests_running{engine="(\w+)"', answer.read().decode(), re.MULTILINE))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For what Ray writes, the address of this machine's latest cluster included; sockets have no longer names."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Command:
    """A command that runs, with the processes below it."""

    process: subprocess.Popen[bytes]
    log: Path
    started: set[int] = field(default_factory=set)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what it, or a process below it, does; no connection means not yet."""
        end = time.monotonic() + LONGEST
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            self.started.update(below(self.process.pid))
            with suppress(urllib.error.URLError, TimeoutError, ConnectionError):
                if condition():
                    return
            time.sleep(0.2)


@contextmanager
def running(command: list[str], log: Path, environment: dict[str, str], ending: int) -> Iterator[Command]:
    """Run a command until the block ends, and see all processes below it end."""
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        it = Command(process, log)
        try:
            yield it
        finally:
            it.started.update(below(process.pid))
            process.send_signal(ending)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            _wait_for_the_end(it.started)


@pytest.mark.full
def test_the_example_is_run_and_answers(tmp_path):
    """By ``serve run``, which starts a cluster without Ray's dashboard."""
    (port,), file = free_ports(1), tmp_path / "replicas.yaml"
    write_config(file, port)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_ADDRESS"] = "local"  # else it is the machine's latest cluster, though that has ended
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    with running(command, tmp_path / "log", environment, signal.SIGINT) as it:
        it.until(lambda: complete(port)["usage"]["completion_tokens"] == 8)


@pytest.mark.full
def test_the_example_is_deployed_changed_and_shut_down(tmp_path, short_path):
    """By ``ray start --head``, ``serve deploy``, which needs the dashboard, and ``serve shutdown``."""
    port, cluster, dashboard, *others = free_ports(5)
    file, api = tmp_path / "replicas.yaml", f"http://127.0.0.1:{dashboard}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    head = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={cluster}"]
    head += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    head += [f"--ray-client-server-port={others[0]}", f"--dashboard-agent-listen-port={others[1]}"]
    head += ["--num-cpus=4", "--object-store-memory=100000000", f"--temp-dir={short_path}"]

    def serve(verb: str, *arguments: str) -> str:
        command = [sys.executable, "-m", "ray.serve.scripts", verb, "--address", api, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def dashboard_answers() -> bool:
        with suppress(urllib.error.HTTPError):  # without the token it refuses, as it should
            urllib.request.urlopen(f"{api}/api/version", timeout=60).close()
        return True

    with running(head, tmp_path / "log", environment, signal.SIGTERM) as it:
        it.until(dashboard_answers)
        write_config(file, port)
        serve("deploy", str(file))
        it.until(lambda: complete(port)["usage"]["completion_tokens"] == 8)
        text, (first,) = complete(port)["choices"][0]["text"], replicas(port)
        write_config(file, port, fewest=2)
        serve("deploy", str(file))
        it.until(lambda: len(replicas(port)) == 2)
        assert first in replicas(port)  # such a change starts none anew
        assert complete(port)["choices"][0]["text"] == text
        serve("shutdown", "--yes")
        it.until(lambda: not yaml.safe_load(serve("status"))["applications"])


def _wait_for_the_end(processes: set[int], seconds: float = 30.0) -> None:
    """Ray's own processes end by themselves once the one that started them has."""
    end = time.monotonic() + seconds
    while left := [one for one in processes if Path(f"/proc/{one}/cmdline").exists()]:
        if time.monotonic() > end:
            for one in left:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            return
        time.sleep(0.2)

"""The config file that is shipped, carried out by Ray Serve's own command on a cluster of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from replica_processes import below

pytest.importorskip("ray", reason="needs the extra ray")

EXAMPLE = Path(__file__).parents[3] / "examples" / "replicas.yaml"
LONGEST = 300


def complete(port: int) -> dict[str, Any]:
    body = json.dumps({"prompt": "Once", "max_tokens": 8, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.mark.full
def test_the_example_is_deployed_and_answers(tmp_path):
    """By ``serve run``, which deploys the same file as ``serve deploy`` does, without Ray's dashboard."""
    config = yaml.safe_load(EXAMPLE.read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config["http_options"].update(host="127.0.0.1", port=port)
    config["applications"][0]["args"].update(host="127.0.0.1", replicas="1-2", replica_cpus=1, gateways=1)
    file, log = tmp_path / "replicas.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-m", "ray.serve.scripts", "run", str(file)]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as it:
        started: set[int] = set()
        try:
            end, answer = time.monotonic() + LONGEST, None
            while answer is None:
                assert it.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                started.update(below(it.pid))
                with suppress(urllib.error.URLError, TimeoutError, ConnectionError):
                    answer = complete(port)
                time.sleep(0.2)
            assert answer["usage"]["completion_tokens"] == 8
        finally:
            started.update(below(it.pid))
            it.send_signal(signal.SIGINT)
            try:
                it.wait(60)
            except subprocess.TimeoutExpired:
                it.kill()
            _wait_for_the_end(started)


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

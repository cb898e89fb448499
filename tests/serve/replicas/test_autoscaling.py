"""``foretoken serve --replicas auto`` as its load rises and falls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from replica_harness import LONGEST, Cluster, replicas_of, tiny_target, until

pytest.importorskip("ray", reason="needs the extra ray")

ROWS, MANY, FEW = 4, 16, 2


@contextmanager
def load(cluster: Cluster, clients: int) -> Iterator[list[tuple[int, int]]]:
    """Clients that ask one request after the other until the block ends; of each answer its status and tokens."""
    answers: list[tuple[int, int]] = []
    over = threading.Event()

    def ask(client: int) -> None:
        seed = client
        while not over.is_set():
            answer = cluster.ask(prompt="the cat", max_tokens=100, seed=seed)
            tokens = answer.json["usage"]["completion_tokens"] if answer.status == 200 else 0
            answers.append((answer.status, tokens))
            seed += clients

    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask, client) for client in range(clients)]
        try:
            yield answers
        finally:
            over.set()
            for one in asking:
                one.result(LONGEST)


@pytest.mark.full
def test_a_second_replica_comes_is_used_and_goes_and_no_request_is_lost(tmp_path):
    """Some two minutes: Ray Serve looks at the load of the last half minute."""
    options = ["--replicas", "auto", "--replica-cpus", str((os.cpu_count() or 1) / 2)]  # two fit
    options += ["--max-batch-size", str(ROWS), "--max-queue", "64", "--upscale-delay", "1", "--downscale-delay", "1"]
    with replicas_of(tiny_target(tmp_path), options) as cluster:
        (first,) = cluster.counts("vllm:generation_tokens_total")
        began = time.monotonic()

        def second_answers() -> bool:
            made = cluster.counts("vllm:generation_tokens_total")
            return len(made) == 2 and all(made.values())

        with load(cluster, MANY) as risen:
            until(second_answers)
            came = time.monotonic() - began
            assert len(cluster.replicas()) == 2
            (second,) = set(cluster.counts("vllm:num_requests_running")) - {first}
            used = cluster.counts("vllm:generation_tokens_total")
            until(lambda: all(now > used[one] for one, now in cluster.counts("vllm:generation_tokens_total").items()))
        began = time.monotonic()
        with load(cluster, FEW) as fallen:
            until(lambda: len(cluster.replicas()) == 1)
            went = time.monotonic() - began
            until(lambda: len(cluster.counts("vllm:num_requests_running")) == 1)
            (left,) = cluster.counts("vllm:num_requests_running")
            before = cluster.counts("vllm:generation_tokens_total")
            until(lambda: cluster.counts("vllm:generation_tokens_total")[left] > before[left])
        assert left in (first, second)
        assert set(risen) == set(fallen) == {(200, 100)}
        total = cluster.counts("vllm:generation_tokens_total")  # of the one that is gone, too
        assert sum(total.values()) <= 100 * (len(risen) + len(fallen))
        assert total[left] > before[left]
        print(
            f"{len(risen):,} + {len(fallen):,} requests; the second came after {came:.1f} s, one went after {went:.1f}"
        )
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(LONGEST) == 0

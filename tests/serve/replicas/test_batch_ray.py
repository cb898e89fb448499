"""``foretoken batch --ray``: the answers of one engine, by two actors, of which one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import tiny
from byte_tokenizer import byte_tokenizer
from foretoken.cli.batch_engines import EngineOptions, run_here
from foretoken.cli.batch_file import Item
from foretoken.cli.options import ModelOptions
from replica_processes import below, command_line

ray = pytest.importorskip("ray", reason="needs the extra ray")

REQUESTS = 80


@pytest.mark.full
def test_actors_give_the_same_answers_and_few_requests_are_under_way(tmp_path):
    """Most of its time is the start of a cluster."""
    from foretoken.cli.batch_ray import RayJobs, run_ray
    from foretoken.serve.in_process import Answer

    tiny.tiny_llama(vocab_size=259, seed=1, max_position_embeddings=4096).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    models = ModelOptions(target=str(tmp_path), runner="hf")
    options = EngineOptions(models, 4, None, "tiny", 4096, True)
    taken = 0

    def items() -> Iterator[Item]:
        nonlocal taken
        for line in range(1, REQUESTS + 1):
            taken += 1
            body = {"model": "tiny", "prompt": f"the cat {line}", "max_tokens": 60, "ignore_eos": True, "seed": line}
            yield Item(line, f"r{line}", "/v1/completions", body)

    def answers(run) -> dict[str, str]:
        told: dict[str, str] = {}
        most = 0

        def done(item: Item, answer: Answer) -> None:
            nonlocal most
            assert answer.status == 200
            assert item.custom_id not in told
            told[item.custom_id] = answer.body["choices"][0]["text"]
            most = max(most, taken - len(told))
            if run is by_ray and len(told) == 3:
                os.kill(killable(), signal.SIGKILL)

        run(done)
        assert most <= (2 if run is by_ray else 1) * options.window
        return told

    def by_ray(done) -> None:
        run_ray(options, RayJobs("local", 2), items(), done)

    def here(done) -> None:
        run_here(options, items(), done)

    found = answers(by_ray)
    taken = 0
    assert len(found) == REQUESTS
    assert found == answers(here)
    assert not ray.is_initialized()


def test_the_cluster_keeps_no_record_of_each_request(monkeypatch):
    """Ray's events of the last 100,000 tasks are some 260 MB."""
    from foretoken.cli.batch_ray import RayJobs, run_ray

    given = {}

    class Kind:
        def options(self, **options):
            given.update(options)
            return self

        def remote(self, options):
            return None

    monkeypatch.setattr("foretoken.cli.batch_ray.cluster", lambda *_: nullcontext())
    monkeypatch.setattr("ray.remote", lambda kind: Kind())
    run_ray(EngineOptions(ModelOptions(), 4, None, "tiny", 16, True), RayJobs("local", 2), iter(()), pytest.fail)
    assert given["enable_task_events"] is False


def killable() -> int:
    """A process of an actor below this one."""
    return next(one for one in below(os.getpid()) if "ray::_Engine" in command_line(one))

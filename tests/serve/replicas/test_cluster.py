"""Two replicas on a Ray cluster of this machine: ``foretoken serve --replicas 2`` as a process.

Most of its time is the start of some ten processes: one test does all, so that no second cluster starts in another of
pytest's workers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from replica_harness import LONGEST, Cluster, replicas_of, tiny_target, until
from replica_processes import below, maps, parents
from serve_harness import Answer, begin, hang_up

pytest.importorskip("ray", reason="needs the extra ray")

ROWS, QUEUE = 4, 4
LONG = "a long system prompt, the same for every turn of one conversation; " * 4


@pytest.fixture
def cluster(tmp_path) -> Iterator[Cluster]:
    options = ["--replicas", "2", "--max-batch-size", str(ROWS), "--max-queue", str(QUEUE), "--grace", "240"]
    with replicas_of(tiny_target(tmp_path), options) as it:
        yield it


def only_replicas_have_loaded_torch(cluster: Cluster) -> None:
    """Which takes seconds and 200 MB: gateway, proxy and controller pass requests on."""
    ran = [one for one in [cluster.process.pid, *below(cluster.process.pid)] if maps(one, "libtorch_cpu")]
    assert sorted(ran) == sorted(cluster.replicas())
    assert len(ran) == 2


def a_seed_gives_the_same_output_on_every_replica(cluster: Cluster) -> None:
    answers: list[Answer] = []

    def both_have_answered() -> bool:  # where requests overlap, which nothing but their number makes them do
        with ThreadPoolExecutor(4) as pool:
            answers.extend(pool.map(lambda _: cluster.ask(prompt="the cat", seed=5), range(4)))
        return all(cluster.counts("vllm:generation_tokens_total").values())

    until(both_have_answered)
    assert {one.status for one in answers} == {200}
    assert len({one.json["choices"][0]["text"] for one in answers}) == 1
    stream = cluster.ask(prompt="the cat", seed=5, stream=True)
    *events, done = stream.events
    assert done == "[DONE]"
    assert len(events) > 1
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == answers[0].json["choices"][0]["text"]


def the_turns_of_a_conversation_go_to_one_replica_and_conversations_to_all(cluster: Cluster) -> None:
    def prompts() -> dict[str, float]:
        return cluster.counts("vllm:prompt_tokens_total")

    before, prompt, sent = prompts(), LONG, 0
    for turn in range(4):
        sent += len(prompt) - len(LONG)
        answer = cluster.ask(prompt=prompt, seed=turn)
        assert answer.status == 200
        prompt += f" turn {turn} of it"
    added = [after - before[replica] for replica, after in prompts().items()]
    assert min(added) == 0
    assert max(added) >= 4 * len(LONG)


def a_kept_response_is_found_again(cluster: Cluster) -> None:
    asked = {"input": "the cat", "max_output_tokens": 4, "store": True}
    names: list[str] = []

    def both_have_one() -> bool:
        with ThreadPoolExecutor(4) as pool:
            names.extend(one.json["id"] for one in pool.map(lambda _: cluster.post("/v1/responses", asked), range(4)))
        return len({name.split("_")[1] for name in names}) == 2

    until(both_have_one)
    for name in names[-8:]:
        assert cluster.post("/v1/responses", {**asked, "previous_response_id": name}).status == 200


def hanging_up_ends_a_request(cluster: Cluster) -> None:
    hang_up(*begin(cluster, model=cluster.get("/v1/models").json["data"][0]["id"], max_tokens=3000))
    until(lambda: not sum(cluster.counts("vllm:num_requests_running").values()))
    until(lambda: not cluster.gateway("foretoken:gateway_requests_in_flight"))


def full_queues_answer_429_and_errors_have_the_apis_form(cluster: Cluster) -> None:
    many = 2 * (ROWS + QUEUE) + QUEUE + 8
    with ThreadPoolExecutor(many + 1) as pool:
        answering = [pool.submit(cluster.ask, prompt="the cat", max_tokens=100) for _ in range(many)]
        assert pool.submit(cluster.get, "/health").result(LONGEST).status == 200  # however full the queues are
        answers = [one.result(LONGEST) for one in answering]
    statuses = [one.status for one in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 2 * ROWS
    refused = answers[statuses.index(429)]
    assert refused.headers["retry-after"]
    assert refused.json["error"]["code"] == "queue_full"
    assert cluster.get("/nowhere").json["error"]["type"] == "not_found_error"
    assert cluster.get("/ready").status == 200


def a_replicas_death_costs_only_what_it_was_streaming_and_another_one_comes(cluster: Cluster) -> None:
    before = cluster.counts("vllm:generation_tokens_total")
    victim = cluster.replicas()[0]  # to look for it takes long enough for short requests to end
    plain = []
    with ThreadPoolExecutor(4) as pool:
        for number in range(4):  # those that come at once may all go to the replica that is left
            plain.append(pool.submit(cluster.ask, prompt="the cat", seed=5, max_tokens=2400))
            until(lambda number=number: cluster.gateway("foretoken:gateway_requests_in_flight") == 1 + number)
        # Begun last: between their first tokens and the death there is no look at the cluster, in which they could end.
        streams = [begin(cluster, model="tiny-target", max_tokens=3000, seed=seed) for seed in range(4)]
        os.kill(victim, signal.SIGKILL)
        answers = [one.result(LONGEST) for one in plain]
    assert [one.status for one in answers] == [200] * 4
    assert len({one.json["choices"][0]["text"] for one in answers}) == 1
    ends = []
    for connection, response in streams:
        ends.append(response.read().decode().strip().rpartition("data: ")[2])
        connection.close()
    broken = [json.loads(end)["error"]["code"] for end in ends if end != "[DONE]"]
    assert 0 < len(broken) < 4
    assert set(broken) == {"replica_died"}
    assert cluster.gateway("foretoken:replica_broken_streams_total") == len(broken)
    assert cluster.gateway("foretoken:replica_retries_total") > 0
    until(lambda: len(cluster.counts("vllm:num_requests_running")) == 2)
    assert len(set(cluster.counts("vllm:num_requests_running")) & set(before)) == 1
    after = cluster.counts("vllm:generation_tokens_total")
    assert all(after[replica] >= count for replica, count in before.items())  # of the one that has ended, too


def a_reader_that_takes_nothing_holds_up_no_replica(cluster: Cluster) -> None:
    connection, response = begin(cluster, model="tiny-target", max_tokens=400)
    until(lambda: not sum(cluster.counts("vllm:num_requests_running").values()))
    assert response.read().endswith(b"data: [DONE]\n\n")  # it has waited on its way
    connection.close()


def sigterm_lets_a_stream_end_and_ends_all_processes(cluster: Cluster) -> None:
    started = below(cluster.process.pid)
    assert len(started) > 3
    connection, response = begin(cluster, model="tiny-target", max_tokens=200)
    cluster.process.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()
    _, said = cluster.process.communicate(timeout=LONGEST)
    assert cluster.process.returncode == 0
    assert "the cat" not in said
    until(lambda: not set(started) & set(parents()))


def test_two_replicas_on_one_machine(cluster):
    only_replicas_have_loaded_torch(cluster)
    a_seed_gives_the_same_output_on_every_replica(cluster)
    the_turns_of_a_conversation_go_to_one_replica_and_conversations_to_all(cluster)
    a_kept_response_is_found_again(cluster)
    hanging_up_ends_a_request(cluster)
    full_queues_answer_429_and_errors_have_the_apis_form(cluster)
    a_replicas_death_costs_only_what_it_was_streaming_and_another_one_comes(cluster)
    a_reader_that_takes_nothing_holds_up_no_replica(cluster)
    sigterm_lets_a_stream_end_and_ends_all_processes(cluster)

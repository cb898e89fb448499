"""``foretoken batch``: every request of a file is answered once, whatever ends a run in the middle."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter

import pytest

from foretoken.cli import batch_engines, batch_run
from foretoken.cli.batch_file import Results
from foretoken.errors import ForetokenError

TORN = '{"id":"batch_req_123","custom_id":"r1","resp'


def request(name, url="/v1/completions", **body):
    if url == "/v1/completions":
        body = {"prompt": "the cat", "max_tokens": 3, **body}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def batch(call, models, files):
    """Write lines to the file of requests, and run."""

    def run(lines, *options):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        files[0].write_text(text)
        return call("batch", files[0], "-o", files[1], "--target", models.target, "-k", "0", *options)

    return run


def answers(file) -> dict[str, dict]:
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert max(Counter(answer["custom_id"] for answer in told).values(), default=1) == 1
    return {answer["custom_id"]: answer for answer in told}


def test_each_path_answers_in_openais_form(batch, files):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        request("a", seed=1),
        request("b", "/v1/chat/completions", messages=messages, max_tokens=4),
        request("c", "/v1/responses", input="hi", max_output_tokens=4),
        request("d", "/v1/messages", messages=messages, max_tokens=4),
        request("e", max_tokens=-1),
        request("f", n=40, max_tokens=1),  # more choices than rows
    ]
    result = batch(lines)
    assert result.exit_code == 1, result.output  # for e
    assert "6 requests answered, 1 of them with an error" in result.output
    told = answers(files[1])
    assert set(told) == set("abcdef")
    for name, answer in told.items():
        assert set(answer) == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == (400 if name == "e" else 200)
        assert answer["response"]["request_id"]
    assert told["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert told["b"]["response"]["body"]["object"] == "chat.completion"
    assert told["e"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert len(told["f"]["response"]["body"]["choices"]) == 40


def test_bad_lines_are_told_by_their_number(batch, files):
    lines = [
        request("a"),
        "{",
        "",
        "[]",
        {"custom_id": "x", "method": "POST", "url": "/v1/completions"},
        {**request("b"), "method": "GET"},
        {**request("c"), "url": "/v1/embeddings"},
        {**request("d"), "urls": 1},
        {**request(""), "body": {}},
        request("e", stream=True),
        request("a", max_tokens=1),
        "[" * 100_000,
        request("deep", prompt=json.loads("[" * 900 + "]" * 900)),
        request("g"),
        request("nan", temperature=float("nan")),
        json.dumps(request("large", temperature="")).replace('""', "1e400"),
    ]
    result = batch(lines)
    assert result.exit_code == 1
    assert set(answers(files[1])) == {"a", "g"}
    told = [line.partition(" of ")[0] for line in result.output.splitlines() if line.startswith("error: line")]
    assert told == [f"error: line {number}" for number in (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16)]
    assert "2 requests answered, 0 of them with an error; 13 bad lines" in result.output


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_run_that_was_ended_goes_on(batch, files, monkeypatch, after):
    lines = [request(f"r{index}", seed=index) for index in range(6)]
    wanted = [5 - after + index for index in range(after)]
    add, count = Results.add, [0]

    def dies(self, item, answer):
        if count[0] == after:
            raise KeyboardInterrupt
        count[0] += 1
        add(self, item, answer)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", dies)
        assert batch(lines).exit_code == 130
    before = files[1].read_bytes()
    assert len(answers(files[1])) == after == len(wanted)
    with files[1].open("a") as file:
        file.write(TORN)
    result = batch(lines)
    assert result.exit_code == 0, result.output
    assert files[1].read_bytes().startswith(before)
    assert set(answers(files[1])) == {f"r{index}" for index in range(6)}
    assert f"{6 - after} requests answered" in result.output
    assert "1 request answered" in batch([*lines, request("one more")]).output


def test_a_run_with_nothing_left_loads_nothing(batch, files, monkeypatch):
    assert batch([request("a")]).exit_code == 0
    monkeypatch.setattr(batch_run, "run_here", lambda *_: pytest.fail("a model was loaded"))
    result = batch([request("a")])
    assert result.exit_code == 0
    assert "1 of 1 requests have their answer already" in result.output


@pytest.mark.parametrize("content", ["notes of mine", "notes of mine\n", '{"custom_id": "a"}\n', "[]\n"])
def test_another_file_is_left_as_it_is(batch, files, content):
    files[1].write_text(content)
    result = batch([request("a")])
    assert result.exit_code == 2
    assert "no answer of a batch" in result.output
    assert files[1].read_text() == content


def test_two_runs_do_not_write_to_one_file(batch, files):
    files[1].touch()
    other = Results(files[1])
    result = batch([request("a")])
    assert result.exit_code == 2
    assert "another process" in result.output
    other.close()
    assert batch([request("a")]).exit_code == 0


def test_files_that_can_not_be_used(batch, call, files):
    assert "can't be read" in call("batch", "/no/such/file", "-o", files[1]).output
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(files[0].parent / "socket"))
        assert "can't be read" in call("batch", files[0].parent / "socket", "-o", files[1]).output
    files[1].write_text("")
    assert "can't be read" in call("batch", "/no/such/file", "-o", files[1]).output
    files[0].write_text("")
    assert "same file" in call("batch", files[0], "-o", files[0]).output
    assert "can't write" in call("batch", files[0], "-o", files[0].parent).output


def test_an_engine_that_ends_leaves_its_requests_for_the_next_run(batch, files, monkeypatch):
    from foretoken.engine.engine import Engine

    lines = [request(f"r{index}", max_tokens=length, ignore_eos=True) for index, length in enumerate((1, 5, 90, 90))]
    step = Engine.step

    def breaks(self):
        if files[1].read_bytes().count(b"\n") == 2:  # the short ones have their answer
            raise RuntimeError("broken")
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", breaks)
        result = batch(lines)
    assert result.exit_code == 2
    assert "ended with an error" in result.output
    assert set(answers(files[1])) == {"r0", "r1"}
    assert batch(lines).exit_code == 0
    assert {answer["response"]["status_code"] for answer in answers(files[1]).values()} == {200}


def start(models, files, *options):
    command = [sys.executable, "-m", "foretoken", "batch", files[0], "-o", files[1], "--target", models.target]
    return subprocess.Popen([*command, "-k", "0", *options], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.full
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_run_goes_on(models, files, jobs):
    lines = [request(f"r{index}", max_tokens=300, ignore_eos=True, seed=index) for index in range(40)]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ("--jobs", str(jobs), "--max-batch-size", "2")
    with start(models, files, *options) as running:
        while running.poll() is None and not (files[1].exists() and files[1].read_bytes().count(b"\n") > 3):
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    some = len(answers(files[1]))
    assert 3 < some < 40
    with start(models, files, *options) as running:
        assert running.wait(240) == 0
    assert set(answers(files[1])) == {line["custom_id"] for line in lines}


def test_a_file_of_answers_may_end_without_a_newline(batch, files):
    """As another program leaves it, which may write JSON with spaces."""
    assert batch([request("a"), request("b")]).exit_code == 0
    told = [json.loads(line) for line in files[1].read_text().splitlines()]
    files[1].write_text("\n".join(map(json.dumps, told)))
    assert batch([request("a"), request("b"), request("c")]).exit_code == 0
    assert set(answers(files[1])) == {"a", "b", "c"}
    assert Results(files[1]).done == {"a", "b", "c"}


def test_a_full_disk_names_the_file_and_the_cure(call, models, files):
    files[0].write_text(json.dumps(request("a")) + "\n")
    result = call("batch", files[0], "-o", "/dev/full", "--target", models.target, "-k", "0")
    assert result.exit_code == 2
    assert "'/dev/full' can't be written (No space left on device): free some space" in " ".join(result.output.split())


def test_a_device_has_no_answers_of_earlier_runs(call, models, files):
    files[0].write_text(json.dumps(request("a")) + "\n")
    result = call("batch", files[0], "-o", os.devnull, "--target", models.target, "-k", "0")
    assert result.exit_code == 0, result.output


def test_requests_may_come_through_a_pipe(call, models, files):
    """Which can be read but once."""
    lines = [request("a"), "{", request("b")]
    reads, writes = os.pipe()
    with os.fdopen(writes, "w") as pipe:
        pipe.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    result = call("batch", f"/dev/fd/{reads}", "-o", files[1], "--target", models.target, "-k", "0")
    os.close(reads)
    assert result.exit_code == 1
    assert f"line 2 of '/dev/fd/{reads}'" in " ".join(result.output.split())
    assert "2 requests answered, 0 of them with an error; 1 bad line" in " ".join(result.output.split())
    assert set(answers(files[1])) == {"a", "b"}


def _dies(connection, options):
    """An engine's process that the system ends while it loads."""
    os._exit(9)


def test_engines_that_die_while_they_load_are_no_success(monkeypatch):
    monkeypatch.setattr(batch_engines, "_process", _dies)
    options = batch_engines.EngineOptions(None, 1, None, None, 1, True)
    with pytest.raises(ForetokenError, match="process of an engine has ended"):
        batch_engines.run_processes(options, 2, iter(()), lambda item, answer: None)


def test_engines_share_the_processors_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(batch_engines, "_process", _dies)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    options = batch_engines.EngineOptions(None, 1, None, None, 1, True)
    with pytest.raises(ForetokenError, match="process of an engine has ended"):
        batch_engines.run_processes(options, 2, iter(()), lambda item, answer: None)
    assert int(os.environ["OMP_NUM_THREADS"]) <= 2


def test_requests_that_no_engine_answered_are_told(batch, monkeypatch):
    monkeypatch.setattr(batch_run, "run_here", lambda engines, items, done: None)
    result = batch([request("a"), request("b")])
    assert result.exit_code == 2
    assert "2 of 2 requests have no answer" in " ".join(result.output.split())


def test_gpus_of_engines_that_are_on_no_cluster_are_refused(batch, files):
    result = batch([request("a")], "--job-gpus", "1")
    assert result.exit_code == 2
    assert "--job-gpus is 1, and is read with --ray alone" in " ".join(result.output.split())
    assert not files[1].exists()

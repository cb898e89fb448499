"""Against a server of the standard library, on this machine's loopback, that serves a small world."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from transformers import AutoTokenizer

from audit.samplers import PlainSampler, colder, leaning
from foretoken.audit import AuditError, AuditPlan, ReferenceModel, SampleRequest, audit_model, audit_worlds
from foretoken.audit.endpoint import EndpointSubject, prompts_of
from foretoken.audit.indirect import audit_own_logprobs, audit_pair
from foretoken.sampling import SamplingParams

LETTERS = "abcdefgh"


class Server:
    """Completions over a world's target."""

    def __init__(self, world, fault=None, ids=True, logprobs=True, wait=0.0, status=200, text=None):
        self.world, self.sampler = world, PlainSampler(world, fault)
        self.ids, self.logprobs, self.wait, self.status, self.text = ids, logprobs, wait, status, text
        self.lock = threading.Lock()

    def complete(self, body):
        params = SamplingParams(temperature=body["temperature"], top_p=body["top_p"], top_k=body.get("top_k", 0))
        with self.lock:
            texts = self.sampler(body["prompt"], body["n"], body["max_tokens"], params, body["seed"])
            return [self.choice(body["prompt"], text, body["logprobs"] or 0) for text in texts]

    def choice(self, prompt, text, top):
        names = self.text or LETTERS
        choice = {"text": " ".join(names[t] for t in text), "finish_reason": "length"}
        if self.ids:
            choice["token_ids"] = text
        if self.logprobs:
            probs = self.world.target_reference.probs(prompt, [text], SamplingParams())[0]
            logs = np.log(probs)
            choice["logprobs"] = {
                "tokens": [names[t] for t in text],
                "token_logprobs": [float(logs[i, t]) for i, t in enumerate(text)],
                "top_logprobs": [{names[t]: float(row[t]) for t in np.argsort(-row)[:top]} for row in logs],
            }
        return choice


@contextmanager
def serving(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            time.sleep(server.wait)
            if server.status != 200:
                self.answer({"error": {"message": "the model is tired"}}, server.status)
            else:
                self.answer({"choices": server.complete(body)})

        def answer(self, data, status=200):
            payload = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)  # seconds between looks at its end
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


QUICK = AuditPlan(tv=0.35)


def subject(url, world=None, **options):
    options = {"samples_per_request": 256, "concurrency": 1, **options}
    tokenizer = AutoTokenizer.from_pretrained(world.target_path) if world is not None else None
    return EndpointSubject(url, None, tokenizer, **options)


@pytest.mark.usefixtures("without_picture")
def test_a_server_of_a_world(world):
    with serving(Server(world)) as url:
        one = subject(url)
        assert one.name == f"tiny at {url}/v1"
        assert audit_worlds(lambda _: one, [world], QUICK).verdict == "PASS"
    with serving(Server(world, leaning)) as url:
        assert audit_worlds(lambda _: subject(url), [world], AuditPlan()).verdict == "FAIL"


def test_tokens_by_their_text(world):
    with serving(Server(world, ids=False)) as url:
        report = audit_model(
            subject(url, world), ReferenceModel(world.target), world.prompts, SamplingParams(), QUICK, num_tokens=16
        )
        assert report.verdict == "PASS"


def test_its_own_logprobs(world):
    with serving(Server(world, ids=False)) as url:
        report = audit_own_logprobs(subject(url), world.prompts, SamplingParams(), QUICK, num_tokens=16, top=4)
        assert report.verdict == "PASS"
        with pytest.raises(AuditError, match=r"temperature 0\.5"):
            audit_own_logprobs(subject(url), world.prompts, SamplingParams(temperature=0.5), QUICK)
    with serving(Server(world, colder, ids=False)) as url:
        report = audit_own_logprobs(subject(url), world.prompts, SamplingParams(), AuditPlan(), num_tokens=24, top=4)
        assert report.verdict == "FAIL"


def test_against_a_second_server(world):
    with serving(Server(world)) as reference, serving(Server(world, leaning, logprobs=False)) as url:
        report = audit_pair(
            subject(url), subject(reference), [world.prompts[0]], SamplingParams(), AuditPlan(tv=0.05), num_tokens=3
        )
        assert report.verdict == "FAIL"


def test_an_end_token_that_the_server_leaves_out(world):
    with serving(Server(world)) as url:
        one = subject(url, end_token=7)
        request = SampleRequest((0, 1), 1, 4)
        assert one._sample({"token_ids": [1, 2], "finish_reason": "stop"}, request).tokens == [1, 2, 7]
        assert one._sample({"token_ids": [1, 7], "finish_reason": "stop"}, request).tokens == [1, 7]
        assert one._sample({"token_ids": [1, 2, 3, 4], "finish_reason": "length"}, request).tokens == [1, 2, 3, 4]


# What goes wrong.


def test_down(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(AuditError, match=r"can't be reached.*start the server"):
        subject(f"http://127.0.0.1:{port}")


def test_slow(world):
    with serving(Server(world, wait=3.0)) as url, pytest.raises(AuditError, match=r"within 0.2 seconds.*--timeout"):
        audit_worlds(lambda _: subject(url, timeout_seconds=0.2), [world], QUICK)


def test_refusing(world):
    with serving(Server(world, status=503)) as url, pytest.raises(AuditError, match=r"status 503.*tired"):
        audit_worlds(lambda _: subject(url), [world], QUICK)


def test_no_tokens_at_all(world):
    with serving(Server(world, ids=False, logprobs=False)) as url:
        with pytest.raises(AuditError, match="neither token ids nor logprobs"):
            audit_worlds(lambda _: subject(url, world), [world], QUICK)
        with pytest.raises(AuditError, match="no logprobs"):
            audit_own_logprobs(subject(url), world.prompts, SamplingParams(), QUICK)


def test_a_tokenizer_that_does_not_round_trip(world):
    with serving(Server(world, ids=False, text="abcdefgX")) as url:
        with pytest.raises(AuditError, match=r"does not round-trip.*'X', which no token has"):
            audit_worlds(lambda _: subject(url, world), [world], QUICK)
        with pytest.raises(AuditError, match="give a tokenizer"):
            audit_worlds(lambda _: subject(url), [world], QUICK)
    with pytest.raises(AuditError, match="does not round-trip"):
        prompts_of(AutoTokenizer.from_pretrained(world.target_path), ["a b z"])


def test_no_web_address():
    with pytest.raises(AuditError, match="no web address"):
        EndpointSubject("localhost:8000")

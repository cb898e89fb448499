"""Against a server of the standard library, on this machine's loopback, that serves a small world."""

from __future__ import annotations

import json
import math
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
from foretoken.audit.endpoint import EndpointSubject, prompts_of, reported_probs
from foretoken.audit.indirect import audit_own_logprobs, audit_pair
from foretoken.sampling import SamplingParams

LETTERS = "abcdefgh"


class Server:
    """Completions over a world's target."""

    def __init__(
        self, world, fault=None, ids=True, logprobs=True, wait=0.0, status=200, text=None, reply="the model is tired"
    ):
        self.world, self.sampler = world, PlainSampler(world, fault)
        self.ids, self.logprobs, self.wait, self.status, self.text = ids, logprobs, wait, status, text
        self.lock, self.reply = threading.Lock(), reply

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
                self.answer({"error": {"message": server.reply}}, server.status)
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


def test_one_of_several_end_tokens(world):
    """Another one than the first is an end, too; which one a server left out, it has to say."""
    with serving(Server(world)) as url:
        one, request = subject(url, end_token=(7, 6)), SampleRequest((0, 1), 1, 4)
        assert one._sample({"token_ids": [1, 6], "finish_reason": "stop"}, request).tokens == [1, 6]
        told = {"token_ids": [1, 2], "finish_reason": "stop", "stop_reason": 6}
        assert one._sample(told, request).tokens == [1, 2, 6]
        with pytest.raises(AuditError, match=r"which of the end tokens 7, 6 ended an output: have it return token ids"):
            one._sample({"token_ids": [1, 2], "finish_reason": "stop"}, request)


def test_an_output_that_is_nothing_but_an_end_token_left_out(world):
    with serving(Server(world)) as url:
        one, request = subject(url, end_token=7), SampleRequest((0, 1), 1, 4)
        assert one._sample({"token_ids": [], "finish_reason": "stop"}, request).tokens == [7]
        assert one._sample({"logprobs": {"tokens": []}, "finish_reason": "stop"}, request).tokens == [7]
        empty = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        assert reported_probs({"logprobs": empty, "finish_reason": "stop"}, 4, url)[0].shape == (0, 5)


def test_tokens_beside_an_empty_list_of_ids(world):
    with serving(Server(world)) as url:
        told = {"token_ids": [], "logprobs": {"tokens": ["b", "token_id:2"]}, "finish_reason": "length"}
        assert subject(url, world)._sample(told, SampleRequest((0, 1), 1, 2)).tokens == [1, 2]


class Ending(Server):
    """Its outputs end with the token 7, which some servers leave out."""

    def __init__(self, world, keeps):
        super().__init__(world)
        self.keeps = keeps

    def choice(self, prompt, text, top):
        if 7 not in text:
            return super().choice(prompt, text, top)
        shown = text[: text.index(7) + self.keeps]
        return {**super().choice(prompt, shown, top), "token_ids": shown, "finish_reason": "stop"}


def test_two_servers_whose_outputs_end(world):
    """It is one distribution whether a server returns the end token or not."""
    with serving(Ending(world, True)) as reference, serving(Ending(world, False)) as url:
        prompts, plan = [world.prompts[0]], AuditPlan(tv=0.7)
        options = {"num_tokens": 3, "ends": (7,)}
        report = audit_pair(subject(url), subject(reference), prompts, SamplingParams(), plan, **options)
        assert report.verdict == "PASS"
        with pytest.raises(AuditError, match="the last is no end token"):  # its probability is to be known there
            audit_model(subject(url), world.target_reference, prompts, SamplingParams(), QUICK, num_tokens=3)


def test_its_own_logprobs_of_outputs_that_end(world):
    """An end is sampled, too: where its logprobs are missing, the outputs that are left are no fair sample."""
    prompts, options = [world.prompts[0]], {"num_tokens": 4, "top": 8, "ends": (7,)}
    with serving(Ending(world, False)) as url:
        missing = r"ended an output after \d of 4 tokens without an end token among its logprobs.*give --target"
        with pytest.raises(AuditError, match=missing):
            audit_own_logprobs(subject(url), prompts, SamplingParams(), QUICK, **options)
        by_text = subject(url, world)
        assert by_text.reports_end({"logprobs": {"tokens": ["a", "h"]}}, (7,))
        assert not by_text.reports_end({"logprobs": {"tokens": ["a", "b"]}, "token_ids": [0, 1, 7]}, (7,))
        assert not by_text.reports_end({"logprobs": {"tokens": []}}, (7,))
    with serving(Ending(world, True)) as url:
        assert audit_own_logprobs(subject(url), prompts, SamplingParams(), QUICK, **options).verdict == "PASS"


class Defaults(Server):
    """Where a request is silent it keeps the two likeliest tokens, as generation_config.json may say."""

    def complete(self, body):
        return super().complete({"top_k": 2, **body})


def test_parameters_that_shape_nothing_are_sent(world):
    """And so the defaults of a server do not apply."""
    with serving(Defaults(world)) as url:
        one = subject(url)
        (samples,) = zip(*(sample.tokens for sample in one.sample(SampleRequest(world.prompts[0], 64, 1))), strict=True)
        assert len(set(samples)) > 2
        body = one._body(SampleRequest((0, 1), 1, 4), 5, 1)
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
        body = subject(url, extra={"top_k": None})._body(SampleRequest((0, 1), 1, 4), 5, 1)
        assert "top_k" not in body


def test_a_server_that_refuses_a_field(world):
    cure = r"status 400.*a request leaves top_k out with --field top_k=null"
    reply = "Unrecognized request argument supplied: top_k"
    with serving(Server(world, status=400, reply=reply)) as url, pytest.raises(AuditError, match=cure):
        subject(url).sample(SampleRequest((0, 1), 1, 4))


@pytest.mark.parametrize(
    ("status", "reply"),
    [
        (500, "top_k: out of memory"),
        (400, "extra_field is not allowed in {top_k: -1, min_p: 0.0}"),
        (400, "top_kernels is not available"),
    ],
)
def test_a_field_that_is_not_to_blame_is_not_named(world, status, reply):
    with serving(Server(world, status=status, reply=reply)) as url, pytest.raises(AuditError) as told:
        subject(url).sample(SampleRequest((0, 1), 1, 4))
    assert "--field" not in str(told.value)


def test_all_fields_that_a_server_refuses_are_named(world):
    reply = "Unrecognized request arguments supplied: top_k, min_p, repetition_penalty"
    with serving(Server(world, status=400, reply=reply)) as url, pytest.raises(AuditError) as told:
        subject(url).sample(SampleRequest((0, 1), 1, 4))
    assert str(told.value).endswith("--field top_k=null --field min_p=null --field repetition_penalty=null")


def test_reported_logprobs_are_rounded():
    """A token outside of the table is possible, whatever the rounded ones leave for it."""
    reported = {
        "tokens": ["x"],
        "token_logprobs": [-9.0],
        "top_logprobs": [{"a": -0.6931, "b": -0.6931}],  # together more than 1
    }
    probs, cells = reported_probs({"logprobs": reported}, 2, "it")
    assert cells.tolist() == [2]
    assert probs[0, 2] == pytest.approx(math.exp(-9.0), rel=1e-3)
    assert probs.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("value", [None, math.nan])
def test_reported_logprobs_that_are_no_numbers(value):
    for table, own in (({"a": -1.0}, value), ({"a": value}, -1.0)):
        reported = {"tokens": ["a"], "token_logprobs": [own], "top_logprobs": [table]}
        with pytest.raises(AuditError, match="logprobs that are no numbers, of the token 'a'"):
            reported_probs({"logprobs": reported}, 2, "it")


class Shared(Server):
    """Two tokens have one text, unless a request asks for numbers in place of texts."""

    def complete(self, body):
        numbers = body.get("return_tokens_as_token_ids")
        self.text = [f"token_id:{token}" for token in range(8)] if numbers else "abcdefgg"
        return super().complete(body)


def test_tokens_that_share_a_text(world):
    with serving(Shared(world, ids=False)) as url:
        report = audit_own_logprobs(subject(url), world.prompts, SamplingParams(), QUICK, num_tokens=16, top=8)
        assert report.verdict == "PASS"
        assert len(subject(url, world).sample(SampleRequest((0, 1), 4, 8))) == 4


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

"""A replica's side, without Ray: the application's answers in parts."""

from __future__ import annotations

import asyncio
import json

import pytest

from foretoken.serve import ServeSettings, create_app
from foretoken.serve.replicas.messages import Question, ReplicaDied
from foretoken.serve.replicas.replica import answer, check_engine
from serve_harness import MODEL, tiny_engine

JSON = ((b"content-type", b"application/json"),)


def question(**body) -> Question:
    told = {"model": MODEL, "prompt": "the cat", "max_tokens": 12, "ignore_eos": True, "seed": 1, **body}
    return Question("POST", "/v1/completions", b"", JSON, json.dumps(told).encode())


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def in_app(engine, work):
    app = create_app(engine, ServeSettings(model=MODEL))

    async def run():
        try:
            return await work(app)
        finally:
            await app.state.service.aclose()

    return asyncio.run(run())


def test_answers_come_in_parts_the_first_with_the_status(engine):
    async def ask(app):
        one = [part async for part in answer(app, question())]
        stream = [part async for part in answer(app, question(stream=True))]
        wrong = [part async for part in answer(app, question(max_tokens=-1))]
        return one, stream, wrong

    one, stream, wrong = in_app(engine, ask)
    assert [part.status for part in one] == [200]
    text = json.loads(one[0].body)["choices"][0]["text"]
    assert [part.status for part in stream] == [200, *[0] * (len(stream) - 1)]
    assert all(part.body for part in stream)
    events = b"".join(part.body for part in stream).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == text
    assert wrong[0].status == 400


def test_closing_an_answer_ends_its_request(engine):
    async def ask(app):
        parts = answer(app, question(max_tokens=400, stream=True))
        await anext(parts)
        running = app.state.service.admission.in_flight
        await parts.aclose()
        return running, app.state.service.admission.in_flight

    assert in_app(engine, ask) == (1, 0)


def test_an_engine_that_has_ended_is_told():
    class Service:
        class engine:  # noqa: N801
            failure: Exception | None = None

    check_engine(Service)
    Service.engine.failure = ValueError("secret")
    with pytest.raises(ReplicaDied, match="ValueError") as told:
        check_engine(Service)
    assert "secret" not in str(told.value)

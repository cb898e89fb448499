"""A replica as Ray Serve calls it, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from foretoken.serve.replicas.messages import Question

pytest.importorskip("ray", reason="needs the extra ray")


class Endless:
    """An application that streams until it is cancelled; its service is well."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(service=SimpleNamespace(engine=SimpleNamespace(failure=None)))
        self.running = 0

    async def __call__(self, scope, receive, send) -> None:
        self.running += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
            await asyncio.Event().wait()
        finally:
            self.running -= 1


def test_whoever_closes_a_replicas_answer_ends_its_request_before_the_close_returns(monkeypatch):
    from foretoken.serve.replicas.application import Replica

    class Local(Replica):
        def __del__(self) -> None:  # Ray Serve awaits it; nothing is to be closed here
            pass

    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    app = Endless()

    async def hang_up() -> tuple[bytes, int, int]:
        answer = Local(lambda name: app).answer([], Question("POST", "/v1/completions", b"", (), b"{}"))
        first = await anext(answer)
        running = app.running
        await answer.aclose()
        return first.body, running, app.running

    assert asyncio.run(hang_up()) == (b"data: 1", 1, 0)

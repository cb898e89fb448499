"""A replica as Ray Serve calls it, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from foretoken.serve.errors import ApiError
from foretoken.serve.replicas.messages import Question
from replica_harness import LONGEST

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


class Handle:
    """Of replicas whose metrics come after so many seconds each; without any, Ray says that there are none.

    Args:
        seconds: of each replica.
        found: seconds after which the replicas are known.
    """

    def __init__(self, *seconds: float, found: float = 0.0) -> None:
        self.seconds = seconds
        self.found = found
        self.waited_for = 0

    def options(self, **_) -> Handle:
        return self

    def broadcast(self, name):
        from ray.serve.handle import DeploymentBroadcastResponse

        assert name == "metrics"
        return DeploymentBroadcastResponse(self.sent(), None)

    async def sent(self) -> list[SimpleNamespace]:
        if not self.seconds:
            raise nobody()
        await asyncio.sleep(self.found)
        return [SimpleNamespace(get_async=lambda one=one: self.told(one)) for one in self.seconds]

    async def told(self, seconds: float) -> tuple[str, str]:
        self.waited_for += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.waited_for -= 1
        return f"after {seconds}", "# TYPE a gauge\na 1.0\n"

    async def remote(self, *_):
        raise nobody()
        yield


def nobody() -> Exception:
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    return DeploymentUnavailableError(DeploymentID("replica"))


@pytest.mark.parametrize(("seconds", "names"), [((0, 999), ["after 0"]), ((999,), []), ((), [])])
def test_a_replica_that_does_not_answer_is_left_out(seconds, names, monkeypatch):
    from foretoken.serve.replicas import application

    monkeypatch.setattr(application, "_METRICS_SECONDS", 0.05)
    replicas = application.RayReplicas(Handle(*seconds))
    assert [name for name, _ in asyncio.run(replicas.metrics())] == names


def test_replicas_have_one_time_to_be_found_and_to_answer(monkeypatch):
    from foretoken.serve.replicas import application

    monkeypatch.setattr(application, "_METRICS_SECONDS", 0.2)
    assert asyncio.run(application.RayReplicas(Handle(0.15, found=0.15)).metrics()) == []


@pytest.mark.parametrize(("seconds", "answers"), [((999, 0, 999), True), ((), False)])
def test_whether_any_replica_answers_is_known_with_the_first_answer(seconds, answers, monkeypatch):
    from foretoken.serve.replicas import application

    async def ask() -> tuple[bool, int]:
        handle = Handle(*seconds)
        found = await asyncio.wait_for(application.RayReplicas(handle).answers(), LONGEST)
        await asyncio.sleep(0)
        return found, handle.waited_for

    monkeypatch.setattr(application, "_METRICS_SECONDS", 999)
    assert asyncio.run(ask()) == (answers, 0)


def test_who_asks_where_no_replica_can_be_is_told_to_come_again():
    from foretoken.serve.replicas.application import RayReplicas

    async def ask() -> None:
        async for _ in RayReplicas(Handle()).ask([], Question("POST", "/v1/completions", b"", (), b"{}")):
            pass

    with pytest.raises(ApiError, match="no replica answers") as told:
        asyncio.run(ask())
    assert (told.value.status, told.value.code, told.value.headers) == (503, "no_replica", {"retry-after": "5"})

"""The router's account of requests that are with replicas."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from ray.serve.request_router import RequestRouter

from foretoken.serve.replicas.router import PrefixRouter


def test_a_request_that_ends_after_its_replica_leaves_nothing_behind(monkeypatch):
    for name in ("on_send_request", "on_request_completed"):
        monkeypatch.setattr(RequestRouter, name, lambda *_: None)
    router = object.__new__(PrefixRouter)
    router.initialize_state()
    router.on_send_request("a")
    router.on_send_request("a")
    router.on_request_completed("a", "1")
    assert router._sent == {"a": 1}
    del router._sent["a"]  # as update_replicas does
    router.on_request_completed("a", "2")
    assert "a" not in router._sent

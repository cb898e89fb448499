"""The page's endpoints, without a browser."""

from __future__ import annotations

import hashlib
import json
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.engine.engine import Engine
from foretoken.policy.acceptance import LEVELS
from foretoken.policy.costs import Costs, DrafterCosts
from foretoken.policy.lines import Line
from foretoken.serve.figures import WINDOW, Figures
from foretoken.serve.page_api import MOST_TRACED_TOKENS
from foretoken.serve.page_files import PAGE_PATHS
from foretoken.serve.progress import Progress
from serve_harness import serving, tiny_engine

ROOT = Path(__file__).parents[2]
TRACE, STATUS = "/v1/foretoken/trace", "/v1/foretoken/status"


def rounds(answer):
    events = [json.loads(event) for event in answer.events[:-1]]
    assert answer.events[-1] == "[DONE]"
    assert events[0]["type"] == "start"
    assert events[-1]["type"] == "end"
    assert [event["round"] for event in events[1:-1]] == list(range(1, len(events) - 1))
    return events[1:-1], events[-1]


def test_every_round_is_told_as_it_was_decided(server):
    body = {"prompt": "the the", "max_tokens": 24, "seed": 1, "temperature": 2}
    told, end = rounds(server.post(TRACE, body))
    tokens = [token for one in told for token in one["tokens"]]
    assert [token["id"] for token in tokens] == end["token_ids"]
    assert "".join(token["text"] for token in tokens) == end["text"]
    assert {"accepted", "residual"} <= {token["origin"] for token in tokens}
    plain = server.complete(**body, return_token_ids=True).json["choices"][0]
    assert plain["token_ids"] == end["token_ids"]
    for one in told:
        accepted = [token for token in one["draft"] if token["accepted"]]
        assert [token["id"] for token in accepted] == [
            token["id"] for token in one["tokens"] if token["origin"] == "accepted"
        ]
        assert one["trace"]["rule"] == "rejection"
        assert 0 <= one["trace"]["stop_uniform"] < 1
        assert len(one["trace"]["top"]) == len(one["draft"]) + 1
    speculation = end["usage"]["speculation"]
    assert speculation["rounds"] == len(told)
    assert speculation["draft_tokens"] == sum(len(one["draft"]) for one in told)


def test_a_chat_without_detail(server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1, "detail": False}
    told, _ = rounds(server.post(TRACE, body))
    assert all("trace" not in one and "draft" not in one for one in told)
    assert [one["time"] for one in told] == sorted(one["time"] for one in told)


def test_speculation_of_a_request(server):
    body = {"prompt": "x", "max_tokens": 4, "temperature": 0, "speculation": {"num_speculative_tokens": 0}}
    told, _ = rounds(server.post(TRACE, body))
    assert all(one["draft"] == [] and one["trace"]["stop_probs"] == [] for one in told)
    assert {token["origin"] for one in told for token in one["tokens"]} == {"target"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "max_tokens": MOST_TRACED_TOKENS + 1}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "speculation": {"verifier": "typical"}}, "speculation.verifier"),
        ({"prompt": "a" * 600}, "prompt"),
    ],
)
def test_bad_requests_are_told(server, body, param):
    answer = server.post(TRACE, body)
    assert answer.status == 400, answer.text
    assert answer.json["error"]["param"] == param


def test_the_most_tokens_with_detail_are_taken(server):
    body = {"prompt": "a", "max_tokens": MOST_TRACED_TOKENS, "stop": ["a", "e", "t", "\x00", "\x01"], "seed": 1}
    assert server.post(TRACE, body).status == 200


def test_the_status_counts_what_was_decoded():
    with serving(tiny_engine()) as server:
        before = server.get(STATUS).json
        assert before["total"]["rounds"] == 0
        assert before["total"]["mean_acceptance_length"] is None
        answer = server.complete(prompt="the ", max_tokens=20, seed=1, speculation={})
        usage = answer.json["usage"]["speculation"]
        after = server.get(STATUS).json
        for name, theirs in (("rounds", "rounds"), ("drafted", "draft_tokens"), ("accepted", "accepted_tokens")):
            assert after["total"][name] == after["recent"][name] == usage[theirs]
        assert after["total"]["accepted_by_position"] == usage["accepted_tokens_per_pos"]
        assert sum(after["total"]["draft_lengths"].values()) == usage["rounds"]
        assert after["total"]["tokens"] == 20
        assert after["running"] == after["waiting"] == 0
        assert (after["drafter"], after["verifier"], after["num_speculative_tokens"]) == ("draft-model", "token", 3)
        policy = after["policy"]
        assert policy["target"][0] == [1, 1.0]
        assert [one["name"] for one in policy["drafters"]] == ["draft-model", "prediction"]
        assert len(policy["drafters"][0]["acceptance"]["sampled"]) == LEVELS


def test_the_status_tells_whether_drafts_branch(server):
    takers = ["tree", "traversal", "kseq", "coupled"]
    status = server.get(STATUS).json
    assert (status["trees"], status["tree_verifiers"]) == (False, takers)
    engine = tiny_engine()
    for drafter, tree in ((engine.drafter.models[0], "static"), ("recycling", None)):
        with serving(Engine(engine.target, drafter, tree=tree)) as other:
            assert other.get(STATUS).json["trees"] is True


def test_the_page_can_be_switched_off_and_its_interface_is_behind_the_key():
    with serving(tiny_engine(), page=False) as server:
        for path in (*PAGE_PATHS, STATUS):
            assert server.get(path).status == 404
        assert server.post(TRACE, {"prompt": "a"}).status == 404
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        assert server.get(STATUS).status == server.post(TRACE, {"prompt": "a"}).status == 401
        assert server.get(STATUS, authorization="Bearer secret").status == 200
        for path in PAGE_PATHS:
            assert server.get(path).status == 200


def test_the_page_loads_nothing_from_elsewhere(server):
    for path in PAGE_PATHS:
        answer = server.get(path)
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.get(path, if_none_match=answer.headers["etag"])
        assert (again.status, again.text) == (304, "")
        assert server.send("HEAD", path).status == 200
    page = server.get("/").text
    assert "style=" not in page
    assert "<style" not in page
    assert "://" not in page


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_figures_forget_after_a_minute():
    from foretoken.engine.outputs import DecodeStats

    clock = Clock()
    figures = Figures(clock)
    stats = DecodeStats()
    first, second = Progress(), Progress()
    stats.record([1, 2, 3], 2, 3)
    figures.count(first.added(stats))
    figures.count(second.added(stats))
    clock.now += 1
    told = figures.as_json()
    assert told["tokens_by_second"] == [0] * (WINDOW - 1) + [6]
    assert told["recent"] == told["total"]
    stats.record([1], 1, 2)
    stats.record([1], 0, 1)
    figures.count(first.added(stats))
    assert figures.as_json()["total"]["draft_lengths"] == {"1": 2, "3": 2}
    assert figures.as_json()["total"]["accepted_by_position"] == [3, 2, 0]
    clock.now += WINDOW
    assert figures.as_json()["recent"]["tokens"] == 3
    clock.now += 1
    assert figures.as_json()["recent"] == Figures(clock).as_json()["recent"]
    assert figures.as_json()["total"]["tokens"] == 9


def test_costs_are_told_in_plain_rounds():
    from foretoken.policy.acceptance import LOOKUP, MODEL, TREES
    from foretoken.policy.policy import Policy
    from foretoken.policy.report import report

    costs = Costs(
        Line(0.008, 0.002), [DrafterCosts(Line(0.0, 0.001)), DrafterCosts(Line(0, 0)), DrafterCosts(Line(0, 1))]
    )
    policy = Policy([MODEL, LOOKUP, TREES], [False, True, False], costs, costs, names=["model", "lookup", "trees"])
    told = report(policy)
    assert told["plain_seconds"] is None
    assert dict(map(tuple, told["target"]))[6] == pytest.approx(2.0)
    model, lookup, trees = told["drafters"]
    assert dict(map(tuple, model["calls"]))[5] == pytest.approx(0.5)
    assert lookup["calls"] == []
    assert model["acceptance"]["greedy"][0] == pytest.approx(MODEL.rates[0])
    assert trees["acceptance"]["greedy"][1] == [8, pytest.approx(TREES.accepted(8), rel=1e-3)]
    costs.record(1, 0.02, [])
    assert report(policy)["plain_seconds"] == pytest.approx(0.02)


def test_the_built_page_belongs_to_its_sources():
    """As web/vite.config.ts hashes them; `make page` builds it anew."""
    web = ROOT / "web"
    files = [
        web / name for name in ("index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts")
    ]
    files += [file for folder in ("src", "public") for file in (web / folder).rglob("*") if file.is_file()]
    digest = hashlib.sha256()
    for name, file in sorted((file.relative_to(web).as_posix(), file) for file in files):
        digest.update(f"{name}\0".encode() + file.read_bytes() + b"\0")
    built = ROOT / "src" / "foretoken" / "serve" / "page"
    assert (built / "sources.sha256").read_text().strip() == digest.hexdigest()
    assert sum(file.stat().st_size for file in built.iterdir()) < 120_000


@pytest.mark.parametrize(("options", "opened"), [((), 1), (("--no-open",), 0)])
def test_the_demonstration_serves_the_page_on_loopback(monkeypatch, options, opened):
    served, asked = [], []
    monkeypatch.setattr("foretoken.cli.setup.load_engine", lambda options, screen: tiny_engine())
    monkeypatch.setattr(
        "foretoken.serve.lifecycle.serve",
        lambda app, listener, grace: served.append((app, listener.getsockname())) or True,
    )
    monkeypatch.setattr(webbrowser, "open", lambda address: asked.append(address) or False)
    result = CliRunner().invoke(app, ["demo", "--web", *options])
    assert result.exit_code == 0, result.output
    ((application, (host, port)),) = served
    assert host == "127.0.0.1"
    assert application.state.service.settings.page
    assert f"http://127.0.0.1:{port}/" in result.output
    assert asked == [f"http://127.0.0.1:{port}/"] * opened
    assert ("No browser could be opened" in result.output) == bool(opened)


def test_the_demonstration_in_the_browser_takes_no_picture():
    assert CliRunner().invoke(app, ["demo", "--web", "--svg", "a.svg"]).exit_code == 2

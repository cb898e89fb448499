"""Lists of what there is, the version, the demonstration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import foretoken
from foretoken import drafters, verify
from foretoken.cli import demo
from foretoken.cli.screen import check_writable


def test_verifiers(call):
    rows = json.loads(call("verifiers", "--json").stdout)
    assert [row["name"] for row in rows] == list(verify.names())
    assert {row["name"]: row["lossless"] for row in rows}["token-unadjusted"] is False
    assert all(row["summary"] and row["drafts"] in ("chains", "chains, trees") for row in rows)
    defaults = {row["default_for"]: row["name"] for row in rows if row["default_for"]}
    assert defaults == {"chains": verify.usual(False), "trees": verify.usual(True)}
    table = call("verifiers").stdout
    assert all(name in table for name in verify.names())
    assert table.replace("\n", " ").count("default for") == 2


def test_drafters(call):
    rows = json.loads(call("drafters", "--json").stdout)
    assert [row["name"] for row in rows] == list(drafters.names())
    assert [row["name"] for row in rows if row["needs_a_model"]] == ["draft-model", "cascade"]
    table = call("drafters").stdout
    assert all(name in table for name in drafters.names())


def test_version(call):
    assert call("--version").stdout == f"foretoken {foretoken.__version__}\n"


def test_public_names_exist():
    for name in foretoken.__all__:
        assert getattr(foretoken, name) is not None
    assert callable(foretoken.tiny_pair)
    assert set(foretoken.__all__) <= set(dir(foretoken))


def test_demo(call, models, monkeypatch, tmp_path):
    monkeypatch.setattr("foretoken.models.tiny_pair.tiny_pair_path", lambda: Path(models.target).parent)
    monkeypatch.setattr(demo, "SCENES", [demo.Scene("a scene", "hello", 0.0, 12, trace=True)])
    picture = tmp_path / "demo.svg"
    result = call("demo", "--svg", picture)
    assert result.exit_code == 0, result.stderr
    for part in ("a scene, greedy", "speed-up", "acceptance ", " rate ", "the same output, token by token"):
        assert part in result.stdout
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_a_missing_pair_is_one_readable_error(call, monkeypatch, tmp_path):
    monkeypatch.setattr("foretoken.models.tiny_pair.resources.files", lambda package: tmp_path)
    result = call("demo")
    assert result.exit_code == 2
    assert "shipped target is missing" in result.stderr


def test_a_picture_that_can_not_be_written_is_named_before_the_demonstration(call, tmp_path):
    for place in (tmp_path, tmp_path / "none" / "demo.svg"):
        result = call("demo", "--svg", place)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert str(place) in result.stderr.replace("\n", "")


@pytest.mark.parametrize("option", ["--port=8123", "--no-open"])
def test_options_of_the_page_are_refused_in_the_terminal(call, option):
    result = call("demo", option)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{option.partition('=')[0]} is of the server's page: give --web, too" in " ".join(result.stderr.split())


def test_a_link_to_a_file_that_is_to_come_stays_a_link(tmp_path):
    link, file = tmp_path / "link.jsonl", tmp_path / "out.jsonl"
    link.symlink_to(file)
    check_writable(link)
    assert link.is_symlink()
    assert not file.exists()

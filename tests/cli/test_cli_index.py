"""``foretoken index``, and what is generated with its index."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from foretoken.index import Index


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat that sat there and then went to the theatre. " * 3)
    (folder / "b.jsonl").write_text('{"text": "the other"}\n{"text": "and another"}\n')
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    return folder


def test_an_index_is_made_and_used(call, models, corpus, tmp_path):
    path = tmp_path / "made.index"
    result = call("index", corpus, "--tokenizer", models.target, "-o", path)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "tokens of 3 documents" in result.stderr
    assert f"--drafter retrieval:{path}" in result.stderr.replace("\n", "")
    assert "1 files that are no UTF-8 text were left out" in result.stderr
    given = ("generate", "the cat that", "--raw", "-t", 0, "-n", 20, "--json")
    plain = json.loads(call(*given, "--drafter", "none").stdout)
    found = json.loads(call(*given, "--drafter", f"retrieval:{path}", "-k", 4).stdout)
    assert found["text"] == plain["text"]
    rows = json.loads(call("drafters", "--json").stdout)
    assert {row["name"]: row["drafts"] for row in rows}["retrieval"] == "trees"


def test_json(call, models, corpus, tmp_path):
    path = tmp_path / "made.index"
    result = call("index", corpus / "a.txt", corpus, "--tokenizer", models.target, "-o", path, "--json")
    shown = json.loads(result.stdout)
    header = Index(path).header
    assert shown["bytes"] == path.stat().st_size
    assert (shown["documents"], shown["skipped"], shown["files"]) == (4, 1, 3)
    assert shown["fingerprint"] == header.fingerprint
    assert result.stderr == ""


def test_the_shipped_tokenizer_is_the_default(call, corpus, tmp_path):
    result = call("index", corpus, "-o", tmp_path / "i", "--json")
    assert json.loads(result.stdout)["tokenizer"].endswith("tiny_pair/target")


def test_fields_are_named(call, models, tmp_path):
    records = tmp_path / "a.jsonl"
    records.write_text('{"question": "the", "answer": "then"}\n')
    result = call("index", records, "--tokenizer", models.target, "-o", tmp_path / "i")
    assert result.exit_code == 2
    assert "has no field 'text': name one with --field (it has question, answer)" in result.stderr.replace("\n", "")
    assert not (tmp_path / "i").exists()
    fields = ("--field", "question", "--field", "answer")
    result = call("index", records, "--tokenizer", models.target, "-o", tmp_path / "i", *fields, "--json")
    assert json.loads(result.stdout)["documents"] == 2


def test_an_index_for_another_tokenizer_is_one_line(call, models, corpus, tmp_path):
    path = tmp_path / "made.index"
    call("index", corpus, "--tokenizer", models.foreign, "-o", path)
    result = call("generate", "the", "--drafter", f"retrieval:{path}")
    assert result.exit_code == 2
    assert "error: index " in result.stderr
    assert "another vocabulary" in result.stderr.replace("\n", " ")


def test_mistakes_are_one_line(call, models, corpus, tmp_path):
    nowhere = tmp_path / "nowhere"
    for files, options, message in (
        ([nowhere], ["--tokenizer", models.target, "-o", tmp_path / "i"], "No such file"),
        ([corpus / "c.bin"], ["--tokenizer", models.target, "-o", tmp_path / "i"], "is no UTF-8 text"),
        ([corpus], ["--tokenizer", str(nowhere), "-o", tmp_path / "i"], "no tokenizer can be loaded from"),
        ([corpus], ["--tokenizer", models.target, "-o", nowhere / "i"], "can't be written"),
        ([corpus], ["--tokenizer", models.target, "-o", corpus / "a.txt"], "is there and no index"),
    ):
        result = call("index", *files, *options)
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")
        assert "Traceback" not in result.stderr
    no_index = f"retrieval:{corpus / 'a.txt'}"
    result = call("generate", "the", "--drafter", no_index, "--quantize-drafter", "w8a8")
    assert result.exit_code == 2
    assert "has no model to round" in result.stderr.replace("\n", " ")
    result = call("generate", "the", "--drafter", f"retrieval:{nowhere}")
    assert result.exit_code == 2
    assert "can't be read (No such file" in result.stderr.replace("\n", " ")


def test_a_full_disk_leaves_nothing_behind(call, models, corpus, tmp_path):
    """While this process may write no file of more than 4 KiB: what it gets is what a full disk gives."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        result = call("index", corpus, "--tokenizer", models.target, "-o", tmp_path / "i")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2, result.stderr
    assert "can't be written (File too large)" in " ".join(result.stderr.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus"]

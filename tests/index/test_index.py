"""Indices: what is read, in which order it stands, what is found, and what goes wrong."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizer import byte_tokenizer
from foretoken.errors import OutOfMemory, ParameterError
from foretoken.index import Index, build, fingerprint
from foretoken.index.corpus import PIECE
from foretoken.index.file import HEADER
from foretoken.index.sort import sorted_suffixes
from number_tokenizer import NumberTokenizer

Documents = list[list[int]]


def make(folder: Path, documents: Documents, size: int = 50, **options) -> Index:
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": " ".join(map(str, tokens))}) + "\n" for tokens in documents))
    build([corpus], NumberTokenizer(size), folder / "made.index", **options)
    return Index(folder / "made.index")


def everything(index: Index) -> Documents:
    """The documents, as the file has them."""
    header = index.header
    data = index.path.read_bytes()[HEADER : HEADER + header.tokens * header.width]
    documents: Documents = [[]]
    for token in np.frombuffer(data, f">u{header.width}").tolist():
        if token == index.separator:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == []  # a separator ends each
    return documents


def occurrences(documents: Documents, pattern: list[int]) -> list[list[int]]:
    """What follows each occurrence."""
    size = len(pattern)
    return [
        tokens[place + size :]
        for tokens in documents
        for place in range(len(tokens) - size + 1)
        if tokens[place : place + size] == pattern
    ]


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
@pytest.mark.parametrize("vocab_size", [1, 3, 700, 60_000])
def test_suffixes_stand_in_order(kind, vocab_size):
    generator = np.random.default_rng(vocab_size)
    tokens = generator.integers(0, vocab_size, 3000).astype(kind)
    separator = np.iinfo(kind).max
    tokens[generator.integers(0, 3000, 30)] = separator
    told = []
    found = sorted_suffixes(tokens, 16, told.append)
    padded = np.concatenate([tokens, np.full(16, separator, dtype=kind)])
    texts = [tuple(padded[place : place + 16].tolist()) for place in found]
    assert texts == sorted(texts)
    assert sorted(found.tolist()) == np.flatnonzero(tokens != separator).tolist()
    assert sum(told) == len(found)


def test_large_parts_are_sorted_one_by_one(monkeypatch):
    monkeypatch.setattr("foretoken.index.sort._PART", 100)
    tokens = np.random.default_rng(0).integers(0, 40, 5000).astype(np.uint16)
    told = []
    found = sorted_suffixes(tokens, 8, told.append)
    assert len(told) > 20
    texts = [tuple(tokens[place : place + 8].tolist()) for place in found if place < 4990]
    assert texts == sorted(texts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    documents=st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=5).filter(any),
    text=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    longest=st.integers(1, 6),
    shortest=st.integers(1, 2),
)
def test_the_longest_suffix_that_occurs_is_found(tmp_path_factory, documents, text, longest, shortest):
    index = make(tmp_path_factory.mktemp("index"), documents, depth=6)
    found, where = index.find(text, longest, shortest)
    sizes = [size for size in range(shortest, min(longest, len(text)) + 1) if occurrences(documents, text[-size:])]
    assert found == max(sizes, default=0)
    expected = occurrences(documents, text[-found:]) if found else []
    assert sorted(index.after(suffix, found, 9) for suffix in where) == sorted(ending[:9] for ending in expected)


@pytest.mark.parametrize("size", [50, 70_000])
def test_tokens_of_two_and_of_four_bytes(tmp_path, size):
    high = size - 1
    index = make(tmp_path, [[1, high, 2, high, 3], [high, 2, 9]], size)
    assert index.header.width == (2 if size == 50 else 4)
    assert everything(index) == [[1, high, 2, high, 3], [high, 2, 9]]
    length, where = index.find([7, high, 2], 16, 1)
    assert length == 2
    assert sorted(index.after(suffix, length, 2) for suffix in where) == [[9], [high, 3]]
    assert index.find([1, 1 << 40, high, 2], 16, 3) == (0, range(0))  # a number that no token of the file can have
    assert index.header.size == index.path.stat().st_size


def test_files_and_folders_are_read(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "inner" / ".git").mkdir(parents=True)
    (folder / "inner" / ".git" / "hidden").write_text("9 9 9")
    (folder / "a.txt").write_bytes(b"\xef\xbb\xbf1 2\r\n3")  # with a byte order mark
    (folder / "inner" / "b.md").write_text("4 5")
    (folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    records = [{"answer": "6 7", "question": "8"}, {"answer": ["10", "11 12"]}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    report = build([folder, tmp_path / "c.jsonl"], NumberTokenizer(50), tmp_path / "i", fields=["question", "answer"])
    assert everything(Index(tmp_path / "i")) == [[1, 2, 3], [4, 5], [8], [6, 7], [10], [11, 12]]
    assert (report.files, report.skipped, report.header.documents) == (3, 1, 6)


def test_a_file_that_turns_out_to_be_no_text_keeps_to_itself(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a").write_bytes(b"1 2\n" * PIECE + b"\xff\xff")
    (folder / "b").write_text("3 4")
    report = build([folder], NumberTokenizer(50), tmp_path / "i")
    first, second = everything(Index(tmp_path / "i"))
    assert (report.skipped, second) == (1, [3, 4])
    assert first == [1, 2] * (len(first) // 2)


def test_a_long_text_is_one_document(tmp_path):
    random.seed(1)
    text = "".join(random.choice(["the cat ", "é\n", "that\r\n"]) for _ in range(40_000))
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding()
    told = []
    build([tmp_path / "long.txt"], tokenizer, tmp_path / "i", progress=lambda *all_: told.append(all_))
    (document,) = everything(Index(tmp_path / "i"))
    assert tokenizer.decode(document) == text
    size = len(text.encode())
    assert told[-1] == ("sorting", len(document), len(document))
    assert [entry for entry in told if entry[0] == "reading"][-1] == ("reading", size, size)


def test_fingerprints_tell_vocabularies_apart():
    other = byte_tokenizer()
    other.add_tokens(["new"])
    assert fingerprint(byte_tokenizer()) == fingerprint(byte_tokenizer(chat=False)) != fingerprint(other)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe1", "a.txt' is no UTF-8 text"),
        ("a.txt", b"", "there is no text in"),
        ("a.jsonl", b'{"text": "1"}\n{"text": ', "line 2 of .*a.jsonl' is no JSON"),
        ("a.jsonl", b'{"body": "1", "id": 2}', "line 1 of .* has no field 'text'.*it has body, id"),
        ("a.jsonl", b'{"text": {"x": 1}}', "field 'text' that is no string"),
        ("a.jsonl", b"[1]", "is no JSON object but a list"),
    ],
)
def test_files_that_can_not_be_used_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ParameterError, match=message):
        build([tmp_path / name], NumberTokenizer(50), tmp_path / "i")
    assert os.listdir(tmp_path) == [name]


def test_missing_files_and_empty_folders_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ParameterError, match=r"nowhere.*No such file"):
        build([tmp_path / "nowhere"], NumberTokenizer(50), tmp_path / "i")
    with pytest.raises(ParameterError, match="there are no files in"):
        build([tmp_path / "empty"], NumberTokenizer(50), tmp_path / "i")
    with pytest.raises(ParameterError, match="depth"):
        build([tmp_path / "empty"], NumberTokenizer(50), tmp_path / "i", depth=0)


def test_nothing_but_an_index_is_replaced(tmp_path):
    (tmp_path / "a.txt").write_text("1 2 3")
    for place in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(ParameterError, match=r"Is a directory|is there and no index"):
            build([tmp_path / "a.txt"], NumberTokenizer(50), place)
    with pytest.raises(ParameterError, match="can't be written"):
        build([tmp_path / "a.txt"], NumberTokenizer(50), tmp_path / "none" / "i")
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("part", ["reading", "sorting"])
def test_an_interruption_leaves_the_older_index(tmp_path, part):
    before = everything(make(tmp_path, [[1, 2, 3]]))
    files = sorted(os.listdir(tmp_path))

    def interrupt(now: str, done: int, total: int) -> None:
        if now == part:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, [[4, 5, 6]], progress=interrupt)
    assert everything(Index(tmp_path / "made.index")) == before
    assert sorted(os.listdir(tmp_path)) == files
    make(tmp_path, [[4, 5, 6]])
    assert everything(Index(tmp_path / "made.index")) == [[4, 5, 6]]


def test_too_little_memory_is_one_readable_error(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("foretoken.index.builder.sorted_suffixes", fail)
    with pytest.raises(OutOfMemory, match=r"while 4 tokens were indexed, which takes about 160 bytes: index fewer"):
        make(tmp_path, [[1, 2, 3]])
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_indices_that_can_not_be_read_are_named(tmp_path):
    index = make(tmp_path, [list(range(40)), list(range(20, 0, -1))])
    whole = index.path.read_bytes()
    header = json.loads(whole[:HEADER])
    path = tmp_path / "other"

    def head(**changes) -> bytes:
        return json.dumps({**header, **changes}).encode().ljust(HEADER - 1) + b"\n" + whole[HEADER:]

    for content, message in (
        (b"", "is no index"),
        (b"{}", "is no index"),
        (b"1 2 3", "is no index"),
        (whole[:-1], f"has {len(whole) - 1:,} bytes and should have {len(whole):,}"),
        (whole + b"1", "cut short or changed"),
        (head(version=2), "has format 2, this version reads 1"),
        (head(tokens="3"), "its header is broken"),
        (head(width=3), "its header is broken"),
        (whole[: -4 * index.header.suffixes] + bytes(4 * index.header.suffixes), "not in order"),
        (whole[:-8] + whole[-4:] + whole[-8:-4], "not in order"),
        (whole[:-4] + b"\xff\xff\xff\xff", "not in order"),
        (whole[: HEADER + 20] + b"\x00\x31" + whole[HEADER + 22 :], "not in order"),
    ):
        path.write_bytes(content)
        with pytest.raises(ParameterError, match=message):
            Index(path)
    with pytest.raises(ParameterError, match="No such file"):
        Index(tmp_path / "none")
    with pytest.raises(ParameterError, match="Is a directory"):
        Index(tmp_path)

"""How tokens look."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from foretoken.cli import render
from foretoken.engine.outputs import DecodeStats, DraftedToken, Piece, StreamEvent


def event(*pieces, drafted=()):
    return StreamEvent(tuple(Piece(7, text, origin) for text, origin in pieces), DecodeStats(), tuple(drafted))


def write(*events, width=20):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=width)
    writer = render.TokenWriter(console)
    for one in events:
        writer.write(one)
    writer.end()
    return console.file.getvalue()


def plain(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_origins_have_their_colours():
    text = write(event(("a", "accepted"), ("b", "residual"), ("c", "bonus"), ("d", "target")))
    assert text == "\x1b[32ma\x1b[0m\x1b[33mb\x1b[0m\x1b[94mc\x1b[0md\n"


def test_lines_break_between_words_that_span_tokens():
    pieces = [("The", "target"), (" quick", "target"), (" brown", "accepted"), (" un", "accepted"), ("kind", "bonus")]
    lines = plain(write(event(*pieces), event((" fox\n", "target"), ("  end", "target")))).splitlines()
    assert lines == ["The quick brown", "unkind fox", "  end"]


def test_words_longer_than_a_line_are_cut():
    lines = plain(write(event(("x" * 50, "target"), ("漢" * 15, "target")))).splitlines()
    assert max(map(render.cell_len, lines)) <= 20
    assert "".join(lines) == "x" * 50 + "漢" * 15


def test_text_cannot_command_the_terminal():
    assert "\x1b]0;" not in write(event(("\x1b]0;title\x07", "accepted")))
    assert "␛" in write(event(("\x1b", "accepted")))


def test_white_space_is_visible_in_a_trace():
    assert render.visible(" a\n\t\x00", 5) == "␣a⏎⇥␀"
    assert render.visible("\ufffd", 5) == render.visible("", 5) == "⟨5⟩"


DRAFT = (
    DraftedToken(1, " yes", 1, True, 1.0, 0.5, parent=0, rank=1),
    DraftedToken(2, " no", 2, False, 0.001, 0.996, parent=1, rank=9),
)


@pytest.mark.parametrize(
    ("probs", "coloured", "expected"),
    [
        (False, False, "   3  1/2  ␣yes [-␣no-] → ⟨7⟩"),
        (False, True, "   3  1/2  ␣yes ␣no → ⟨7⟩"),
        (True, True, "   3  1/2  ␣yes 1|.50 ␣no <.01|.99 → ⟨7⟩"),
    ],
)
def test_trace_line(probs, coloured, expected):
    one = event((" yes", "accepted"), ("", "residual"), drafted=DRAFT)
    line = render.trace_line(3, one, lambda token: "", probs, coloured)
    assert line.plain == expected


def test_trees_are_traced_level_by_level():
    drafted = [
        DraftedToken(1, "a", 1, True, 1, 1, parent=0, rank=1),
        DraftedToken(2, "b", 1, False, 0, 1, parent=0, rank=2),
        DraftedToken(3, "c", 2, True, 1, 1, parent=1, rank=1),
    ]
    line = render.trace_line(1, event(("d", "bonus"), drafted=drafted), lambda token: "d", False, True)
    assert line.plain == "   1  2/3  a b │ c + d"

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from foretoken.pages import page, svg


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0.0, [0.0]),
        (1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (3.5, [0.0, 1.0, 2.0, 3.0]),
        (170.0, [0.0, 50.0, 100.0, 150.0]),
        (0.02, [0.0, 0.005, 0.01, 0.015, 0.02]),
    ],
)
def test_ticks_are_round(top: float, expected: list[float]) -> None:
    assert svg.ticks(top) == pytest.approx(expected)


def test_scales() -> None:
    across = svg.scale(10, 110, 50)
    assert [across(0), across(25), across(50)] == [10, 60, 110]
    assert svg.scale(10, 110, 0)(0) == 10
    assert [svg.steps(0, 90, [1, 4, 16, 64])(value) for value in (1, 4, 64)] == [0, 30, 90]
    assert svg.steps(0, 90, [8])(8) == 45


def test_what_is_drawn_is_well_formed_and_escaped() -> None:
    body = [
        *svg.axis(svg.scale(0, 100, 3), 3, 40, lambda value: f"<{value:g}>"),
        svg.rect(0, 1, 2, 3, style="ours", note="a < b & c"),
        svg.rect(0, 1, 2, 3, fill=svg.COLOURS[0]),
        svg.circle(1, 1, 3, fill="red", note='"quoted"'),
        svg.path([(0, 0), (1, 2.25)], "red", dashed=True),
        svg.line("mark", 0, 0, 1, 1),
        svg.text(1, 2, "<script>", "end", opacity=0.5),
    ]
    picture = ElementTree.fromstring(svg.picture(100, 40, body, "<label>"))
    assert picture.get("aria-label") == "<label>"
    assert [part.text for part in picture.iter("text")] == ["<0>", "<1>", "<2>", "<3>", "<script>"]
    assert [part.text for part in picture.iter("title")] == ["a < b & c", '"quoted"']
    assert "&lt;name&gt;" in svg.legend([("red", "<name>")])


def test_a_page_loads_nothing() -> None:
    told = page.whole(
        "<title>", page.facts([("a<b", "c&d")]) + page.figure("t", "n", svg.picture(1, 1, [], "")), ".x {}"
    )
    assert "<title>&lt;title&gt;</title>" in told
    assert "<dt>a&lt;b</dt><dd>c&amp;d</dd>" in told
    assert ".x {}" in told
    assert not any(mark in told for mark in ("http:", "https:", "src=", "@import", "<link"))

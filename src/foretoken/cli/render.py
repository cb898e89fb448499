"""How tokens look: colours by origin, the trace of a round, the summary of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretoken.cli.screen import has_colour
from foretoken.engine.outputs import DecodeStats, DraftedToken, Origin, Piece, StreamEvent, TokenLogprob

if TYPE_CHECKING:
    from foretoken.engine.settings import DrafterNames

STYLES: dict[Origin, str] = {"accepted": "green", "residual": "yellow", "bonus": "bright_blue", "target": ""}
MEANINGS: dict[Origin, str] = {
    "accepted": "accepted",
    "residual": "replaces a rejected one",
    "bonus": "bonus after a fully accepted draft",
    "target": "nothing drafted",
}
REJECTED = "red strike"
_LAST_MARK: dict[Origin, str] = {"residual": "→", "bonus": "+", "target": "·", "accepted": ""}
_MARGIN = 8  # columns: a word that would begin this close to the edge begins the next line

_VISIBLE = {number: chr(0x2400 + number) for number in range(0x20)} | {0x7F: "␡"}
_VISIBLE |= {number: "\ufffd" for number in range(0x80, 0xA0)}
_HARMLESS = {number: picture for number, picture in _VISIBLE.items() if chr(number) not in "\n\t"}
_VISIBLE |= {ord(" "): "␣", ord("\n"): "⏎", ord("\t"): "⇥"}


def harmless(text: str) -> str:
    """Control characters as pictures, so that generated text can't command the terminal."""
    return text.translate(_HARMLESS)


def visible(text: str, token_id: int) -> str:
    """A token for a trace: white space as signs, and its number where its bytes are no characters."""
    if not text or "\ufffd" in text:
        return f"⟨{token_id}⟩"
    return text.translate(_VISIBLE)


def legend() -> Text:
    """What the colours mean."""
    parts = [Text.assemble(("■ ", style), (MEANINGS[origin], "dim")) for origin, style in STYLES.items()]
    return Text("   ").join(parts)


class TokenWriter:
    """Writes tokens as they are decided: coloured and wrapped at words for people, plain for programs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._coloured = has_colour(console) or console.record
        self._column = 0
        self._ended_line = True

    def prompt(self, text: str) -> None:
        """The prompt that the output continues; shown to people only."""
        if self._coloured:
            self._styled(harmless(text), "dim")

    def write(self, event: StreamEvent) -> None:
        """One round's tokens."""
        if self._coloured:
            for piece, tail in zip(event.pieces, _tails(event.pieces), strict=True):
                self._styled(harmless(piece.text), STYLES[piece.origin], tail)
        elif event.text:
            self._console.file.write(event.text)
        if event.text:
            self._ended_line = event.text.endswith("\n")
        self._console.file.flush()

    def end(self) -> None:
        """Finish the line."""
        if self._coloured:
            if self._column:
                self._console.print()
        elif not self._ended_line:
            self._console.file.write("\n")
            self._console.file.flush()
        self._column, self._ended_line = 0, True

    def _styled(self, text: str, style: str, tail: int = 0) -> None:
        """Print at the cursor; `tail` is how wide the text's last word goes on after it, as far as that is known."""
        width = self._console.width
        wrapped = Text(style=style, end="")
        chunks = _CHUNKS.findall(text.replace("\t", "    "))
        for number, chunk in enumerate(chunks, start=1):
            last = number == len(chunks)
            needed = max(cell_len(chunk) + tail, _MARGIN) if last else cell_len(chunk)
            if chunk.startswith(" ") and chunk.strip() and self._column and self._column + needed > width:
                wrapped.append("\n")
                self._column, chunk = 0, chunk.lstrip(" ")
            for character in chunk:
                size = cell_len(character)
                if character != "\n" and self._column + size > width:
                    wrapped.append("\n")
                    self._column = 0
                wrapped.append(character)
                self._column = 0 if character == "\n" else self._column + size
        self._console.print(wrapped, end="", soft_wrap=True)


_CHUNKS = re.compile(r"\n|[^\S\n]*[^\s]+|[^\S\n]+")  # words with the space before them, line breaks


def _tails(pieces: Sequence[Piece]) -> list[int]:
    """How wide each piece's last word goes on in the pieces after it."""
    tails = [0] * len(pieces)
    following = 0
    for index in range(len(pieces) - 1, -1, -1):
        text = pieces[index].text
        tails[index] = following
        head = re.split(r"\s", text, maxsplit=1)[0]
        following = cell_len(head) + (following if head == text else 0)
    return tails


def trace_line(number: int, event: StreamEvent, token_text: Callable[[int], str], probs: bool, coloured: bool) -> Text:
    """One round: its number, accepted / drafted, the drafted tokens, and what came after those that were accepted."""
    kept = sum(token.accepted for token in event.drafted)
    line = Text(f"{number:>4}  {kept}/{len(event.drafted)} ", style="dim")
    branches = [token.depth for token in event.drafted] != list(range(1, len(event.drafted) + 1))
    depth = 1
    for token in event.drafted:
        if branches and token.depth != depth:
            line.append(" │", style="dim")
        depth = token.depth
        line.append(" ")
        line.append_text(_drafted(token, probs, coloured))
    for piece in event.pieces:
        if piece.origin != "accepted":
            line.append(f" {_LAST_MARK[piece.origin]} ", style="dim")
            shown = visible(token_text(piece.token_id), piece.token_id)
            line.append(shown, style=f"not dim {STYLES[piece.origin]}")
    return line


def _drafted(token: DraftedToken, probs: bool, coloured: bool) -> Text:
    shown = visible(token.text, token.token_id)
    if token.accepted:
        text = Text(shown, style=f"not dim {STYLES['accepted']}")
    else:
        text = Text(shown if coloured else f"[-{shown}-]", style=f"not dim {REJECTED}")
    if probs:
        text = Text.assemble(text, (f" {_share(token.p)}|{_share(token.q)}", "dim"))
    return text


def _share(probability: float) -> str:
    """Two decimals; values close to 0 and 1, but not equal, are not rounded to them."""
    if probability in (0.0, 1.0):
        return f"{probability:.0f}"
    if probability < 0.005:
        return "<.01"
    return f"{min(probability, 0.99):.2f}".removeprefix("0")


def trace_header(probs: bool, coloured: bool) -> Text:
    """What a trace's lines mean, each part in its own colour."""
    return Text.assemble(
        "round  accepted/drafted  ",
        ("accepted", f"not dim {STYLES['accepted']}"),
        " ",
        ("rejected" if coloured else "[-rejected-]", f"not dim {REJECTED}"),
        " p|q (target's and drafter's probability)" if probs else "",
        " → ",
        ("replacement", f"not dim {STYLES['residual']}"),
        " or + ",
        ("bonus", f"not dim {STYLES['bonus']}"),
        " or · nothing drafted",
        style="dim",
    )


def logprobs(entries: Sequence[TokenLogprob], token_text: Callable[[int], str]) -> Table:
    """The log-probability of each token of an output, and the most probable tokens at its position.

    They are the model's own: before temperature, truncation and penalties.
    """

    def shown(token_id: int) -> str:
        return visible(token_text(token_id), token_id)

    table = Table("position", "token", "log p", "p", "most probable", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in (table.columns[0], table.columns[2], table.columns[3]):
        column.justify = "right"
    for position, entry in enumerate(entries, start=1):
        top = "  ".join(f"{shown(token)} {math.exp(value):.2f}" for token, value in entry.top.items())
        logprob = f"{entry.logprob:.3f}"
        table.add_row(f"{position:,}", shown(entry.token_id), logprob, f"{math.exp(entry.logprob):.3f}", top)
    return table


_POSITIONS = 4
"""Positions of a draft that a summary shows: later ones are few drafts' alone."""


def drafter_label(drafter: DrafterNames) -> str:
    """A drafter for people: of several in one cascade the names of all."""
    return " + ".join(dict.fromkeys(one.name for one in drafter.drafters)) or drafter.name


def numbers(stats: DecodeStats) -> str:
    """What decoding took, on one line."""
    parts = [_counted(stats.emitted, "token"), f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        shares = stats.acceptance_by_position
        more = " …" if len(shares) > _POSITIONS else ""
        parts += [
            f"mean acceptance length {stats.mean_acceptance_length:.2f}",
            f"acceptance rate {stats.acceptance_rate:.0%} (by position "
            f"{', '.join(f'{share:.0%}' for share in shares[:_POSITIONS])}{more})",
        ]
    if stats.drafted_prediction:
        parts.append(
            f"{stats.accepted_prediction:,} of {_counted(stats.drafted_prediction, 'predicted token')} accepted"
        )
    return " · ".join([*parts, _counted(stats.rounds, "target pass", "es")])


def _counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def summary(stats: DecodeStats, finish_reason: str) -> str:
    """One line about a request."""
    return f"{numbers(stats)} · ended by {finish_reason}"

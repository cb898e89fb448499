"""The code blocks of a page, and what the page says of how they are tested.

An HTML comment on the line before a block says how the test departs from it:

    <!-- not run: why -->
    <!-- the test replaces: as it stands -> as it is run; another -> … -->
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# All fenced blocks at once: a search for one language alone would take closing fences for opening ones.
_FENCE = re.compile(
    r"(?:^ *<!--(?P<note>[^\n]*)-->\n)?^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: what stands behind the fence; ``""`` for none.
        code: what the test runs.
        reason: why it is not run; empty where it is.
        place: page and line.
    """

    language: str
    code: str
    reason: str
    place: str

    @property
    def commands(self) -> list[str]:
        """The command lines of a shell block, without prompts and comments."""
        lines = [re.sub(r"\s+#.*", "", line) for line in self.code.splitlines()]
        return [line.removeprefix("$ ").strip() for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        note, code = (match["note"] or "").strip(), textwrap.dedent(match["code"])
        place = f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, match.start('language')) + 1}"
        reason = note.removeprefix("not run:").strip() if note.startswith("not run:") else ""
        if note.startswith("the test replaces:"):
            for change in note.removeprefix("the test replaces:").split(";"):
                old, new = (part.strip() for part in change.split("->"))
                assert old in code, f"{place}: {old!r} to be replaced is not in the block"
                code = code.replace(old, new)
        else:
            assert not note or reason, f"{place}: {note!r} is no note that the tests know"
        found.append(Block(match["language"], code, reason, place))
    return found


def pages() -> list[Path]:
    """README.md and all pages of the site that have blocks of their own."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

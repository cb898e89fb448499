"""What the pages refer to exists: pages and their sections, files, commands and their options, names of the package."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer
from blocks import ROOT, blocks, pages
from typer.core import TyperGroup

from foretoken.cli.app import app

PAGES = [*pages(), ROOT / "CONTRIBUTING.md"]
# Results and changelog name what there was at a commit.
PRESENT = [page for page in PAGES if page.name not in ("results.md", "changelog.md")]
INCLUDED = re.compile(r'^--8<-- "([^"]+)"$', flags=re.MULTILINE)
COMMANDS = typer.main.get_command(app)


def prose(page: Path) -> str:
    """A page, and what it includes, without its code blocks."""
    text = INCLUDED.sub(lambda found: (ROOT / found[1]).read_text(encoding="utf-8"), page.read_text(encoding="utf-8"))
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Code in the lines of a page."""
    return [re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """Of each heading, as the site and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.strip().lower())) for title in titles}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        # What a page includes was written for the folder of its own file.
        folders = [page.parent, *(ROOT / Path(file).parent for file in INCLUDED.findall(page.read_text("utf-8")))]
        found = [folder / path for folder in folders if (folder / path).exists()] if path else [page]
        assert found, f"{link}: there is no such file"
        assert not anchor or anchor in anchors(found[0]), f"{link}: the page has no such section"


def arguments(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that is opened in one line of a block and closed in another
        return text.split()


def check_command(text: str) -> None:
    """The command is one of the program's, and has the options."""
    words, command = arguments(text)[1:], COMMANDS
    while isinstance(command, TyperGroup) and words and not re.match(r"-|[A-Z…]", words[0]):
        assert words[0] in command.commands, f"{text}: no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
    wrong = [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
    assert not wrong, f"{text}: no option {', '.join(wrong)}"


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_commands_and_their_options_exist(page):
    """Those of blocks that are not run, too."""
    for text in [*spans(page), *(line for block in blocks(page) for line in block.commands)]:
        if text.startswith("foretoken "):
            check_command(text)


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_files_of_the_repository_exist(page):
    for text in spans(page):
        for file in re.findall(r"(?<![\w/.])(?:benchmarks|docs|examples|recipes|src/foretoken|tests)/[\w/.-]*\w", text):
            assert (ROOT / file).exists(), f"{file} of {text!r}"


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_names_of_the_package_exist(page):
    for text in spans(page):
        for name in re.findall(r"(?<![\w/.])foretoken(?:\.\w+)+(?!\w*[/:])", text):
            module, _, rest = name, "", []
            while True:
                try:
                    found = importlib.import_module(module)
                    break
                except ModuleNotFoundError:
                    module, _, last = module.rpartition(".")
                    rest = [last, *rest]
            for part in rest:
                assert hasattr(found, part), f"{name} of {text!r}"
                found = getattr(found, part)


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_targets_of_make_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    wanted = {found for text in spans(page) for found in re.findall(r"^make ([\w-]+)$", text)}
    assert wanted <= targets

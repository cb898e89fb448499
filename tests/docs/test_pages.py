"""Every code block of the README and of the site runs as it stands there, or the page says why not."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from pathlib import Path

import pytest
from blocks import ROOT, Block, blocks, pages
from typer.testing import CliRunner

from foretoken import models, tiny_pair_path
from foretoken.cli.app import app
from foretoken.peers.workers import __file__ as workers

PAGES = {str(page.relative_to(ROOT)): blocks(page) for page in pages()}
SHELL = ("", "sh", "bash", "console")
DATA = ("json", "jsonl")


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory) -> Path:
    """The shipped drafter as a GGUF file."""
    sys.path.insert(0, str(Path(workers).parent))
    import gguf_writer

    file = tmp_path_factory.mktemp("pages") / "model.gguf"
    gguf_writer.convert(tiny_pair_path() / "drafter", file, "bfloat16")
    return file


@pytest.fixture(scope="session")
def load_once():
    """`foretoken.load` for the shipped pair, whose models are compiled for the first command and not for every one."""
    load, loaded = models.load, {}

    def once(model, **options):
        key = f"{model} {sorted(options.items())}"
        if key not in loaded:
            loaded[key] = load(model, **options)
        return loaded[key]

    return once


@pytest.fixture
def workspace(tmp_path, monkeypatch, gguf_file, load_once) -> Path:
    """A folder with all that the pages name: models, heads, prompts."""
    pair = tiny_pair_path()
    names = {
        "path/or/hub-id": "target",
        "path/of/target": "target",
        "path/of/drafter": "drafter",
        "path/of/a/smaller/model": "drafter",
        "path/of/a/head": "eagle3",
    }
    for name, part in names.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(pair / part)
    (tmp_path / "path/of/model.gguf").symlink_to(gguf_file)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "add.py").write_text("def add(a, b):\n    return a + b\n" * 8)
    (tmp_path / "notes.txt").write_text("A note about spiders: they have eight legs each.\n" * 20)
    (tmp_path / "my_prompts.txt").write_text("def add(a, b):\nHow many legs have three spiders?\n")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    (tmp_path / "answers.jsonl").write_text(json.dumps({"answer": "Three spiders have 24 legs."}) + "\n")
    request = {
        "custom_id": "legs",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": "Spiders", "max_tokens": 2},
    }
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    monkeypatch.setattr(models, "load", load_once)
    # A short calibration will do: every command loads its models anew.
    monkeypatch.setattr("foretoken.engine.calibration.SECONDS", 0.0)
    monkeypatch.setattr("foretoken.engine.calibration._REPEATS", 1)
    monkeypatch.setattr("foretoken.cli.compare.MAX_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


LONG = {"docs/tune.md", "docs/bench.md", "docs/retrieval.md"}
RUN = [page for page, found in PAGES.items() if any(not block.reason for block in found)]


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.full) if p in LONG else p for p in RUN])
def test_blocks(page, workspace):
    """In the page's order, in one folder and one namespace."""
    names: dict[str, object] = {"__name__": "page"}
    for block in PAGES[page]:
        if block.reason:
            continue
        if block.language == "python":
            exec(compile(block.code, block.place, "exec", dont_inherit=True), names)
        elif block.language in DATA:
            assert all(json.loads(line) for line in block.code.splitlines()), block.place
        else:
            run_commands(block)


def run_commands(block: Block) -> None:
    for command in block.commands:
        program, *arguments = shlex.split(command)
        assert program == "foretoken", f"{block.place}: {command!r}: mark the block as not run, with the reason"
        outcome = CliRunner().invoke(app, arguments, input="hello\n/quit\n")
        # An audit that was given a few seconds only may be undecided: status 3.
        allowed = (0, 3) if arguments[0] == "audit" else (0,)
        assert outcome.exit_code in allowed, f"{block.place}: {command}\n{outcome.output}\n{outcome.exception!r}"
        assert outcome.output.strip(), f"{block.place}: {command} printed nothing"


SKIPPED = [b for found in PAGES.values() for b in found if b.reason and b.language == "python"]


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.place)
def test_blocks_that_are_not_run_name_what_exists(block):
    """Their imports run."""
    imports = [node for node in ast.parse(block.code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), block.place, "exec"), {})


def test_pages_left_to_the_long_run_exist():
    assert set(RUN) >= LONG


def test_blocks_that_are_not_run_are_few_and_say_why():
    skipped = [block for found in PAGES.values() for block in found if block.reason]
    assert all(len(block.reason) > 8 for block in skipped)
    assert len(skipped) <= 24, [block.place for block in skipped]
    languages = {block.language for found in PAGES.values() for block in found}
    assert languages <= {"python", *SHELL, *DATA}, "a block of another language is not tested"


def test_the_readme_has_its_examples():
    readme = PAGES["README.md"]
    assert len([b for b in readme if b.language == "python"]) >= 2
    assert sum(len(b.commands) for b in readme if b.language in SHELL and not b.reason) >= 3

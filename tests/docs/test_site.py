"""The site builds without a warning, and its pages load nothing from other servers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

pytest.importorskip("zensical", reason="the site is built with the extra `docs`")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("mkdocs.yml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_every_page_is_there(site):
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.parent.relative_to(site) for page in site.rglob("index.html")}
    assert {Path(".") if page.name == "index" else page for page in pages} == built


def test_no_page_needs_another_server(site):
    loads = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(https?://[^"' >]+)""")
    for page in site.rglob("*.html"):
        wanted = [
            url
            for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8"))
            if 'rel="canonical"' not in tag
            for url in loads.findall(tag)
        ]
        assert not wanted, f"{page.relative_to(site)} loads {wanted}"


def test_the_public_names_are_in_the_reference(site):
    import foretoken

    reference = "".join(page.read_text(encoding="utf-8") for page in (site / "api").rglob("*.html"))
    missing = [
        name
        for name in foretoken.__all__
        if name not in ("__version__", "drafters", "verify") and f'id="foretoken.{name}"' not in reference
    ]
    assert not missing


def test_all_that_a_drafter_of_ones_own_may_define_is_in_the_reference(site):
    from foretoken.drafters import Drafter

    page = (site / "api" / "drafters" / "index.html").read_text(encoding="utf-8")
    own = [
        f"{base.__module__}.{base.__name__}.{name}"
        for base in Drafter.__mro__
        for name, member in vars(base).items()
        if not name.startswith("_") and isinstance(member, FunctionType)
    ]
    assert len(own) > 10
    assert not [name for name in own if f'id="{name}"' not in page]

"""The server that most tests share, and the browser of those of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from page_harness import CHROMIUM, LONGEST
from serve_harness import Running, serving, tiny_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One server for the tests of a module, which leave it as it is; its threads end with them."""
    with serving(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        playwright.expect.set_options(timeout=LONGEST)
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture
def visit(browser) -> Iterator:
    """Opens pages; fails if one reports an error, or asks anything of another server."""
    contexts, problems = [], []

    def open_page(server: Running, fragment: str = "", expected: int = 200, **options):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(LONGEST)
        page.on("pageerror", lambda error: problems.append(str(error)))
        if expected == 200:
            page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.on("request", lambda asked: asked.url.startswith(server.url) or problems.append(asked.url))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        page.goto(f"{server.url}/{fragment}")
        page.wait_for_selector("[name=key]" if expected == 401 else "h1 small")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems

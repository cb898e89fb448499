"""The page in a browser while runs come, are stopped, fail, and follow one another."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from foretoken.engine.engine import Engine
from page_harness import CHROMIUM, LONGEST, RUN, Scripted, output, run
from serve_harness import Running, serving, tiny_engine

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


class Held(Scripted):
    """Makes one pass after another only as it is let, once it is told to hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.holds, self.passes = False, threading.Semaphore(0)

    def forward(self, tokens, parents, counts, cache, keep="all", hidden_layers=()):
        if self.holds and keep != "none":  # which reads a prompt
            self.passes.acquire(timeout=LONGEST / 1000)
        return super().forward(tokens, parents, counts, cache, keep, hidden_layers)

    def free(self) -> None:
        self.holds = False
        self.passes.release(1000)


@pytest.fixture
def held() -> Iterator[tuple[Running, Held]]:
    """A server whose answers come token by token, of those links that ask for plain decoding."""
    model = Held("abcdefgh\n" * 30)
    with serving(Engine(model, Scripted(""), "token", 3)) as running:
        model.holds = True
        try:
            yield running, model
        finally:
            model.free()


HELD = "max_tokens=200&length=0&temperature=0"


def shows(page, tokens: int) -> None:
    playwright.expect(page.locator("main [data-place*=token]")).to_have_count(tokens)


def roles(request) -> list[str]:
    return [message["role"] for message in request.post_data_json["messages"]]


TRACE = "**/v1/foretoken/trace"


def test_a_race_is_on_show_only_beside_the_settings_that_it_was_measured_with(server, visit):
    page = visit(server, f"{RUN}&view=race", reduced_motion="reduce")
    page.click("[data-run]")
    page.wait_for_selector(".verdict")
    page.fill("#settings [name=temperature]", "0")
    playwright.expect(page.locator(".verdict")).to_have_count(0)
    assert page.locator(".lane .output").count() == 0
    page.fill("#settings [name=temperature]", "2")
    playwright.expect(page.locator(".verdict")).to_contain_text("at temperature 2 with this verifier")


def test_a_race_outlives_a_change_of_the_number_of_its_lanes(visit):
    engine = tiny_engine()
    with serving(Engine(engine.target, ["lookup", engine.drafter.models[0]])) as server:
        page = visit(server, f"{RUN}&view=race&drafter=lookup", reduced_motion="reduce")
        page.click("[data-run]")
        page.wait_for_selector(".verdict")
        assert page.locator(".lane").count() == 2
        page.select_option("#settings [name=drafter]", "")
        playwright.expect(page.locator(".lane")).to_have_count(3)
        playwright.expect(page.locator(".verdict")).to_have_count(0)


def test_a_race_has_the_engine_to_itself_and_escape_stops_it(held, visit):
    server, model = held
    page = visit(server, f"#mode=completion&prompt=ab&{HELD}")
    page.click("[data-run]")
    model.passes.release(3)
    shows(page, 3)
    page.click("#tab-race")
    page.click("[data-run]")
    playwright.expect(page.locator(".lane [name=length]")).to_be_disabled()
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".lane [name=length]")).to_be_enabled()
    assert page.locator("[data-run]").inner_text() == "Start"
    page.click("#tab-write")
    assert page.locator("main [aria-busy=true]").count() == 0


CHAT = "#mode=chat&max_tokens=8&length=0&temperature=0"


def test_a_race_asks_what_the_run_that_it_stopped_left(held, visit):
    server, model = held
    page = visit(server, CHAT, reduced_motion="reduce")
    page.fill("textarea", "one")
    page.click("[data-run]")
    page.wait_for_selector("article.assistant[aria-busy=true]")
    page.fill("textarea", "two")
    page.click("#tab-race")
    with page.expect_request(TRACE) as asked:
        page.click("[data-run]")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "one\ntwo"}]
    model.free()
    page.wait_for_selector(".verdict")
    page.click("#tab-write")
    assert page.input_value("textarea") == "one\ntwo"


def test_a_race_keeps_the_answer_before_the_question(held, visit):
    server, model = held
    page = visit(server, CHAT, reduced_motion="reduce")
    page.fill("textarea", "one")
    page.click("[data-run]")
    model.passes.release(3)
    shows(page, 3)
    page.fill("textarea", "two")
    page.click("#tab-race")
    with page.expect_request(TRACE) as asked:
        page.click("[data-run]")
    assert roles(asked.value) == ["user", "assistant", "user"]
    model.free()
    page.wait_for_selector(".verdict")


def test_a_number_can_be_typed_while_tokens_come_and_counts_at_once(held, visit):
    server, model = held
    page = visit(server, f"#mode=completion&prompt=ab&{HELD}")
    page.click("[data-run]")
    field = page.locator("[name=maxTokens]")
    field.select_text()
    page.keyboard.type("1")
    model.passes.release(3)
    shows(page, 3)
    page.keyboard.type("2")
    assert field.input_value() == "12"
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-run]")
    with page.expect_request(TRACE) as asked:
        page.keyboard.press("Control+Enter")
    assert asked.value.post_data_json["max_tokens"] == 12
    field.fill("99999")
    field.blur()
    assert field.input_value() == str(server.get("/v1/foretoken/status").json["max_tokens"])
    field.fill("")
    field.blur()
    assert field.input_value() != ""


def test_a_chat_goes_on_after_a_stop_and_after_an_error(held, visit):
    server, model = held
    page = visit(server, f"#mode=chat&{HELD}", expected=0)
    page.fill("textarea", "one")
    page.click("[data-run]")
    model.passes.release(4)
    shows(page, 4)
    text = output(page)
    page.click("text=Stop")
    page.wait_for_selector("[data-run]")
    assert output(page) == text
    page.route(TRACE, lambda route: route.abort())
    page.fill("textarea", "two")
    with page.expect_request(TRACE) as asked:
        page.click("[data-run]")
    assert roles(asked.value) == ["user", "assistant", "user"]
    assert asked.value.post_data_json["messages"][1]["content"] == text
    page.wait_for_selector("main .error")
    assert page.locator("article.user").all_inner_texts() == ["one"]
    assert page.input_value("textarea") == "two"
    page.unroute(TRACE)
    with page.expect_request(TRACE) as asked:
        page.click("[data-run]")
    assert roles(asked.value) == ["user", "assistant", "user"]
    model.free()
    page.wait_for_selector(".numbers")
    assert page.locator("article").evaluate_all("all => all.map(one => one.ariaLabel)") == ["user", "assistant"] * 2


def test_the_end_of_an_answer_leaves_the_focus_on_its_token(held, visit):
    server, model = held
    page = visit(server, f"#mode=chat&{HELD}")
    page.fill("textarea", "one")
    page.click("[data-run]")
    model.passes.release(3)
    shows(page, 3)
    token = page.locator("[data-place] >> nth=1")
    token.focus()
    model.free()
    page.wait_for_selector(".numbers")
    playwright.expect(page.locator("article.assistant[aria-busy=false]")).to_have_count(1)
    playwright.expect(token).to_be_focused()
    assert page.locator(".popover").count() == 1


def test_another_run_forgets_what_was_opened_in_the_one_before(server, visit):
    page = visit(server, f"{RUN}&length=6")
    run(page)
    page.click(".fold >> nth=0")
    page.hover("main .rejected[data-place] >> nth=-1")
    assert page.locator(".popover").count() == 1
    page.select_option("#settings [name=length]", "1")
    with page.expect_response(TRACE):
        page.keyboard.press("Control+Enter")
    page.wait_for_selector(".numbers")
    assert page.locator("[data-place]").count() > 0  # and nothing was thrown
    assert page.locator(".fold[aria-expanded=true]").count() == 0


def test_a_link_that_is_pasted_shows_its_own_chat(server, visit):
    page = visit(server, "#mode=chat&max_tokens=8&temperature=0")
    page.fill("textarea", "hi")
    run(page)
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "the link's answer"}]
    page.evaluate("messages => { location.hash = `mode=chat&messages=${JSON.stringify(messages)}`; }", messages)
    playwright.expect(page.locator("article.user")).to_have_text("question")
    assert page.locator("article.assistant").inner_text() == "the link's answer"
    assert page.locator(".numbers").count() == 0


def test_a_chat_is_followed_only_by_a_reader_who_is_at_its_end(held, visit):
    server, model = held
    page = visit(server, f"#mode=chat&{HELD}", viewport={"width": 1000, "height": 420})
    page.fill("textarea", "one")
    page.click("[data-run]")
    model.passes.release(120)
    shows(page, 120)
    box = page.locator(".chat > div").last.bounding_box()
    assert 0 < box["y"] <= 421
    page.evaluate("scrollTo(0, 0)")
    model.passes.release(30)
    shows(page, 150)
    assert page.evaluate("scrollY") == 0


def test_keys_on_a_token_leave_those_of_the_page_alone(held, visit):
    server, model = held
    page = visit(server, f"#mode=completion&prompt=ab&{HELD}")
    page.click("[data-run]")
    model.passes.release(3)
    shows(page, 3)
    page.locator("[data-place] >> nth=1").focus()
    taken = "key => !document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {...key, cancelable: true}))"
    assert page.evaluate(taken, {"key": "ArrowLeft"})
    assert not page.evaluate(taken, {"key": "ArrowLeft", "altKey": True})
    page.keyboard.press("Escape")
    playwright.expect(page.locator(".popover")).to_have_count(0)
    assert page.locator("[aria-busy=true]").count() == 1
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-run]")
    with page.expect_request(TRACE):
        page.keyboard.press("Control+Enter")
    assert page.locator("#tab-write").get_attribute("aria-current") == "page"


def test_rejected_tokens_are_shown_where_the_request_ends_inside_a_draft(visit):
    drafter = Scripted("a")
    drafter.text += [258, 120, 120]  # the end token is accepted, and what follows it rejected
    with serving(Engine(Scripted("a"), drafter, "token", 3)) as server:
        page = visit(server, "#mode=completion&prompt=ab&temperature=0")
        run(page)
        rejected = int(page.locator(".fold").inner_text())
        page.click(".fold")
        assert page.locator("main .rejected[data-place]").count() == rejected > 0


def test_the_page_works_where_the_data_of_sites_is_blocked(visit):
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        page = visit(server, expected=401)
        for name in ("localStorage", "sessionStorage"):
            thrown = "get() { throw new DOMException('blocked', 'SecurityError'); }"
            page.add_init_script(f"Object.defineProperty(window, '{name}', {{ {thrown} }});")
        page.reload()
        page.fill("[name=key]", "secret")
        page.click(".trouble button")
        page.wait_for_selector("h1 small")
        theme = page.locator("html").get_attribute("data-theme")
        page.click("[aria-label^=Theme]")
        assert page.locator("html").get_attribute("data-theme") != theme


@pytest.mark.parametrize(
    ("body", "told"),
    [('{"error": "no upstream"}', "no upstream"), ('{"error": {}}', "the server answered with status 502")],
)
def test_an_error_in_the_form_of_another_server_is_told(server, visit, body, told):
    page = visit(server, RUN, expected=502)
    page.route(TRACE, lambda route: route.fulfill(status=502, body=body))
    page.click("[data-run]")
    playwright.expect(page.locator("main .error")).to_have_text(told)


def test_escape_closes_the_list_of_keys_and_gives_the_focus_back(server, visit):
    page = visit(server)
    page.locator("[aria-label='Keyboard shortcuts']").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    playwright.expect(page.locator("dialog")).to_have_count(0)
    assert page.evaluate("document.activeElement.ariaLabel") == "Keyboard shortcuts"

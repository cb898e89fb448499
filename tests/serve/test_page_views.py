"""The page in a browser: what its views keep while others are looked at, where its keys go, and what is in view."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from foretoken.engine.engine import Engine
from page_harness import CHROMIUM, RUN, Scripted, output, run
from serve_harness import Running, serving, tiny_engine

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

TRACE = "**/v1/foretoken/trace"
TALL = "#mode=completion&prompt=ab&max_tokens=200&temperature=0"
CHAT = "#mode=chat&max_tokens=8&temperature=0"
AT_END = "box => box.scrollHeight > box.clientHeight && box.scrollTop + box.clientHeight >= box.scrollHeight - 1"


@pytest.fixture(scope="module")
def tall() -> Iterator[Running]:
    """A server whose outputs are of many lines."""
    model = Scripted("abcdefgh\n" * 30)
    with serving(Engine(model, model, "token", 3)) as running:
        yield running


def test_step_mode_has_in_view_what_the_round_adds(tall, visit):
    page = visit(tall, TALL)
    run(page)
    page.click("#tab-step")
    context = page.locator(".context")
    page.keyboard.press("End")
    playwright.expect(page.locator(".position")).to_have_text("round 50 of 50")
    assert context.evaluate(AT_END)
    page.keyboard.press("ArrowLeft")
    playwright.expect(page.locator("[aria-current=step]")).to_have_text("Verify")
    assert context.evaluate(AT_END)


def test_a_race_follows_the_lanes_while_it_shows_them(tall, visit):
    page = visit(tall, f"{TALL}&view=race")
    page.clock.install()
    page.click("[data-run]")
    playwright.expect(page.locator("text=Show again")).to_be_enabled()
    page.clock.run_for(6000)
    page.wait_for_selector(".verdict")
    for lane in page.locator(".lane .output").all():
        assert lane.evaluate(AT_END)


def test_space_plays_wherever_a_press_did_not_come_from_another_button(server, visit):
    page = visit(server, RUN)
    run(page)
    page.click("#tab-step")
    play, pause = page.locator("[aria-label=Play]"), page.locator("[aria-label=Pause]")
    for place in ("#tab-step", "[aria-current=step]", "[type=range]"):
        page.locator(place).focus()
        page.keyboard.press("Space")
        playwright.expect(pause).to_have_count(1)
        page.keyboard.press("Space")
        playwright.expect(play).to_have_count(1)
    page.locator("[aria-label='Last round']").focus()
    page.keyboard.press("Space")
    last = page.locator("[type=range]").get_attribute("max")
    playwright.expect(page.locator("[type=range]")).to_have_value(last)
    playwright.expect(play).to_have_count(1)


def test_a_box_that_is_checked_leaves_keys_to_the_page(server, visit):
    page = visit(server, RUN)
    page.check("text=show rejected tokens")
    page.keyboard.press("2")
    playwright.expect(page.locator("#tab-step")).to_have_attribute("aria-current", "page")


def test_a_race_is_still_on_show_after_a_look_at_another_view(server, visit):
    page = visit(server, f"{RUN}&view=race", reduced_motion="reduce")
    page.select_option(".lane [name=length]", "2")
    page.click("[data-run]")
    page.wait_for_selector(".verdict")
    verdict = page.locator(".verdict").inner_text()
    page.click("#tab-dashboard")
    page.wait_for_selector(".tiles")
    page.click("#tab-race")
    assert page.locator(".verdict").inner_text() == verdict
    assert page.locator(".lane [name=length]").input_value() == "2"
    page.evaluate("link => { location.hash = link; }", f"{RUN}&view=race&length=1")  # a link brings its own
    playwright.expect(page.locator(".lane [name=length]")).to_have_value("1")


def test_prompt_and_chat_are_kept_while_the_other_is_chosen(server, visit):
    page = visit(server, RUN)
    page.click(".modes >> text=chat")
    page.fill("textarea", "one")
    run(page)
    answer = output(page)
    page.fill("textarea", "two")
    page.click(".modes >> text=completion")
    playwright.expect(page.locator("textarea")).to_have_value("the the")
    run(page)
    page.click("text=Clear")
    page.click(".modes >> text=chat")
    playwright.expect(page.locator("textarea")).to_have_value("two")
    assert page.locator("article").evaluate_all("all => all.map(one => one.ariaLabel)") == ["user", "assistant"]
    assert output(page) == answer


def test_a_link_to_a_chat_has_the_question_that_is_typed(server, visit):
    page = visit(server, CHAT)
    page.fill("textarea", "one & two")
    page.click("text=Copy a link")
    again = visit(server, page.evaluate("location.hash"))
    assert again.input_value("textarea") == "one & two"
    run(again)
    assert again.locator("article.user").all_inner_texts() == ["one & two"]
    assert "prompt" not in again.evaluate("location.hash")  # it is among the messages now


def test_nothing_can_be_run_where_nothing_is_asked(server, visit):
    for fragment in ("#mode=completion&prompt=", "#mode=chat"):
        page = visit(server, fragment)
        assert page.locator("[data-run]").is_disabled()
        page.click("#tab-step")
        assert page.locator("[data-run]").is_disabled()
        assert "type a prompt in Write" in page.locator(".empty").inner_text()
        page.click("#tab-write")
        page.fill("textarea", "ab")
        assert page.locator("[data-run]").is_enabled()


def test_a_key_that_no_server_takes_does_not_lock_the_page(visit):
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        page = visit(server, expected=401)
        told = page.locator(".trouble [role=alert]")
        assert told.inner_text() == "the server asks for an API key"
        for key in ("secret…", "other"):
            page.fill("[name=key]", key)
            page.click(".trouble button")
            assert page.locator("[name=key]").evaluate("field => field.checkValidity()") == key.isascii()
        playwright.expect(told).to_have_text("the server does not take this API key: give another one")
        page.fill("[name=key]", " secret ")
        page.click(".trouble button")
        page.wait_for_selector("h1 small")


def test_a_late_refusal_of_the_key_before_is_not_told(visit):
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        page = visit(server, RUN, expected=401)
        status, held = "**/v1/foretoken/status", []
        page.route(status, lambda route: route.continue_() if held else held.append(route))
        with page.expect_request(status):
            page.click("[data-run]")
        page.fill("[name=key]", "secret")
        page.click(".trouble button")
        page.wait_for_selector("h1 small")
        with page.expect_response(status):
            held[0].continue_()
        page.evaluate("new Promise(done => setTimeout(done, 100))")
        assert page.locator(".trouble").count() == 0


@pytest.mark.parametrize("view", ["write", "race", "dashboard"])
def test_a_server_that_comes_to_want_another_key_is_given_one(visit, view):
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        page = visit(server, RUN, expected=401)
        page.fill("[name=key]", "secret")
        page.click(".trouble button")
        page.wait_for_selector("h1 small")
        page.evaluate("sessionStorage.setItem('foretoken-api-key', 'of the server that was here before')")
        page.click(f"#tab-{view}")
        if view != "dashboard":
            page.click("[data-run]")
        page.fill("[name=key]", "secret")
        page.click(".trouble button")
        playwright.expect(page.locator(".trouble")).to_have_count(0)


def test_the_axes_of_a_dashboard_have_numbers_before_anything_is_decoded(visit):
    with serving(tiny_engine()) as server:
        page = visit(server, "#view=dashboard")
        page.wait_for_selector(".tiles")
        for title, marks in (("Tokens by second", ["0", "1"]), ("Draft length chosen", ["0 %", "100 %"])):
            axis = page.locator(".plot", has_text=title).locator(".grid text")
            assert axis.all_text_contents() == marks


def test_a_name_that_is_cut_off_is_told_in_full(server, visit):
    page = visit(server, viewport={"width": 360, "height": 700})
    model, drafter = (server.get("/v1/foretoken/status").json[name] for name in ("model", "drafter"))
    assert page.locator("h1 small").get_attribute("title").startswith(f"{model}, drafter {drafter}, verifier ")


def test_the_theme_that_is_told_is_the_one_on_show(server, visit):
    page = visit(server, color_scheme="light")
    page.emulate_media(color_scheme="dark")
    playwright.expect(page.locator("[aria-label^=Theme]")).to_have_attribute("aria-label", "Theme: dark. Change it")


def test_a_token_without_a_width_can_be_pointed_at_and_is_named(server, visit):
    page = visit(server, RUN)
    told = server.post("/v1/foretoken/trace", {"prompt": "the the", "max_tokens": 1, "seed": 1}).text
    joiner = re.sub(r'("text": ?)"[^"]*"(, ?"token": ?)"[^"]*"', r'\1"\\u200d"\2"\\u200d"', told)
    page.route(TRACE, lambda route: route.fulfill(body=joiner, content_type="text/event-stream"))
    assert run(page) == "\u200d·"
    token = page.locator("[data-place]")
    assert token.bounding_box()["width"] > 1
    assert token.get_attribute("aria-label").startswith("U+200D, ")
    token.hover()
    assert page.locator(".popover b").inner_text() == "U+200D"


# Counts how often the page reads the text of a token that the server told.
COUNTING = """
const parse = JSON.parse;
window.reads = 0;
JSON.parse = (text) => {
  const told = parse(text);
  for (const token of told?.tokens ?? []) {
    const own = token.text;
    Object.defineProperty(token, "text", { get: () => (window.reads++, own) });
  }
  return told;
};
"""


def test_to_point_at_a_token_draws_no_others_again(tall, visit):
    page = visit(tall, TALL)
    page.evaluate(COUNTING)
    run(page)
    page.evaluate("window.reads = 0")
    page.locator("[data-place] >> nth=100").focus()
    page.wait_for_selector(".popover")
    assert page.evaluate("window.reads") < 20  # of 200


def test_one_rejected_token_is_named_as_one(server, visit):
    page = visit(server, f"{RUN}&length=1")
    run(page)
    assert page.locator(".fold").first.get_attribute("aria-label").startswith("1 rejected draft token of round ")


@pytest.fixture(scope="module")
def corrected() -> Iterator[Running]:
    """A server of which each draft has a token that is rejected."""
    with serving(Engine(Scripted("abcdefgh\nabcdefgh"), Scripted("abxdefxh\nabxdefgh"), "token", 3)) as running:
        yield running


def test_what_is_copied_is_the_output_alone(corrected, visit):
    page = visit(corrected, TALL)
    run(page)
    page.locator("[data-place] >> nth=1").focus()
    page.wait_for_selector(".popover")
    selected = "getSelection().selectAllChildren(document.querySelector('article .output')), String(getSelection())"
    for _ in range(2):
        assert page.evaluate(selected) == "ababcdefgh\nabcdefgh"
        page.check("text=show rejected tokens")
        assert page.locator("main .rejected[data-place]").count() > 0


def test_tab_leaves_an_output_at_once_and_arrow_keys_come_to_the_rejected_tokens(corrected, visit):
    page = visit(corrected, TALL)
    run(page)
    page.locator("[data-place]").first.focus()
    fold = page.locator(".fold").first
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    playwright.expect(fold).to_be_focused()
    page.keyboard.press("Enter")
    playwright.expect(fold).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("ArrowRight")
    playwright.expect(page.locator("main .rejected[data-place]").first).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.output')") is None


def test_step_mode_tells_that_the_run_broke_off(server, visit):
    page = visit(server, RUN)
    told = server.post("/v1/foretoken/trace", {"prompt": "the the", "max_tokens": 9, "seed": 1}).text
    part = "\n\n".join(told.split("\n\n")[:2]) + "\n\n"
    page.route(TRACE, lambda route: route.fulfill(body=part, content_type="text/event-stream"))
    page.click("#tab-step")
    page.click("[data-run]")
    playwright.expect(page.locator(".step .error")).to_have_text("the server broke off")


def test_a_server_that_cannot_be_reached_is_told_of_once(server, visit):
    page = visit(server, RUN, expected=0)
    page.route("**/v1/foretoken/*", lambda route: route.abort())
    with page.expect_request("**/v1/foretoken/status"):
        page.click("[data-run]")
    playwright.expect(page.locator("main .error")).to_have_text("the server can't be reached")
    page.unroute("**/v1/foretoken/*")
    run(page)
    assert page.locator(".trouble, main .error").count() == 0


def test_a_plain_round_is_explained_as_one(server, visit):
    page = visit(server, f"{RUN}&length=0")
    run(page)
    page.click("#tab-step")
    for told in ("Nothing is drafted", "scores the last token", "nothing to verify", "One token of the target's own"):
        playwright.expect(page.locator(".explain")).to_contain_text(told)
        assert "0 tokens" not in page.locator(".explain").inner_text()
        page.keyboard.press("ArrowRight")


def test_keys_do_nothing_behind_the_list_of_keys(server, visit):
    page = visit(server, RUN)
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    theme = page.locator("html").get_attribute("data-theme")
    for key in ("2", "t", "Control+Enter"):
        page.keyboard.press(key)
    page.keyboard.press("Escape")
    playwright.expect(page.locator("dialog")).to_have_count(0)
    assert page.locator("#tab-write").get_attribute("aria-current") == "page"
    assert page.locator("html").get_attribute("data-theme") == theme
    assert page.locator("article, [aria-busy=true]").count() == 0
    run(page)
    page.click("#tab-step")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    for key in ("ArrowRight", "End"):
        page.keyboard.press(key)
    page.keyboard.press("Escape")
    playwright.expect(page.locator("dialog")).to_have_count(0)
    assert page.locator("[type=range]").input_value() == "0"


def test_the_settings_stay_as_they_are_where_there_is_no_place_for_them(server, visit):
    page = visit(server, "#view=dashboard")
    page.wait_for_selector(".tiles")
    page.keyboard.press("s")
    page.keyboard.press("1")
    page.wait_for_selector(".write")
    assert page.locator("#settings").count() == 1


def test_an_answer_that_is_asked_for_again_in_vain_is_kept(server, visit):
    page = visit(server, CHAT, expected=0)
    page.fill("textarea", "one")
    run(page)
    answer = output(page)
    page.route(TRACE, lambda route: route.abort())
    page.click("[data-run]")
    page.wait_for_selector("main .error")
    playwright.expect(page.locator("article")).to_have_count(2)
    assert output(page) == answer
    assert page.input_value("textarea") == ""


def test_a_run_can_be_begun_from_step_mode(server, visit):
    page = visit(server, RUN)
    run(page)
    page.click("#tab-step")
    page.fill("#settings [name=seed]", "5")
    for begin in (lambda: page.click("text=Run again"), lambda: page.keyboard.press("Control+Enter")):
        page.keyboard.press("End")
        with page.expect_request(TRACE) as asked:
            begin()
        assert asked.value.post_data_json["seed"] == 5
        page.wait_for_selector("text=Run again")
        playwright.expect(page.locator("[type=range]")).to_have_value("0")  # the first stage of the first round
        playwright.expect(page.locator(".position")).to_contain_text("round 1 of ")


def test_who_runs_the_prompt_in_step_mode_by_a_key_can_run_it_again(server, visit):
    page = visit(server, f"{RUN}&view=step")
    button = page.locator("main [data-run]")
    button.focus()
    for _ in range(2):
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Run again")
        playwright.expect(button).to_be_focused()


def test_the_link_of_a_race_is_of_what_is_raced(server, visit):
    page = visit(server, RUN, reduced_motion="reduce")
    run(page)
    page.fill("textarea", "another")
    page.click("#tab-race")
    page.wait_for_function("location.hash.includes('prompt=another&')")
    page.fill("#settings [name=seed]", "7")
    page.click("[data-run]")
    page.wait_for_selector(".verdict")
    assert "seed=7&" in page.evaluate("location.hash")

"""The page in a browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from foretoken.engine.engine import Engine
from page_harness import CHROMIUM, RUN, Scripted, output, run
from serve_harness import Running, serving, tiny_engine

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@pytest.fixture(scope="module")
def tree_server() -> Iterator[Running]:
    engine = tiny_engine()
    with serving(Engine(engine.target, engine.drafter.models[0], "traversal", 6, tree="static")) as running:
        yield running


def test_a_completion_its_details_and_its_rejected_tokens(server, visit):
    page = visit(server)
    page.fill("textarea", "the the")
    page.fill("[name=seed]", "1")
    page.fill("[name=temperature]", "2")
    page.fill("[name=maxTokens]", "30")
    run(page)
    body = {"prompt": "the the", "max_tokens": 30, "seed": 1, "temperature": 2}
    rounds = [json.loads(event) for event in server.post("/v1/foretoken/trace", body).events[1:-2]]
    origins = [token["origin"] for one in rounds for token in one["tokens"]]
    for kind in ("accepted", "residual", "bonus"):
        assert page.locator(f"main [data-place].{kind}").count() == origins.count(kind)
    page.hover("[data-place].accepted >> nth=0")
    popover = page.locator(".popover")
    first = next(one for round_ in rounds for one in round_["draft"] if one["accepted"])
    said = popover.inner_text()
    p, q = re.search(r"p\n(\S+)\nq\n(\S+)", said).groups()
    assert (float(p), float(q)) == (pytest.approx(first["p"], rel=0.05), pytest.approx(first["q"], rel=0.05))
    assert "min(1, p/q)" in said
    assert "uniform" in said
    page.locator("[data-place].residual >> nth=0").focus()
    assert "norm((p − q)₊)" in popover.inner_text()
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.place") == "0-token-0"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.place") != "0-token-0"
    assert page.locator("main .rejected[data-place]").count() == 0
    page.click(".fold >> nth=0")
    first_rejecting = next(one for one in rounds if not all(token["accepted"] for token in one["draft"]))
    rejected = sum(not token["accepted"] for token in first_rejecting["draft"])
    assert page.locator("main .rejected[data-place]").count() == rejected


def test_a_link_reproduces_a_run(server, visit):
    text = run(visit(server, RUN))
    page = visit(server, RUN)
    assert run(page) == text
    link = page.evaluate("location.hash")
    assert run(visit(server, link)) == text
    assert run(visit(server, link.replace("seed=1", "seed=5"))) != text


def test_a_chat_of_two_turns_keeps_its_tokens(server, visit):
    page = visit(server, "#mode=chat&max_tokens=8&temperature=0")
    for turn, question in enumerate(("hi <b>you</b>", "and"), start=1):
        page.fill("textarea", question)
        run(page)
        playwright.expect(page.locator("article.assistant")).to_have_count(turn)
    assert page.locator("article.user").all_inner_texts() == ["hi <b>you</b>", "and"]
    assert page.locator("article.assistant").first.locator("[data-place]").count() > 0
    assert page.locator("article b").count() == 0


def test_step_mode_goes_through_the_stages(server, visit):
    page = visit(server, RUN)
    run(page)
    page.keyboard.press("Escape")
    page.click("#tab-step")
    stage = page.locator("[aria-current=step]")
    for name in ("Draft", "Score", "Verify", "Commit"):
        assert stage.inner_text() == name
        assert (
            f"round 1 of {page.locator('.position').inner_text().split()[-1]}" == page.locator(".position").inner_text()
        )
        page.keyboard.press("ArrowRight")
    assert stage.inner_text() == "Draft"
    assert page.locator(".position").inner_text().startswith("round 2 ")
    page.keyboard.press("ArrowLeft")
    assert stage.inner_text() == "Commit"
    page.click("[aria-label=Play]")
    playwright.expect(page.locator(".position")).to_contain_text("round 2 ")
    page.click("[aria-label=Pause]")


def test_a_tree_is_drawn_as_a_tree(tree_server, visit):
    page = visit(tree_server, RUN)
    run(page)
    page.click(".fold >> nth=0")
    assert page.locator(".inline-tree svg .node").count() == 7
    page.click("#tab-step")
    page.locator(".tree .node >> nth=3").focus()
    page.keyboard.press("ArrowRight")
    assert "min(1, p/q)" in page.locator(".detail").inner_text()


def drafts(page) -> list[list[dict]]:
    """Presses Run, and waits for the end; the draft of each round that the server told."""
    with page.expect_response("**/v1/foretoken/trace") as answer:
        run(page)
    lines = answer.value.text().split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [event["draft"] for event in events if event["type"] == "round"]


def branches(draft: list[dict]) -> bool:
    return [token["parent"] for token in draft] != list(range(len(draft)))


def test_drafts_are_chains_where_chains_are_chosen_and_the_link_says_so(tree_server, visit):
    page = visit(tree_server, RUN)
    page.check("text=show rejected tokens")
    choice = page.locator("#settings [name=tree]")
    assert choice.locator("option").all_inner_texts() == ["default: trees", "chains"]
    assert any(map(branches, drafts(page)))
    assert page.locator(".inline-tree").count() > 0
    assert "tree" not in page.evaluate("location.hash")
    link = page.evaluate("location.hash")
    choice.select_option("chains")
    chains = drafts(page)
    assert any(len(draft) > 1 for draft in chains)
    assert not any(map(branches, chains))
    assert page.locator(".inline-tree").count() == 0
    text, chosen = output(page), page.evaluate("location.hash")
    assert "tree=none" in chosen
    again = visit(tree_server, chosen)
    assert again.locator("#settings [name=tree]").input_value() == "none"
    assert drafts(again) == chains
    assert output(again) == text
    again.evaluate("link => { location.hash = link; }", link)  # a link without a choice takes it back
    playwright.expect(again.locator("#settings [name=tree]")).to_have_value("")
    again.click("#tab-race")
    again.select_option(".lane [name=tree]", "none")
    assert again.locator(".lane h3").all_inner_texts() == ["Plain", "draft-model, length 6, chains"]


def test_whether_trees_can_be_chosen_follows_the_engine_and_the_verifier(server, tree_server, visit):
    page = visit(server, f"{RUN}&tree=none")
    assert page.locator("[name=verifier]").count() == 1
    assert page.locator("[name=tree]").count() == 0
    page = visit(tree_server, f"{RUN}&verifier=token")
    assert page.locator("[name=tree] option").all_inner_texts() == ["default: chains", "chains"]
    assert page.locator("#settings .hint", has_text="Verifier token takes chains alone.").count() == 1
    assert not any(map(branches, drafts(page)))


def test_what_makes_no_sense_in_a_link_is_left_out(tree_server, visit):
    fragment = f"{RUN.replace('seed=1', 'seed=1.5')}&tree=dynamic&length=many&top_p=0&drafter=other"
    page = visit(tree_server, fragment, expected=400)
    for name, value in (("tree", ""), ("length", ""), ("topP", "1"), ("seed", "1"), ("drafter", "other")):
        assert page.locator(f"#settings [name={name}]").input_value() == value
    page.click("[data-run]")
    assert "drafter is 'other'" in page.locator("main .error").inner_text()  # names are the server's to judge
    page.select_option("#settings [name=drafter]", "")
    run(page)


def test_a_server_that_is_gone_is_told_in_plain_words(server, visit):
    page = visit(server, RUN, expected=0)
    page.route("**/v1/foretoken/trace", lambda route: route.abort())
    for view in ("write", "race"):
        page.click(f"#tab-{view}")
        page.click("[data-run]")
        assert page.locator("main .error").inner_text() == "the server can't be reached"


def test_a_race_of_coupled_lanes_checks_that_outputs_are_equal(server, visit):
    page = visit(server, f"{RUN}&view=race&verifier=coupled", reduced_motion="reduce")
    page.click("[data-run]")
    page.wait_for_selector(".verdict")
    assert re.search(r"Outputs are equal: checked token by token, (\d+) of \1\.", page.locator(".verdict").inner_text())
    texts = page.locator(".lane .output").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] == texts[1] != ""
    page.select_option("[name=verifier]:visible >> nth=0", "block")
    assert page.locator(".verdict").count() == 0


def test_the_dashboard_shows_what_was_decoded(server, visit):
    server.complete(prompt="the", max_tokens=20, seed=1)
    page = visit(server, "#view=dashboard")
    page.wait_for_selector(".tiles")
    assert page.locator(".plot").count() >= 5
    assert page.locator(".plot .column").count() > 0


def test_a_key_is_asked_for(visit):
    with serving(tiny_engine(), api_keys=("secret",)) as server:
        page = visit(server, expected=401)
        page.fill("[name=key]", "secret")
        page.click(".trouble button")
        page.wait_for_selector("h1 small")
        assert page.locator(".trouble").count() == 0


EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)><b>bold</b>\n"


def test_what_a_model_writes_is_text_and_nothing_else(visit):
    model = Scripted(EVIL)
    with serving(Engine(model, model, "token", 3)) as server:
        page = visit(server, "#mode=completion&prompt=ab&max_tokens=200&seed=1")
        assert run(page).removesuffix("·") == EVIL  # the end token has no text
        page.hover("[data-place] >> nth=3")
        page.click("#tab-step")
        page.keyboard.press("End")
        assert page.locator("main script, main img, main b:not(.token)").count() == 0
        assert page.locator(".context").inner_text().startswith("ab" + EVIL.strip())


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_narrow_and_dark(server, visit, scheme):
    page = visit(server, RUN, viewport={"width": 360, "height": 700}, color_scheme=scheme)
    run(page)
    for view in ("write", "step", "race", "dashboard"):
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    colour = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    assert (page.evaluate(colour) < 100) == (scheme == "dark")
    page.keyboard.press("t")
    assert (page.evaluate(colour) < 100) == (scheme == "light")


def test_the_dashboard_fits_the_narrowest_screens(server, visit):
    page = visit(server, "#view=dashboard", viewport={"width": 320, "height": 600})
    page.wait_for_selector(".plots")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320

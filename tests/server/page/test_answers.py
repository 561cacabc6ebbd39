"""Asking and answering on the chat page."""

from __future__ import annotations

import math
import re

from mlxlm.server.app import make_app
from mlxlm.server.security import AccessRules
from tests.server.conftest import running
from tests.server.page.actions import answers, ask, expect, finished, stored
from tests.server.page.fake_chat_server import Answer


def test_an_answer_is_streamed(page, server):
    server.answers = [Answer(["Hello ", "**wor", None, "ld**"], reasoning=["I am ", "greeted."], prompt_tokens=2048)]
    ask(page, "Hi!\nHow are you?")
    expect(page.locator(".waiting")).to_have_text("Reading the prompt: 1,024 of 2,048 tokens")
    assert page.get_by_role("progressbar").get_attribute("value") == "1024"
    server.go_on()
    expect(answers(page).locator("> .text")).to_have_text("Hello **wor")
    server.go_on()
    finished(page)
    expect(answers(page).locator("strong")).to_have_text("world")
    expect(answers(page).locator(".stats")).to_have_text("6 tokens · 12.3 tokens/s · 50% of the context")
    reasoning = page.locator("details.reasoning .text")
    expect(reasoning).to_be_hidden()
    page.click("summary")
    expect(reasoning).to_have_text("I am greeted.")
    assert server.requests[0] == {
        "model": "tiny-model",
        "messages": [{"role": "user", "content": "Hi!\nHow are you?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    expect(page).to_have_title(re.compile("^Hi! "))


def test_an_answer_that_was_cut_off_can_continue(page, server):
    server.answers = [
        Answer(["One, ", "two", None, "never"]),
        Answer([", three"], finish_reason="length"),
        Answer(["."]),
    ]
    ask(page, "Count.")
    expect(answers(page)).to_contain_text("One, two")
    page.press("body", "Escape")
    finished(page)
    page.get_by_role("button", name="Continue").click()
    expect(answers(page)).to_contain_text("One, two, three")
    expect(answers(page)).to_contain_text("The answer reached its maximum length.")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator("> .text")).to_have_text("One, two, three.")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    assert server.requests[1]["messages"][-1] == {"role": "assistant", "content": "One, two"}


def test_retry_edit_and_branches(page, server):
    server.answers = [Answer(["First."]), Answer(["Second."]), Answer(["About cats."]), Answer(["More."])]
    ask(page, "Dogs?")
    finished(page)
    answers(page).get_by_role("button", name="Regenerate").click()
    finished(page)
    expect(answers(page).locator("> .text")).to_have_text("Second.")
    expect(page.locator(".branches")).to_have_text("2/2")
    page.get_by_role("button", name="Previous version").click()
    expect(answers(page).locator("> .text")).to_have_text("First.")
    expect(page.get_by_role("button", name="Previous version")).to_be_focused()

    page.press("#question", "ArrowUp")
    expect(page.get_by_label("Edit your question")).to_have_value("Dogs?")
    page.keyboard.insert_text(" And cats?")
    page.keyboard.press("Enter")
    finished(page)
    assert server.requests[2]["messages"] == [{"role": "user", "content": "Dogs? And cats?"}]
    expect(answers(page).locator("> .text")).to_have_text("About cats.")
    page.get_by_role("group", name="Versions of this question").get_by_label("Previous").click()
    expect(answers(page).locator("> .text")).to_have_text("First.")

    ask(page, "Go on.")
    finished(page)
    contents = [message["content"] for message in server.requests[3]["messages"]]
    assert contents == ["Dogs?", "First.", "Go on."]


def test_errors_are_shown_in_the_servers_words(page, server):
    server.answers = [
        Answer(status=400, error="the prompt has 9,000 tokens, 808 too many (try: a shorter one)"),
        Answer(["Part of ", "an answer"], error="out of memory (try: a smaller context)"),
        Answer(["Lost"], lost=True),
        Answer(["Good."]),
    ]
    ask(page, "First")
    expect(page.locator(".notice.error")).to_contain_text("808 too many (try: a shorter one)")
    ask(page, "Second")
    expect(page.locator(".notice.error").last).to_contain_text("out of memory (try: a smaller context)")
    expect(answers(page).last.locator("> .text")).to_have_text("Part of an answer")
    assert server.requests[1]["messages"] == [{"role": "user", "content": "First\n\nSecond"}]  # roles alternate
    page.locator(".notice").get_by_role("button", name="Try again").click()
    expect(page.locator(".notice.error").last).to_contain_text("The connection to the server was lost")
    page.locator(".notice").get_by_role("button", name="Try again").click()
    finished(page)
    expect(answers(page).last.locator("> .text")).to_have_text("Good.")


def test_an_api_key_is_asked_for(browser, open_page, server):
    page = open_page()
    server.api_key = "secret"
    ask(page, "Hi")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("needs an API key")
    dialog.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("this server needs an API key")
    dialog.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    finished(page)
    expect(answers(page).locator("> .text")).to_have_text("Fine.")
    page.reload()
    ask(page, "Again")
    expect(answers(page)).to_have_count(2)
    assert page.evaluate("JSON.stringify(localStorage)") == "{}"


def test_an_answer_that_a_reload_interrupted_is_kept(page, server):
    server.answers = [Answer(["Half", None, " of", None]), Answer([" it."])]
    page.clock.install()
    ask(page, "Write.")
    expect(answers(page)).to_contain_text("Half")
    page.clock.fast_forward(3000)
    server.go_on()
    expect(answers(page)).to_contain_text("Half of")
    stored(page)  # comes after what is being written
    page.reload()
    expect(answers(page).locator("> .text")).to_have_text("Half of")
    page.get_by_role("button", name="Continue").click()
    expect(answers(page).locator("> .text")).to_have_text("Half of it.")


def test_reasoning_is_collapsed_expanded_or_hidden(page, server):
    server.answers = [Answer(["Yes."], reasoning=["Let me see."])]
    ask(page, "Is it?")
    finished(page)
    reasoning = page.locator("details.reasoning")
    for choice, shown, text_shown in (("open", True, True), ("hidden", False, False), ("collapsed", True, False)):
        page.keyboard.press("Control+.")
        page.get_by_label("Reasoning").select_option(choice)
        page.get_by_role("button", name="Save").click()
        expect(reasoning).to_be_visible(visible=shown)
        expect(reasoning.locator(".text")).to_be_visible(visible=text_shown)


def entry(token, probability, *others):
    top = [
        {"token": text, "logprob": math.log(share), "bytes": None} for text, share in ((token, probability), *others)
    ]
    return {**top[0], "top_logprobs": top}


def test_token_probabilities(page, server):
    page.keyboard.press("Control+.")
    page.get_by_label("Show token probabilities").check()
    page.get_by_role("button", name="Save").click()
    entries = [entry("*Yes*", 0.75, ("No", 0.125)), entry(" so", 0.5), entry("\n", 0.5, (" it", 0.25))]
    text = [each["token"] for each in entries]
    server.answers = [Answer(text, logprobs=[[each] for each in entries], reasoning=["Hm."]), Answer()]
    ask(page, "Is it?")
    finished(page)
    assert server.requests[0]["logprobs"] is True and server.requests[0]["top_logprobs"] == 5
    tokens = page.locator(".token-list span")
    assert tokens.all_text_contents() == text
    assert tokens.first.evaluate("(e) => e.style.getPropertyValue('--doubt')") == "25%"
    tokens.first.hover()
    details = page.locator(".token-details")
    expect(details.locator("div")).to_have_text(["*Yes*75.0 %", "No12.5 %"])
    page.locator(".token-list").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(details.locator("div")).to_have_text(["⏎50.0 %", "␣it25.0 %"])
    expect(details.locator(".chosen")).to_have_text("⏎50.0 %")
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    page.reload()
    expect(tokens).to_have_count(3)
    page.keyboard.press("Control+.")
    page.get_by_label("Show token probabilities").uncheck()
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".tokens")).to_be_hidden()
    expect(answers(page).locator("em")).to_have_text("Yes")
    ask(page, "Sure?")
    finished(page)
    assert "logprobs" not in server.requests[1]


def test_messages_are_deleted_and_restored(page, server):
    server.answers = [Answer(["One."]), Answer(["Two."]), Answer(["Again two."]), Answer(["Three."])]
    for question in ("First", "Second"):
        ask(page, question)
        finished(page)
    answers(page).last.get_by_role("button", name="Regenerate").click()
    finished(page)
    texts = page.locator(".message > .text")
    answers(page).last.get_by_role("button", name="Delete", exact=True).click()
    expect(texts).to_have_text(["First", "One.", "Second", "Two."])  # the other version
    page.keyboard.press("Enter")  # Undo has the focus
    expect(texts).to_have_text(["First", "One.", "Second", "Again two."])
    page.get_by_role("article", name="You").last.get_by_role("button", name="Delete", exact=True).click()
    expect(texts).to_have_text(["First", "One."])
    ask(page, "Third")
    finished(page)
    expect(page.locator("#toast")).to_be_empty()  # undoing would remove what came later
    assert [message["content"] for message in server.requests[3]["messages"]] == ["First", "One.", "Third"]
    page.reload()
    expect(texts).to_have_text(["First", "One.", "Third", "Three."])
    page.get_by_role("article", name="You").first.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#welcome")).to_be_visible()
    assert stored(page)[0]["messages"] == {}


def test_the_real_server_answers(browser, models):
    with running(make_app(models, AccessRules.for_host("127.0.0.1", (), (), ()))) as address:
        context = browser.new_context()
        context.set_default_timeout(10_000)
        page, errors = context.new_page(), []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        expect(page.locator("#model")).to_have_text("tiny")
        with page.expect_response("**/v1/chat/completions") as response:
            ask(page, "Hello!")
        assert response.value.status == 200
        context.close()
        assert not errors

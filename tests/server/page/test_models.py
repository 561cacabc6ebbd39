"""Choosing, loading, downloading and comparing models."""

from __future__ import annotations

import pytest

from tests.server.page.actions import answers, ask, expect, finished
from tests.server.page.fake_chat_server import Answer


@pytest.fixture
def page(open_page, server):
    server.models[:] = ["tiny-model", "other-model", "broken-model"]
    return open_page()


def compare(page):
    page.click("#model")
    page.get_by_role("button", name="Compare with other-model").click()
    page.keyboard.press("Escape")
    expect(page.locator("#model")).to_have_text("tiny-model and other-model")


def test_another_model_answers(page, server):
    page.click("#model")
    page.get_by_role("button", name="other-model 2.67M parameters · 4bit · context 4,096 · 1.58 MB").click()
    expect(page.locator("#model")).to_have_text("other-model")
    ask(page, "Hi")
    finished(page)
    assert server.requests[0]["model"] == "other-model"
    expect(page.get_by_role("article", name="other-model")).to_be_visible()


def test_a_conversation_keeps_its_model_while_the_server_has_it(page, server):
    ask(page, "Hi")
    finished(page)
    server.loaded = {"other-model"}
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny-model")
    server.models[:] = ["new-model"]
    server.answers = [Answer(status=404, error="there is no model 'tiny-model'"), Answer()]
    ask(page, "More")
    expect(page.locator("#model")).to_have_text("new-model")
    page.get_by_role("button", name="Try again").click()
    finished(page)
    assert server.requests[-1]["model"] == "new-model"


def test_models_are_loaded_and_unloaded(page, server):
    page.click("#model")
    page.get_by_role("button", name="Load other-model").click()
    expect(page.get_by_role("button", name="Unload other-model")).to_be_focused()
    page.get_by_role("button", name="Unload tiny-model").click()
    expect(page.get_by_role("button", name="Load tiny-model")).to_be_visible()
    assert server.loaded == {"other-model"}
    page.get_by_role("button", name="Load broken-model").click()
    expect(page.get_by_role("alert").filter(has_text="can't be loaded")).to_be_visible()


def test_a_model_is_downloaded(page, server):
    page.click("#model")
    form = page.locator("#pull")
    expect(form).to_be_hidden()  # a server that downloads nothing
    page.keyboard.press("Escape")
    server.pull = [{"status": "pulling", "total": 98_000_000, "completed": 49_000_000}, {"error": "no such model"}]
    page.click("#model")
    expect(page.locator("#catalog option")).to_have_text("98.4 MB · Tiny and quick.")
    form.get_by_label("Download a model").fill("smollm2-135m")
    page.keyboard.press("Enter")
    expect(form.locator("output")).to_have_text("49 MB of 98 MB")
    assert form.get_by_role("progressbar").get_attribute("value") == "0.5"
    server.go_on()
    expect(page.get_by_role("alert").filter(has_text="no such model")).to_be_visible()
    server.pull = [{"status": "pulling"}]  # and the connection ends
    form.get_by_role("button", name="Download").click()
    expect(page.get_by_role("alert").filter(has_text="lost during the download")).to_be_visible()
    server.pull = [{"status": "success"}]
    form.get_by_role("button", name="Download").click()
    expect(form.locator("output")).to_have_text("Downloaded smollm2-135m.")
    expect(page.get_by_role("button", name="Load smollm2-135m")).to_be_visible()


def test_two_models_answer_and_one_answer_is_kept(page, server):
    compare(page)
    server.answers = [Answer(["One", None, "never"]), Answer(["Two", None, "never"])]
    ask(page, "Count")
    columns = page.locator(".compared")
    expect(columns.locator("> .text")).to_contain_text(["One", "Two"])
    assert sorted(request["model"] for request in server.requests) == ["other-model", "tiny-model"]
    assert all(request["messages"] == [{"role": "user", "content": "Count"}] for request in server.requests)
    boxes = [columns.nth(n).bounding_box() for n in (0, 1)]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    columns.nth(0).get_by_role("button", name="Stop this answer").click()
    expect(columns.nth(0)).to_contain_text("Stopped.")
    expect(columns.nth(1).get_by_role("button", name="Stop this answer")).to_be_visible()
    page.press("#question", "Escape")
    finished(page)
    ask(page, "More")
    expect(page.locator("#toast")).to_contain_text("Keep one of the two answers first.")
    expect(page.locator("#question")).to_have_value("More")
    kept = columns.nth(1).get_attribute("aria-label")
    columns.nth(1).get_by_role("button", name="Keep this answer").click()
    expect(columns).to_have_count(0)
    expect(page.get_by_role("article", name=kept)).to_be_visible()
    expect(page.locator(".branches")).to_have_text("2/2")
    expect(page.locator("#toast")).to_be_empty()

    kept = answers(page).locator("> .text").text_content()
    page.click("#send")  # "More"
    finished(page)
    for request in server.requests[2:]:
        assert [message["content"] for message in request["messages"]] == ["Count", kept, "More"]
    page.reload()
    expect(columns).to_have_count(2)
    page.click("#model")
    page.get_by_role("button", name="Compare with other-model").click()  # not any more
    page.keyboard.press("Escape")
    expect(page.locator("#model")).to_have_text("tiny-model")


def test_an_error_of_one_model_leaves_the_other(page, server):
    compare(page)
    server.answers = [Answer(status=503, error="no memory"), Answer(["Fine."])]
    ask(page, "Hi")
    finished(page)
    expect(page.locator(".compared .notice.error")).to_contain_text("no memory")
    page.get_by_role("button", name="Try again").click()
    finished(page)
    assert server.requests[2]["model"] == server.requests[0]["model"]  # its own, not the first of the conversation
    expect(page.locator(".compared > .text")).to_have_text(["Fine.", "Fine."])


def test_examples_are_those_of_the_model(open_page, server):
    page = open_page()
    expect(page.locator("#examples button")).to_have_count(3)
    server.example = "Tell me a story."
    page.reload()
    expect(page.locator("#examples button")).to_have_text(["Tell me a story."])
    page.locator("#examples button").click()
    finished(page)
    assert server.requests[0]["messages"][0]["content"] == "Tell me a story."

"""The page with the keyboard alone, with a screen reader, on a narrow screen."""

from __future__ import annotations

import re

from tests.server.page.actions import answers, ask, expect, finished
from tests.server.page.fake_chat_server import Answer


def test_the_page_works_with_the_keyboard_alone(page, server):
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("Hi")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    finished(page)
    assert server.requests[0]["messages"][0]["content"] == "Hi\nthere"
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    expect(answers(page).get_by_role("button", name="Delete")).to_be_focused()  # the answer's last button
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_count(0)
    page.keyboard.press("Enter")  # undo
    expect(answers(page)).to_have_count(1)
    page.get_by_role("link", name="Skip to the message box").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    assert len(page.evaluate("location.hash")) > 20  # still that of the conversation
    page.keyboard.press("Control+/")
    expect(page.get_by_role("dialog", name="Help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_every_control_has_a_name(page, server):
    server.answers = [Answer(["```python\nx = 1\n```"], reasoning=["Hm."])]
    ask(page, "Code")
    finished(page)
    server.answers = [Answer(["Again."])]
    answers(page).get_by_role("button", name="Regenerate").click()
    finished(page)

    def nameless():
        tree = page.locator("body").aria_snapshot()
        controls = r"- (?:button|textbox|searchbox|combobox|spinbutton|checkbox|link|dialog|navigation|img)\b(?! \")"
        assert "- button" in tree
        return re.findall(controls + ".*", tree)

    assert not nameless()
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    for opener in ("#settings-button", "#help-button", "#model"):
        page.click(opener)
        assert not nameless()
        page.keyboard.press("Escape")
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_no_horizontal_scrolling(page, server):
    table = "\n".join(["|" + "a wide column|" * 12, "|" + "-|" * 12, "|" + "value|" * 12])
    blocks = ["word" * 200, "```\n" + "x" * 500 + "\n```", table, "`" + "y" * 300 + "`", "$$" + "z+" * 200 + "z$$"]
    server.answers = [Answer(["\n\n".join(blocks)], finish_reason="length")]
    name = "n" * 200
    page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": b"z" * 500})
    expect(page.locator(".chip")).to_contain_text("tokens")
    fits = "(selector) => (e => e.scrollWidth <= e.clientWidth)(document.querySelector(selector))"
    assert page.evaluate(fits, "#files")
    ask(page, "A" * 500)
    finished(page)
    for width in (375, 1280):
        page.set_viewport_size({"width": width, "height": 700})
        for selector in ("html", "#scroller", ".assistant .notice"):
            assert page.evaluate(fits, selector), (width, selector)
        for opener in ("#settings-button", "#model"):
            page.click(opener)
            assert page.evaluate(fits, "dialog[open]"), (width, opener)
            page.keyboard.press("Escape")


def test_the_end_is_followed_only_while_the_reader_is_there(page, server):
    lines = [f"Line {n}\n\n" for n in range(60)]
    server.answers = [Answer([*lines, None, *lines, None, *lines])]
    at_end = "(e => e.scrollHeight - e.scrollTop - e.clientHeight < 2)(document.querySelector('#scroller'))"
    ask(page, "Count")
    expect(answers(page).locator("p")).to_have_count(60)
    assert page.evaluate(at_end)
    top = "document.querySelector('#scroller').scrollTop"
    there = page.evaluate(f"{top} -= 10")  # a little is enough
    expect(page.locator("#to-end")).to_be_visible()
    server.go_on()
    expect(answers(page).locator("p")).to_have_count(120)
    assert page.evaluate(top) == there
    page.click("#to-end")
    server.go_on()
    finished(page)
    assert page.evaluate(at_end)

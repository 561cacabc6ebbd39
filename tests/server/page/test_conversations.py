"""Conversations that are kept: reload, list, export, import."""

from __future__ import annotations

import json

from tests.server.page.actions import answers, ask, expect, finished
from tests.server.page.fake_chat_server import Answer


def test_a_reload_keeps_conversations_settings_and_branches(page, server):
    server.answers = [Answer(["First."]), Answer(["Second."])]
    page.keyboard.press("Control+.")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Min-p").fill("0.1")
    page.get_by_label("Seed").fill("7")
    page.get_by_role("button", name="Save").click()
    ask(page, "A question")
    finished(page)
    answers(page).get_by_role("button", name="Regenerate").click()
    finished(page)
    assert server.requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {k: server.requests[1][k] for k in ("temperature", "min_p", "seed")} == {
        "temperature": 0.5,
        "min_p": 0.1,
        "seed": 7,
    }
    page.reload()
    expect(answers(page).locator("> .text")).to_have_text("Second.")
    expect(page.locator(".branches")).to_have_text("2/2")
    page.keyboard.press("Control+.")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")


def test_conversations_are_searched_renamed_deleted_and_restored(page, server):
    server.answers = [Answer(["A feline."]), Answer(["A canine."])]
    for question in ("What is a cat?", "What is a dog?"):
        page.keyboard.press("Control+Shift+O")
        ask(page, question)
        finished(page)
    titles = page.locator("#conversations .title")
    expect(titles).to_have_text(["What is a dog?", "What is a cat?"])
    page.keyboard.press("Control+K")
    page.keyboard.type("feline")
    expect(titles).to_have_text(["What is a cat?"])
    page.keyboard.press("Enter")
    expect(answers(page)).to_contain_text("A feline.")
    page.get_by_label("Rename “What is a cat?”").click()
    page.keyboard.type("Cats")
    page.keyboard.press("Enter")
    page.fill("#search", "")
    expect(titles).to_have_text(["What is a dog?", "Cats"])
    page.get_by_label("Delete “Cats”").click()
    expect(titles).to_have_text(["What is a dog?"])
    expect(page.get_by_role("heading", name="Ask anything")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(answers(page)).to_contain_text("A feline.")
    expect(titles).to_have_count(2)


def test_export_and_import(page, server, tmp_path):
    server.answers = [Answer(["First."]), Answer(["Second."])]
    ask(page, "A question")
    finished(page)
    answers(page).get_by_role("button", name="Regenerate").click()
    finished(page)
    page.click("#settings-button")
    files = {}
    for kind in ("Markdown", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Export {kind}").click()
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
    assert files["Markdown"].name == "A-question.md"
    assert files["Markdown"].read_text() == "# A question\n\n## You\n\nA question\n\n## tiny-model\n\nSecond.\n"
    page.keyboard.press("Escape")

    page.set_input_files("#import-file", files["JSON"])
    expect(page.locator("#toast")).to_contain_text("Imported one conversation.")
    expect(page.locator("#conversations .title")).to_have_count(2)
    expect(page.locator(".branches")).to_have_text("2/2")

    exported = json.loads(files["JSON"].read_text())
    exported["conversations"][0]["messages"]["m1"]["next"] = "m1"  # would never end
    files["JSON"].write_text(json.dumps(exported))
    page.set_input_files("#import-file", files["JSON"])
    expect(page.locator("#toast")).to_contain_text("message m1 has an invalid position")
    files["JSON"].write_text("{")
    page.set_input_files("#import-file", files["JSON"])
    expect(page.locator("#toast")).to_contain_text("isn't JSON")


def test_other_tabs_see_what_changes(page, server):
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator("#question")).to_be_focused()
    ask(page, "A question")
    finished(page)
    other.locator("#conversations .title").click()
    expect(answers(other).locator("> .text")).to_have_text("Fine.")
    ask(page, "Another question")
    finished(page)
    expect(answers(other)).to_have_count(2)
    page.get_by_label("Delete “A question”").click()
    expect(other.locator("#conversations .title")).to_have_count(0)


def test_a_browser_without_storage_says_so(page, server):
    page.add_init_script("indexedDB.open = () => { throw new DOMException('no', 'SecurityError'); }")
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("doesn't let this page store conversations")
    ask(page, "A question")
    finished(page)
    expect(answers(page).locator("> .text")).to_have_text("Fine.")


def test_a_full_browser_says_so(page, server):
    page.add_init_script("IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); }")
    page.reload()
    ask(page, "A question")
    expect(page.get_by_role("alert")).to_contain_text("storage is full")
    expect(answers(page).locator("> .text")).to_have_text("Fine.")

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
    page.get_by_label("Stop strings").fill("END\n\\nUser:\n")
    page.get_by_role("button", name="Save").click()
    ask(page, "A question")
    finished(page)
    answers(page).get_by_role("button", name="Regenerate").click()
    finished(page)
    assert server.requests[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    settings = {"temperature": 0.5, "min_p": 0.1, "seed": 7, "stop": ["END", "\nUser:"]}
    assert {name: server.requests[1][name] for name in settings} == settings
    page.reload()
    expect(answers(page).locator("> .text")).to_have_text("Second.")
    expect(page.locator(".branches")).to_have_text("2/2")
    page.keyboard.press("Control+.")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    expect(page.get_by_label("Stop strings")).to_have_value("END\n\\nUser:")


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
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Buy apples."})
    expect(page.locator("#files")).to_contain_text("6 tokens")
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
    page.keyboard.press("Escape")
    assert files["Markdown"].name == "A-question.md"
    question = "File: notes.txt\n```\nBuy apples.\n```\n\nA question"
    assert files["Markdown"].read_text() == f"# A question\n\n## You\n\n{question}\n\n## tiny-model\n\nSecond.\n"
    exported = json.loads(files["JSON"].read_text())
    first = exported["conversations"][0]["messages"]["m1"]
    assert first["files"] == [{"name": "notes.txt", "text": "Buy apples.", "tokens": 6}]

    page.set_input_files("#import-file", files["JSON"])
    expect(page.locator("#toast")).to_contain_text("Imported one conversation.")
    expect(page.locator("#conversations .title")).to_have_count(2)
    expect(page.locator(".branches")).to_have_text("2/2")
    expect(page.locator(".message.user .file")).to_have_count(1)
    first["next"] = "m1"  # would never end
    for content, problem in ((json.dumps(exported), "message m1 has an invalid position"), ("{", "isn't JSON")):
        files["JSON"].write_text(content)
        page.set_input_files("#import-file", files["JSON"])
        expect(page.locator("#toast")).to_contain_text(problem)


def test_a_long_conversation_is_not_measured_message_by_message(page):
    page.evaluate(
        """() => {
          window.measured = 0;
          const { get, ...rest } = Object.getOwnPropertyDescriptor(Element.prototype, "scrollHeight");
          const count = function () { window.measured += 1; return get.call(this); };
          Object.defineProperty(Element.prototype, "scrollHeight", { ...rest, get: count });
        }"""
    )
    ids = [f"m{number}" for number in range(1, 201)]
    messages = {
        id: {"parent": before, "next": after, "role": role, "text": id}
        for id, before, after, role in zip(
            ids, [None, *ids], [*ids[1:], None], ["user", "assistant"] * 100, strict=False
        )
    }
    conversation = {"title": "Long", "next": "m1", "messages": messages}
    file = {"format": "mlxlm conversations", "version": 1, "conversations": [conversation]}
    page.set_input_files(
        "#import-file", {"name": "a.json", "mimeType": "application/json", "buffer": json.dumps(file).encode()}
    )
    expect(page.locator(".message")).to_have_count(200)
    expect(page.locator(".message").last).to_be_in_viewport()
    assert page.evaluate("measured") < 100


def test_tabs_share_conversations_and_one_of_them_answers(page, server):
    other = page.context.new_page()
    other.goto(server.url)
    expect(other.locator("#question")).to_be_focused()
    ask(page, "A question")
    finished(page)
    other.locator("#conversations .title").click()
    expect(answers(other).locator("> .text")).to_have_text("Fine.")

    server.answers = [Answer(["Half", None]), Answer(["Half", None])]
    ask(page, "Another question")
    expect(other.locator("#stop")).to_be_visible()  # it would overwrite what the first tab writes
    late = page.context.new_page()
    late.goto(page.url)
    expect(late.locator("#stop")).to_be_visible()
    late.close()
    other.press("#question", "Escape")
    finished(page)
    for tab in (page, other):
        expect(answers(tab).last.locator(".notice")).to_contain_text("Stopped.")

    other.get_by_label("Delete “A question”").click()
    expect(page.locator("#conversations .title")).to_have_count(0)
    other.get_by_role("button", name="Undo").click()
    expect(page.locator("#conversations .title")).to_have_count(1)
    ask(other, "A last question")
    expect(page.locator("#conversations .pulse")).to_be_visible()
    other.close()
    expect(page.locator("#conversations .pulse")).to_have_count(0)

    crashed = "new BroadcastChannel('mlxlm').postMessage({ id: location.hash.slice(1), answering: true })"
    page.evaluate(crashed)
    page.click("#stop")
    finished(page)


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

"""Files that go with a question: added, counted, refused, sent, kept."""

from __future__ import annotations

from mlxlm.chat import files
from tests.server.page.actions import answers, ask, expect, finished

NOTES = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"\xef\xbb\xbfBuy apples.\r\nEat them.\r\n"}
CODE = {"name": "fence.md", "mimeType": "text/markdown", "buffer": b"````\nx\n````"}
PROMPT = (
    "File: notes.txt\n```\nBuy apples.\nEat them.\n```\n\nFile: fence.md\n`````\n````\nx\n````\n`````\n\nWhat is this?"
)

TRANSFER = """([selector, type, files, text]) => {
  const data = new DataTransfer();
  for (const [name, kind, content] of files) data.items.add(new File([content], name, { type: kind }));
  if (text) data.setData("text/plain", text);
  const values = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
  const event = type === "paste" ? new ClipboardEvent(type, values) : new DragEvent(type, values);
  document.querySelector(selector).dispatchEvent(event);
}"""


def chips(page):
    return page.locator("#files .chip")


def test_files_are_sent_before_the_question_as_the_terminal_does(page, server):
    page.set_input_files("#file", [NOTES, CODE])
    expect(chips(page)).to_have_text(["notes.txt8 tokens", "fence.md7 tokens"])
    assert server.other_requests[0] == (
        "/v1/tokenize",
        {
            "model": "tiny-model",
            "prompt": "File: notes.txt\n```\nBuy apples.\nEat them.\n```",
            "add_special_tokens": False,
        },
    )
    ask(page, "What is this?")
    finished(page)
    assert server.requests[0]["messages"] == [{"role": "user", "content": PROMPT}]
    expect(chips(page)).to_have_count(0)
    shown = page.locator(".message.user .file")
    expect(shown.locator("summary")).to_have_text(["notes.txt8 tokens", "fence.md7 tokens"])
    expect(page.locator(".message.user > .text")).to_have_text("What is this?")
    shown.first.locator("summary").click()
    expect(shown.first.locator("pre")).to_have_text("Buy apples.\nEat them.")


def test_the_prompt_is_that_of_the_terminal(tmp_path):
    read = []
    for file in (NOTES, CODE):
        (tmp_path / file["name"]).write_bytes(file["buffer"])
        read.append(files.read_file(tmp_path / file["name"]))
    assert files.with_files("What is this?", read) == PROMPT


def test_files_without_a_question_and_edits_of_a_question_with_files(page, server):
    page.set_input_files("#file", NOTES)
    expect(page.locator("#send")).to_be_enabled()
    page.click("#send")
    finished(page)
    expect(page.locator("#title")).to_have_text("notes.txt")
    page.press("#question", "ArrowUp")
    page.keyboard.insert_text("Which fruit?")
    page.keyboard.press("Enter")
    finished(page)
    content = server.requests[1]["messages"][0]["content"]
    assert content.startswith("File: notes.txt\n") and content.endswith("\n\nWhich fruit?")


def test_what_is_not_text_is_refused(page):
    big = {"name": "big.txt", "mimeType": "text/plain", "buffer": b"x" * (16 << 20 | 1)}
    page.set_input_files(
        "#file", [{"name": "cat & dog.png", "mimeType": "image/png", "buffer": b"\x89PNG"}, big, NOTES]
    )
    expect(page.locator("#toast")).to_contain_text("cat & dog.png is an image, not text")
    expect(page.locator("#toast")).to_contain_text("big.txt has 17 MB; the limit is 16 MB")
    expect(chips(page)).to_have_text(["notes.txt8 tokens"])


def test_files_that_do_not_fit_the_context_are_not_sent(page, server):
    page.set_input_files("#file", [NOTES, {"name": "long.txt", "mimeType": "text/plain", "buffer": b"word " * 4090}])
    problem = page.locator("#files-problem")
    expect(problem).to_contain_text("the context of tiny-model: they take 4,102 of 4,096 tokens. Remove some")
    ask(page, "Read it")
    expect(page.locator("#toast")).to_contain_text("they take 4,102 of 4,096 tokens")
    page.get_by_role("button", name="Remove long.txt").click()
    expect(problem).to_be_empty()
    page.set_input_files("#file", {"name": "huge.txt", "mimeType": "text/plain", "buffer": b"w " * 100_001})
    expect(problem).to_contain_text("don't fit into the context of tiny-model. Remove")
    expect(chips(page).last).to_contain_text("too long")
    page.get_by_role("button", name="Remove huge.txt").click()
    page.press("#question", "Enter")
    finished(page)
    assert len(server.requests) == 1


def test_files_are_dropped_and_pasted(page, server):
    file = ["a.py", "text/x-python", "x = 1"]
    page.evaluate(TRANSFER, ["#scroller", "dragover", [file], ""])
    expect(page.locator("body.dropping")).to_be_visible()
    page.evaluate(TRANSFER, ["#sidebar", "drop", [file], ""])
    expect(page.locator("body.dropping")).to_have_count(0)
    expect(chips(page)).to_have_count(1)
    page.evaluate(TRANSFER, ["#question", "paste", [["b.py", "text/x-python", "y = 2"]], "b.py"])
    expect(chips(page)).to_have_count(2)
    page.evaluate(TRANSFER, ["#question", "paste", [], "a long text " * 500])
    expect(chips(page).last).to_contain_text("pasted text")
    page.evaluate("navigator.clipboard.writeText('short')")
    page.focus("#question")
    page.keyboard.press("Control+V")
    expect(page.locator("#question")).to_have_value("short")
    page.press("#question", "Enter")
    finished(page)
    expect(answers(page)).to_have_count(1)
    assert server.requests[0]["messages"][0]["content"].startswith("File: a.py\n```\nx = 1\n```\n\nFile: b.py")

"""POST /v1/extract-text."""

import pytest


@pytest.mark.parametrize(
    ("name", "content", "status", "answer"),
    [
        ("notes.txt", b"Buy apples.\r\n", 200, "Buy apples."),
        ("a&b.html", b"<title>T</title><p>An <b>apple</b>.</p>", 200, "T\n\nAn apple."),
        ("cat.png", b"\x89PNG", 400, "cat.png is an image, not text (try: text, source code, HTML or PDF)"),
        ("empty.txt", b"", 400, "empty.txt has no text"),
        ("a\nb", b"x", 400, "name should be the name of the file, in the query"),
        ("", b"x", 400, "name should be the name of the file, in the query"),
    ],
)
def test_the_text_of_a_file(client, name, content, status, answer):
    response = client.post("/v1/extract-text", params={"name": name}, content=content)
    assert response.status_code == status
    assert (response.json()["text"] if status == 200 else response.json()["error"]["message"]) == answer


def test_a_file_that_is_too_large(client, monkeypatch):
    monkeypatch.setattr("mlxlm.server.request_body.MAX_BODY_BYTES", 3)
    assert client.post("/extract-text", params={"name": "a.txt"}, content=b"four").status_code == 413

"""The list of saved conversations: what it shows, how it is searched, and what its keys do."""

import json
import os
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.formatted_text import fragment_list_to_text
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.autosave import SavedSession, highlighted, saved_sessions, session_table
from mlxlm.chat.terminal.session_picker import SessionPicker, row_text
from mlxlm.utils.errors import GenerationError

HEADER = {"mlxlm_chat": 1, "model": "/models/Some-4B.gguf"}
ENTER, ESCAPE, DOWN, UP, CTRL_X, CTRL_C = "\r", "\x1b", "\x1b[B", "\x1b[A", "\x18", "\x03"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The private folder, with three conversations of which c is the newest."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "mlxlm" / "chats"
    folder.mkdir(parents=True)
    for age, (name, question, answer) in enumerate(
        [
            ("c", "What is  a fox?\nTell me.", "An animal."),
            ("b", "Grüße", "A dog, or a FOX.\n\nThe \x1b[31mred\tone."),
            ("a", "Hello!", "Hi."),
        ]
    ):
        write(folder / f"{name}.jsonl", question, answer, age)
    return folder


def write(path, question, answer, age=0):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "ids": [1, 2]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *messages]))
    os.utime(path, (1e9 - age, 1e9 - age))


def press(*keys, current=None):
    """What the picker returns after these keys."""
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        picker = SessionPicker(saved_sessions(), current)
        keyboard.send_text("".join(keys))
        chosen = picker.application.run()
    return chosen and chosen.path.stem


def shown(text=""):
    """The parts of the picker when `text` is typed."""
    with create_app_session(output=DummyOutput()):
        picker = SessionPicker(saved_sessions())
        picker._search.text = text
        parts = {"rows": picker._rows(), "preview": picker._preview(), "status": picker._status()}
    return SimpleNamespace(**{name: fragment_list_to_text(part) for name, part in parts.items()}), parts


def test_rows_have_date_model_messages_and_first_question(folder):
    first, *_ = saved_sessions()
    assert row_text(first) == f"{first.time:%Y-%m-%d %H:%M}  Some-4B" + " " * 17 + "2  What is a fox? Tell me."
    text, _ = shown()
    assert [row.split()[-3:] for row in text.rows.splitlines()] == [
        ["fox?", "Tell", "me."], ["Some-4B", "2", "Grüße"], ["Some-4B", "2", "Hello!"],
    ]  # fmt: skip
    assert text.preview.splitlines()[1:] == ["user: What is a fox?", "user: Tell me.", "assistant: An animal."]
    assert text.status.startswith("1 of 3")


def test_what_is_typed_is_found_in_all_messages(folder):
    text, parts = shown("fox")
    assert len(text.rows.splitlines()) == 2 and ("bold fg:ansiyellow", "fox") in parts["preview"]
    text, _ = shown("DOG or")
    assert "Grüße" in text.rows and text.preview.splitlines()[1:] == ["assistant: A dog, or a FOX."]
    text, _ = shown("red")
    assert text.preview.splitlines()[1:] == ["assistant: The \ufffd[31mred one."]
    text, _ = shown("unheard-of")
    assert text.rows == "no conversation contains this" and text.preview == "" and text.status.startswith("0 of 0")
    assert "[" not in highlighted("a [b", ["["], "bold")[0][1]  # not a regular expression


def test_keys_choose_a_conversation(folder):
    assert press(ENTER) == "c"
    assert press(DOWN, DOWN, DOWN, ENTER) == "a"
    assert press(DOWN, DOWN, UP, ENTER) == "b"
    assert press("hello", ENTER) == "a"
    assert press("fox", DOWN, " dog", ENTER) == "b"
    assert press("nothing", ENTER, ESCAPE) is None
    assert press("\x1b[6~", ENTER) == "a"
    with pytest.raises(KeyboardInterrupt):
        press(CTRL_C)


def test_deletion_asks_first(folder):
    cache = folder / "c.jsonl.cache.safetensors"
    cache.write_bytes(b"")
    assert press(CTRL_X, "n", CTRL_X, "\r", ENTER) == "c"
    assert press(CTRL_X, "y", ENTER) == "b" and not cache.exists()
    assert press("fox", CTRL_X, "y", CTRL_X, "y", ENTER, "\x15", ENTER) == "a"  # nothing is left to delete at first
    assert press(CTRL_X, "y", ENTER, current=folder / "a.jsonl") == "a"  # what is open stays
    assert [path.name for path in folder.iterdir()] == ["a.jsonl"]


def test_files_that_can_not_be_read_are_listed(folder):
    for path in folder.glob("*"):
        path.unlink()
    broken = {
        "binary": bytes(range(256)),
        "cut": b'{"mlxlm_chat": 1, "model": "x',
        "empty": b"",
        "list": b"[]\n",
        "newer": b'{"mlxlm_chat": 2}\n',
        "role": b'{"mlxlm_chat": 1}\n{"role": 3, "content": "x"}\n',
        "text": b'{"mlxlm_chat": 1}\n{"role": "user", "content": null}\n',
        "line": b'{"mlxlm_chat": 1}\n[1]\n',
        "deep": b'{"mlxlm_chat": 1}\n' + b"[" * 100_000,
    }
    for name, content in broken.items():
        (folder / f"{name}.jsonl").write_bytes(content)
    (folder / "folder.jsonl").mkdir()
    (folder / "gone.jsonl").symlink_to(folder / "nowhere")
    sessions = {session.path.stem: session for session in saved_sessions()}
    assert sessions.keys() == {*broken, "folder"}
    assert all(name in s.problem and str(folder) not in s.problem for name, s in sessions.items())
    assert "\n" not in "".join(session.problem for session in sessions.values())
    assert all("?" in row and "can't be read" in row for row in map(row_text, sessions.values()))
    assert press(ENTER, ESCAPE) is None
    text, _ = shown("binary")
    assert "can't be read" in text.preview
    assert SavedSession.read(folder / "nowhere").problem.endswith("No such file or directory")


def test_a_saved_chat_is_listed(lm, folder):
    chat = Chat(lm, temperature=0, max_tokens=3)
    list(chat.ask("First"))
    chat.branch("other")
    list(chat.ask("Second"))
    chat.switch("main")
    list(chat.ask("Third"))
    chat.save(folder / "new.jsonl")
    session = saved_sessions()[0]
    assert session.model == str(lm.path) and session.count == "6"
    assert [m.content for m in session.messages if m.role == "user"] == ["First", "Third", "Second"]


def test_a_table_has_one_line_for_each(folder):
    lines = [line.split("\t") for line in session_table(saved_sessions()).splitlines()]
    assert [line[1:4] for line in lines][0] == ["Some-4B", "2", "What is a fox? Tell me."]
    assert [line[4] for line in lines] == [str(folder / f"{name}.jsonl") for name in "cba"]


def test_no_conversation_is_an_error(tmp_path, monkeypatch):
    from mlxlm.chat.terminal.session_picker import choose_session

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(GenerationError, match="there is no saved conversation"):
        choose_session()

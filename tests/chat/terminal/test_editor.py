"""Completion of commands."""

from prompt_toolkit.document import Document

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.editor import _Completer
from mlxlm.chat.terminal.repl import Repl
from mlxlm.chat.terminal.settings import Settings


def test_completions_are_in_order_and_help_takes_names(lm):
    repl = Repl(Chat(lm), Settings(), Autosave(), None, {})

    def offered(text):
        return [c.text for c in _Completer(repl).get_completions(Document(text), None)]

    assert offered("/s") == ["/system ", "/set ", "/show ", "/stats", "/save ", "/sessions"]
    assert offered("/help sa") == ["save"] and offered("/set reasoning ") == ["show", "dim", "hide"]
    assert offered("/set rea") == ["reasoning ", "reasoning_effort "]


def test_mentions_are_completed(lm, tmp_path, monkeypatch):
    for name in ("notes.txt", "my notes.txt", ".hidden", "folder/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    repl = Repl(Chat(lm), Settings(), Autosave(), None, {})

    def completed(text):
        return [text + c.text for c in _Completer(repl).get_completions(Document(text), None)]

    assert completed("See @") == ["See @folder/", "See @my\\ notes.txt", "See @notes.txt"]
    assert completed("@my\\ n") == ["@my\\ notes.txt"] and completed("@.h") == ["@.hidden"]
    assert completed("two\nlines @folder/") == ["two\nlines @folder/a.py"] and completed("@~/no") == ["@~/notes.txt"]
    assert completed("me@no") == completed("@notes.txt and") == []
    assert completed("/file fo") == ["/file folder/"] and "/file none" in completed("/file ")

"""Completion of commands."""

from prompt_toolkit.document import Document

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.editor import _Commands
from mlxlm.chat.terminal.repl import Repl
from mlxlm.chat.terminal.settings import Settings


def test_completions_are_in_order_and_help_takes_names(lm):
    repl = Repl(Chat(lm), Settings(), Autosave(), None, {})

    def offered(text):
        return [c.text for c in _Commands(repl).get_completions(Document(text), None)]

    assert offered("/s") == ["/system ", "/set ", "/show ", "/save ", "/sessions", "/stats"]
    assert offered("/help sa") == ["save"] and offered("/set reasoning ") == ["show", "dim", "hide"]
    assert offered("/set rea") == ["reasoning "]

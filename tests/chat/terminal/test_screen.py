"""What is seen of reasoning and of answers, and what /set takes."""

import io
import re
import sys
from copy import copy
from dataclasses import replace

import pytest
from prompt_toolkit.document import Document

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import output, screen
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.editor import _Commands
from mlxlm.chat.terminal.multiline import has_open_block, quote_message, strip_block
from mlxlm.chat.terminal.repl import Repl
from mlxlm.chat.terminal.settings import Settings, set_setting, settings_text
from mlxlm.utils.errors import GenerationError
from tests.chat.terminal.fake_terminal import FakeTerminal

PIECES = [("I think", True), (" so.", True), ("", False), ("The **ans", False), ("wer**.\n\nDone", False)]


@pytest.fixture
def seen(monkeypatch):
    terminal = FakeTerminal(40, 10)
    # A terminal turns a line end into a new line at its begin.
    monkeypatch.setattr(screen, "_put", lambda text: terminal.write(re.sub(r"\r?\n", "\r\n", text)))
    monkeypatch.setattr(screen, "terminal_size", lambda: (40, 10))
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def show(reasoning, markdown, pieces=PIECES):
    drawn = screen.TerminalScreen(reasoning, markdown)
    drawn.status("reading 9 tokens")
    for piece in pieces:
        drawn.push(*piece)
    drawn.finish()
    return drawn


@pytest.mark.parametrize("reasoning", ["show", "dim"])
def test_reasoning_stands_before_the_answer(seen, reasoning):
    show(reasoning, True)
    assert seen.lines == ["I think so.", "", "The answer.", "", "Done"]


def test_hidden_reasoning_is_counted(seen):
    show("hide", True)
    assert re.fullmatch(r"\(thought for \d+\.\d s\)", seen.lines[0])
    assert seen.lines[1:] == ["", "The answer.", "", "Done"]


def test_text_without_markdown_is_what_it_is(seen):
    show("dim", False)
    assert seen.lines == ["I think so.", "", "The **answer**.", "", "Done"]


def test_an_answer_that_never_came_leaves_nothing(seen):
    show("dim", True, [])
    assert seen.lines == []


def test_reasoning_alone_ends_its_line(seen):
    show("dim", True, PIECES[:2])
    assert seen.lines == ["I think so."]


def test_a_pipe_gets_reasoning_only_when_it_is_to_be_shown(monkeypatch):
    answer = "The **answer**.\n\nDone\n"
    for reasoning, expected in (("hide", answer), ("dim", answer), ("show", f"I think so.\n\n{answer}")):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        pipe = screen.open_screen(reasoning, True)
        for piece in PIECES:
            pipe.push(*piece)
        pipe.finish()
        assert sys.stdout.getvalue() == expected


def test_control_characters_are_replaced():
    assert output.printable("a\x1b[31m\x07\x9b\r\u202e\u2066\tb\n") == "a\ufffd[31m\ufffd\ufffd\ufffd\ufffd\ufffd\tb\n"


def test_settings(lm):
    chat, settings = Chat(lm, seed=7), Settings()
    for name, text, expected in (
        ("temperature", "0.5", 0.5), ("top-k", "3", 3), ("max_tokens", "none", None), ("max_tokens", "9", 9),
        ("stop", "END 'two words' \\n", ("END", "two words", "\n")), ("logit_bias", "5=-2 6=1.5", {5: -2.0, 6: 1.5}),
        ("temperature", "default", 0.7), ("max_tokens", "default", None), ("stop", "default", ()), ("seed", "11", 11),
    ):  # fmt: skip
        set_setting(settings, chat, name, text)
        assert getattr(chat.options, name.replace("-", "_")) == expected
    set_setting(settings, chat, "seed", "default")
    assert chat.options.seed not in (None, 11)
    set_setting(settings, chat, "reasoning", "hide")
    set_setting(settings, chat, "stats", "on")
    set_setting(settings, chat, "context_overflow", "drop")
    assert (settings.reasoning, settings.stats, chat.context_overflow) == ("hide", True, "drop")
    set_setting(settings, chat, "context_overflow", "ask")
    assert (
        chat.context_overflow == "stop" and settings_text(settings, chat)["context_overflow"] == "ask"
    )  # the terminal does
    assert settings_text(settings, chat)["logit_bias"] == "5=-2.0 6=1.5"


@pytest.mark.parametrize(
    "name, text", [("temperature", "hot"), ("top_p", "2"), ("stop", "'open"), ("reasoning", "loud"), ("colour", "red")]
)
def test_settings_that_cannot_work_change_nothing(lm, name, text):
    chat, settings = Chat(lm, seed=7), Settings()
    before = chat.options
    with pytest.raises(GenerationError, match=name):
        set_setting(settings, chat, name, text)
    assert chat.options == before and settings == Settings()


def test_settings_that_the_model_cannot_serve_are_refused_at_once(lm):
    chat = Chat(lm, seed=7)
    for name, text in (("regex", "("), ("logit_bias", "900=1"), ("logprobs", "2")):
        with pytest.raises(GenerationError):
            set_setting(Settings(), chat, name, text)


def test_a_model_with_a_template_ends_its_answers_and_one_without_is_ended(lm):
    bare = copy(lm.tokenizer)
    bare.chat_template = None
    settings = Settings()
    for given, expected in (({}, (None, 256)), ({"max_tokens": 9}, (9, 9))):
        chat = Chat(lm, **given)
        assert (chat.options.max_tokens, settings.has_markdown(chat)) == (expected[0], True)
        chat.lm = replace(lm, tokenizer=bare)
        assert (chat.options.max_tokens, settings.has_markdown(chat)) == (expected[1], False)
        chat.lm = lm
        assert chat.options.max_tokens == expected[0]
    assert Chat(replace(lm, tokenizer=bare)).options.max_tokens == 256


def test_what_is_typed_for_a_message():
    for message in ("Hello", "/etc?", " /x", '"""', 'say """', '"""a"""', "\n/a\n"):
        line = quote_message(message)
        assert not has_open_block(line) and not line.startswith("/") and strip_block(line) == message
    assert has_open_block('/system """a') and has_open_block('/edit """\nb') and not has_open_block('/load """a')
    assert not has_open_block('/system """a"""')


def test_completions_are_in_order_and_help_takes_names(lm):
    repl = Repl(Chat(lm), Settings(), Autosave(), None)

    def offered(text):
        return [c.text for c in _Commands(repl).get_completions(Document(text), None)]

    assert offered("/s") == ["/system ", "/set ", "/show ", "/save ", "/stats"]
    assert offered("/help sa") == ["save"] and offered("/set reasoning ") == ["show", "dim", "hide"]
    assert offered("/set rea") == ["reasoning "]


def test_blocks():
    assert has_open_block('"""') and has_open_block('"""a\nb') and has_open_block('""""')
    assert not has_open_block('"""a"""') and not has_open_block('say """') and not has_open_block("")
    assert strip_block('"""\na\n b\n"""') == "a\n b"
    assert strip_block('"""a"""') == "a" and strip_block('plain """') == 'plain """'

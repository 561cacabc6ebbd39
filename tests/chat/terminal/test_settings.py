"""What /set accepts, and the defaults of a model with and without a chat template."""

from copy import copy
from dataclasses import replace

import pytest

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.settings import Settings, set_setting, settings_text
from mlxlm.utils.errors import GenerationError


def test_settings(lm):
    chat, settings = Chat(lm, seed=7), Settings()
    for name, text, expected in (
        ("temperature", "0.5", 0.5), ("top-k", "3", 3), ("max_tokens", "none", None), ("max_tokens", "9", 9),
        ("stop", "END 'two words' \\n", ("END", "two words", "\n")), ("logit_bias", "5=-2 6=1.5", {5: -2.0, 6: 1.5}),
        ("temperature", "default", 0.7), ("max_tokens", "default", None), ("stop", "default", ()), ("seed", "11", 11),
        ("deterministic", "on", True), ("deterministic", "false", False), ("deterministic", "none", None),
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


def test_a_reasoning_effort_needs_a_template_that_reads_it(lm):
    template = "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"
    reasons = replace(lm, tokenizer=copy(lm.tokenizer))
    reasons.tokenizer.chat_template = template
    chat, settings = Chat(reasons), Settings()
    set_setting(settings, chat, "reasoning_effort", "none")
    assert (chat.reasoning_effort, settings_text(settings, chat)["reasoning_effort"]) == ("none", "none")
    chat.lm = lm
    assert chat.reasoning_effort is None
    set_setting(settings, chat, "reasoning_effort", "default")
    with pytest.raises(GenerationError, match="the chat template reads no reasoning effort"):
        set_setting(settings, chat, "reasoning_effort", "low")


@pytest.mark.parametrize(
    "name, text",
    [
        ("temperature", "hot"),
        ("top_p", "2"),
        ("stop", "'open"),
        ("deterministic", "maybe"),
        ("reasoning", "loud"),
        ("colour", "red"),
    ],  # fmt: skip
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

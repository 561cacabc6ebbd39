"""Formats of calls, derived from templates in the styles of the families, and conversations with calls."""

import pytest

from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message, ToolCall
from mlxlm.chat.plain_text import PlainTextEncoder
from mlxlm.chat.tool_formats import JSON_FORMAT, ToolFormat
from tests.chat.tool_templates import CALL, TEMPLATES, TOOLS, tokenizer_for

CONVERSATION = [
    Message("user", "Weather?"),
    Message("assistant", "", tool_calls=(CALL,)),
    Message("tool", "rain", tool_call_id=CALL.id),
]

FORMATS = {
    "qwen2.5": JSON_FORMAT,
    "qwen3": JSON_FORMAT,
    "llama3": ToolFormat('{"name": "', '", "parameters": ', "}", None),
    "mistral": ToolFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    "mistral-long-ids": ToolFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    "functionary": ToolFormat("<function=", ">", "</function>", "</function><function="),
    "mistral-args": ToolFormat("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]"),
    "gemma": ToolFormat('```tool_code\n{"name": "', '", "arguments": ', "}\n```", '}\n```\n```tool_code\n{"name": "'),
    "deepseek": ToolFormat(
        "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>",
        "\n```json\n",
        "\n```<|tool_call_end|><|tool_calls_end|>",
        "\n```<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>",
    ),
    "chatml": JSON_FORMAT,
    "gemma-without-tools": JSON_FORMAT,
    "xml": JSON_FORMAT,
}


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def template(family, tokens):
    return ChatTemplate(tokenizer_for(family, tokens))


def test_the_format_of_a_template(family, template):
    assert template.tool_format == FORMATS[family]


def test_calls_are_rendered_in_the_format(family, template):
    """What the model generates is what the next prompt has: the key-value cache can be used."""
    text = template.render(CONVERSATION, tools=TOOLS)
    rendered = template.tool_format.render([CALL])
    if family in ("mistral", "mistral-long-ids"):  # its prompts have ids, too
        id = "l12345678" if family == "mistral" else "_12345678"
        assert f'[{{"name": "get_weather", "arguments": {{"city": "Köln"}}, "id": "{id}"}}]' in text
    else:
        assert rendered in text
    start = template.render(CONVERSATION[:1], tools=TOOLS)
    assert "Tells the weather." in start
    assert "rain" in text
    if family == "mistral":
        assert 'call_id": "l12345678"' in text
    if family == "functionary":
        assert "get_weather: rain" in text  # the name is that of the call
    if not family.startswith("mistral") and family != "qwen3":  # which show tools at the end, or reasoning
        assert text.startswith(start + rendered)


def test_ids_keep_the_length_that_a_template_asks_for(tokens):
    template = ChatTemplate(tokenizer_for("mistral", tokens))
    for id, shown in (("abc123XYZ", "abc123XYZ"), ("1", "000000001"), ("call_" + "f" * 30, "f" * 9)):
        call = ToolCall(id, "f", "{}")
        messages = [
            Message("user", "?"),
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", "1", tool_call_id=id),
        ]
        assert template.render(messages).count(f'"{shown}"') == 2


def test_a_template_without_tools_gets_them_as_text(tokens):
    template = ChatTemplate(tokenizer_for("chatml", tokens))
    other = ToolCall("2", "get_time", "")
    conversation = [
        Message("system", "Be brief."),
        Message("user", "?"),
        Message("assistant", "Let me see.", (5, 6), (CALL, other)),
        Message("tool", "rain", tool_call_id=CALL.id),
        Message("tool", "noon", tool_call_id="2"),
    ]
    text = template.render(conversation, tools=TOOLS)
    system, user, answer, results, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert '\n{"name": "get_weather", "description": "Tells the weather.", "parameters": {"type": ' in system
    assert '\n<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n' in system
    assert user == "<|im_start|>user\n?"
    assert answer == (
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    )
    assert results == (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    assert "get_weather" not in template.render(conversation[:2])


def test_without_a_system_role_tools_are_described_by_the_user(tokens):
    template = ChatTemplate(tokenizer_for("gemma-without-tools", tokens))
    text = template.render([Message("user", "Weather?")], tools=TOOLS)
    assert text.startswith("<|begin_of_text|><start_of_turn>user\nYou can call functions.")
    assert text.endswith("tags.\n\nWeather?<end_of_turn>\n<start_of_turn>model\n")


def test_plain_text_with_tools(tokens):
    tokens.chat_template = None
    plain = PlainTextEncoder(tokens)
    text = tokens.decode(plain.encode(CONVERSATION, tools=TOOLS))
    assert text.startswith("You can call functions.")
    assert text.endswith(
        'Weather?<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        "<tool_response>\nrain\n</tool_response>"
    )

"""Tools and calls as requests send them."""

import pytest

from mlxlm.chat.messages import Message, Tool, ToolCall, map_strings, parse_tools
from mlxlm.utils.errors import TokenizerError


def test_tools_are_parsed():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    values = [
        {"type": "function", "function": {"name": "a", "description": "A.", "parameters": schema, "strict": True}},
        {"function": {"name": "b", "description": None}},
    ]
    assert parse_tools(values) == (
        Tool("a", "A.", schema, strict=True),
        Tool("b", parameters={"type": "object", "properties": {}}),
    )
    assert parse_tools(values)[1].to_dict()["function"]["description"] == ""
    assert parse_tools(values)[0].to_dict() == {
        "type": "function",
        "function": {"name": "a", "description": "A.", "parameters": schema},
    }


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("get_weather", "tool 1 is not a function"),
        ({"type": "web_search"}, "tool 1 is not a function"),
        ({"type": "custom", "function": {"name": "a"}}, "tool 1 is not a function"),
        ({"function": {}}, "tool 1 has no name"),
        ({"function": {"name": "a b"}}, "tool 1 has the name 'a b'.*letters"),
        ({"function": {"name": "a\n"}}, "tool 1 has the name"),
        ({"function": {"name": "a", "parameters": []}}, r"the parameters of the tool a is \[\] .try: a JSON schema"),
        ({"function": {"name": "a", "strict": 1}}, "the strict of the tool a is 1 .try: true or false"),
    ],
)
def test_a_mistake_in_a_tool_is_named(tool, message):
    with pytest.raises(TokenizerError, match=message):
        parse_tools([tool])


def test_tools_have_names_of_their_own():
    with pytest.raises(TokenizerError, match="two tools with the name a"):
        parse_tools([{"function": {"name": "a"}}] * 2)


def test_a_message_of_fine_tuning_data():
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"city": "Köln"}}}
    values = {"role": "assistant", "content": "", "weight": 0, "tool_calls": [call], "name": None, "time": 3}
    assert Message.from_dict(values) == Message(
        "assistant", "", tool_calls=(ToolCall("", "f", '{"city": "Köln"}'),), weight=0
    )


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"name": 3}, "the name of a message is 3 .try: a text"),
        ({"tool_calls": "f"}, "tool_calls is 'f' .try: .{"),
        ({"tool_calls": ["f"]}, "'f' is not a tool call"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "is not a tool call .try: {.id"),
    ],
)
def test_a_mistake_in_a_message_is_named(field, message):
    with pytest.raises(TokenizerError, match=message):
        Message.from_dict({"role": "assistant", "content": "", "weight": 1, **field})


@pytest.mark.parametrize("arguments", ["[]", "{", "1", '{"a": 1} x', "[" * 100_000, '"\ud800"'])
def test_arguments_are_a_json_object(arguments):
    with pytest.raises(TokenizerError, match="the arguments of the call of f "):
        ToolCall("1", "f", arguments).parsed_arguments()
    assert ToolCall("1", "f", " ").parsed_arguments() == {}


def test_strings_inside_arguments_are_mapped():
    call = ToolCall("a", "a", '{"a": ["a", 1, {"\\u0061": null}]}')
    message = Message("assistant", "a", (7,), (call,), None, "a", "a").map_strings(str.upper)
    assert message == Message(
        "assistant", "A", (7,), (ToolCall("A", "A", '{"A": ["A", 1, {"A": null}]}'),), None, "A", "A"
    )


def test_deep_nesting_is_an_error():
    value: list = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(TokenizerError, match="nested too deeply"):
        map_strings(value, str)

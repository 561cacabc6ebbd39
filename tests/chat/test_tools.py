"""Tools from Python functions: their schemas, checked arguments, and errors as results."""

import datetime
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

from mlxlm.chat.messages import ToolCall
from mlxlm.chat.tools import MAX_RESULT_CHARS, CallableTool, callable_tools, run_call
from mlxlm.utils.errors import GenerationError, TokenizerError


@dataclass
class Point:
    x: float
    y: float = 0


def weather(city: str, json: Literal["text", "table"] = "text", _points: list[Point] | None = None, *, day: str = "?"):
    """Return the weather in a city.

    It is invented.

    Args:
        city (str): Its name,
            in English: such as Paris.
        json: How the result is shown.

    Returns:
        day: what was asked for.
    """
    return {"city": city, "json": json, "points": _points, "day": day}


def test_a_tool_has_the_name_description_and_parameters_of_its_function():
    tool = CallableTool.from_function(weather)
    assert (tool.name, tool.description) == ("weather", "Return the weather in a city.\n\nIt is invented.")
    properties = tool.parameters["properties"]
    assert properties["city"] == {"type": "string", "description": "Its name, in English: such as Paris."}
    assert properties["json"] == {
        "type": "string", "enum": ["text", "table"], "default": "text", "description": "How the result is shown."
    }  # fmt: skip
    assert list(properties) == ["city", "json", "_points", "day"]
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["additionalProperties"] is False
    assert "title" not in tool.parameters


def test_arguments_are_converted_to_their_types():
    def days(until: datetime.date, points: list[Point]) -> str:
        return f"{until:%d.%m.%Y} {points}"

    tool = CallableTool.from_function(days)
    assert tool.call({"until": "2024-05-01", "points": [{"x": 1}]}) == f"01.05.2024 {[Point(1.0)]}"


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"city": "Bonn", "_points": [{"x": 2}]}, '{"city":"Bonn","json":"text","points":[{"x":2.0,"y":0}],"day":"?"}'),
        ({}, "error: city: Field required"),
        ({"city": "Paris", "json": "x"}, "error: json: Input should be 'text' or 'table'"),
        ({"city": "Paris", "speed": 3}, "error: speed: Extra inputs are not permitted"),
        ({"city": "Paris", "_points": [{"z": 1}]}, "error: _points.0.x: Field required; _points.0.z: "),
    ],
)  # fmt: skip
def test_the_result_of_a_call_is_text_and_wrong_arguments_are_named(arguments, expected):
    assert CallableTool.from_function(weather).call(arguments).startswith(expected)


@pytest.mark.parametrize("result, text", [("as it is", "as it is"), (None, "null"), ({1, 2}, "[1,2]"), ("\ud800", "?")])
def test_a_string_is_the_result_as_it_is_and_other_values_are_json(result, text):
    assert CallableTool("f", run=lambda arguments: result).call({}) == text


def test_an_exception_becomes_a_result_and_a_long_result_is_shortened():
    def divide(a: int, b: int) -> float:
        return a / b

    def read() -> str:
        return "x" * (MAX_RESULT_CHARS + 5)

    assert CallableTool.from_function(divide).call({"a": 1, "b": 0}) == "error: ZeroDivisionError: division by zero"

    def leave() -> None:
        sys.exit(3)  # which doesn't end the chat

    assert CallableTool.from_function(leave).call({}) == "error: SystemExit: 3"
    assert CallableTool.from_function(read).call({}).endswith("x\n[5 more characters were left out]")


def test_a_call_of_the_model_runs_if_it_is_known_allowed_and_has_arguments():
    tools = callable_tools([weather, CallableTool("now", run=lambda arguments: "12:00")])
    assert run_call(tools, ToolCall("1", "now", "")) == "12:00"
    assert run_call(tools, ToolCall("1", "then", "{}")) == "error: there is no function then; there are weather, now"
    assert run_call(tools, ToolCall("1", "weather", '{"city": "Par')).startswith("error: the arguments of the call")
    asked = []
    assert run_call(tools, ToolCall("1", "now", "{}"), asked.append) == "error: the user did not allow this call"
    assert asked == [ToolCall("1", "now", "{}")]


def untyped(a):
    pass


def variable(*a: int):
    pass


def positional(a: int, /):
    pass


async def coroutine(a: int):
    pass


def unknown_type(a: "Missing"):  # noqa: F821
    pass


def no_json(a: object()):
    pass


@pytest.mark.parametrize(
    "function, message",
    [
        (untyped, "the parameter a of the tool untyped has no type"),
        (variable, r"the tool variable has the parameter \*a: int"),
        (positional, "the tool positional has the parameter a: int"),
        (coroutine, "is a coroutine function"),
        (unknown_type, "name 'Missing' is not defined"),
        (no_json, "a type hint of the tool no_json has no JSON schema: Unable to"),
        (lambda: 1, "is not a function with a name"),
        (3, "is not a function with a name"),
    ],
)
def test_functions_that_no_model_could_call_are_refused(function, message):
    with pytest.raises(GenerationError, match=message):
        callable_tools([function])


def test_two_tools_need_two_names():
    with pytest.raises(TokenizerError, match="two tools with the name weather"):
        callable_tools([weather, weather])
    with pytest.raises(GenerationError, match="tools is"):
        callable_tools(weather)

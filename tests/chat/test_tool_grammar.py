"""Which answers a grammar accepts, and that a random walk through it writes calls whose arguments match."""

import json
from dataclasses import replace

import numpy as np
import pytest

from mlxlm import tokenizer as tokenizers
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Tool, ToolCall
from mlxlm.chat.tool_grammar import MAX_CALLS, tool_grammar
from mlxlm.generation import GenerationOptions
from mlxlm.generation.constraint import Grammar
from mlxlm.utils.errors import GenerationError
from tests.chat.conftest import TEXT
from tests.chat.test_tool_calls import FORMATS, parse
from tests.chat.tool_templates import tokenizer_for

TOOLS = (
    Tool("get", parameters={}),
    Tool(
        "get_weather",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 5},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "<tool_call>"]},
            },
            "required": ["city", "unit"],
        },
        strict=True,
    ),
    Tool("note", parameters={"type": "object", "properties": {"a": {"type": "object", "maxProperties": 1}}}),
)
NAMED = {"type": "function", "function": {"name": "get_weather"}}
DISTINCT = ["qwen2.5", "llama3", "mistral", "mistral-args", "gemma", "deepseek", "functionary"]
DISTINCT += ["qwen3.5", "glm4.5", "glm4.7", "minimax-m2", "gemma4", "functiongemma", "lfm2", "lfm2.5", "kimi-k2"]


def valid(name, arguments):
    """Whether arguments are JSON that matches the parameters of a tool."""
    value = json.loads(arguments)
    if name == "get":
        return value == {}
    if name == "note":
        return set(value) <= {"a"} and isinstance(value.get("a", {}), dict)
    assert name == "get_weather"
    return (
        {"city", "unit"} <= set(value) <= {"city", "unit", "days"}
        and len(value["city"]) <= 5
        and value["unit"] in ("C", "<tool_call>")
        and value.get("days", 1) in range(1, 10)
    )


@pytest.fixture(scope="module")
def trained():
    return tokenizers.train(TEXT, 300)


def accepts(family, trained, text, **options):
    """Whether a complete answer matches the grammar."""
    tokenizer = tokenizer_for(family, trained)
    grammar = tool_grammar(ChatTemplate(tokenizer).tool_format, TOOLS, tokenizer, **options)
    return accepts_text(grammar, tokenizer, text)


def accepts_text(grammar, tokenizer, text):
    compiled = Grammar.compile(GenerationOptions(grammar=grammar), tokenizer, 512, frozenset({tokenizer.eos_token_id}))
    matcher = compiled.matcher()
    for id in tokenizer.encode(text, add_special_tokens=False, parse_special=True):
        if not matcher.token_bitmask()[id // 32] >> (id % 32) & 1:
            return False
        matcher.consume(id)
    return matcher.constraint_error is None


CALL = ToolCall("1", "get_weather", '{"city": "Ulm", "unit": "C"}')


@pytest.mark.parametrize("reasoning", [None, "", "<think>\n"])
@pytest.mark.parametrize("family", DISTINCT)
def test_which_answers_are_accepted(trained, family, reasoning):
    format = FORMATS[family]
    one, two = format.render([CALL]), format.render([CALL, ToolCall("2", "get", "")])
    thought = {None: "", "": "\n<think>It is <tool.</think>\n\n", "<think>\n": "It <is.</think>\n\n"}[reasoning]
    expected = {
        # answer: whether it is accepted with auto, required, a named function, none
        "Hello <b>.": (True, False, False, True),
        one: (True, True, True, False),
        two: (bool(format.separator), bool(format.separator), False, False),
        one[:-1]: (False,) * 4,
        f"Let me see.\n{one}": (True, False, False, not format.follows_text),
        format.trigger: (False,) * 4,
        f"{format.trigger}x": (False,) * 4,
        one.replace("get_weather", "other"): (False,) * 4,
        format.render([replace(CALL, arguments='{"city": "Ulm", "days": "5.", "unit": "C"}')]): (False,) * 4,
        format.render([replace(CALL, arguments='{"city": "Ulm", "unit": "C", "more": 1}')]): (False,) * 4,
    }
    for answer, wanted in expected.items():
        for choice, accepted in zip(("auto", "required", NAMED, "none"), wanted, strict=True):
            got = accepts(family, trained, thought + answer, tool_choice=choice, reasoning=reasoning)
            assert got == accepted, (answer, choice)
    single = {"tool_choice": "required", "reasoning": reasoning, "parallel_tool_calls": False}
    assert accepts(family, trained, thought + one, **single)
    assert not accepts(family, trained, thought + two, **single)


def test_the_number_of_calls_is_limited(trained):
    for count, accepted in ((MAX_CALLS, True), (MAX_CALLS + 1, False)):
        assert accepts("mistral", trained, FORMATS["mistral"].render([CALL] * count)) == accepted


@pytest.mark.parametrize("family", DISTINCT)
def test_a_call_that_has_begun_is_completed(trained, family):
    """Where a random model would hardly begin one."""
    tokenizer, format = tokenizer_for(family, trained), FORMATS[family]
    options = GenerationOptions(grammar=tool_grammar(format, TOOLS, tokenizer))
    compiled = Grammar.compile(options, tokenizer, 512, frozenset({tokenizer.eos_token_id}))
    for seed in range(3):
        random, matcher = np.random.default_rng(seed), compiled.matcher()
        text = "Well:\n\n" * format.follows_text
        ids = tokenizer.encode(text + format.trigger, add_special_tokens=False, parse_special=True)
        for id in ids:
            matcher.consume(id)
        while ids[-1] != tokenizer.eos_token_id and not matcher.finished:
            bits = np.unpackbits(matcher.token_bitmask().view(np.uint8), bitorder="little")
            ids.append(int(random.choice(np.flatnonzero(bits))))
            matcher.consume(ids[-1])
        found, calls = parse(format, tokenizer.decode(ids[:-1], skip_special_tokens=False), tools=TOOLS)
        assert found == text.strip() and calls and all(valid(name, arguments) for name, arguments in calls)


def test_reasoning_is_optional_and_no_call(trained):
    call = FORMATS["qwen3"].render([CALL])
    thought = "<think>\n<tool_call> would help.\n</think>\n\n"
    for answer in (thought + call, call, thought + "No.", "No."):
        assert accepts("qwen3", trained, answer, reasoning="")
    assert not accepts("qwen3", trained, thought + "<tool_call>", reasoning="")
    assert not accepts("qwen3", trained, "<think>\n" + call, reasoning="")


def test_python_tag(trained):
    call = FORMATS["llama3"].render([CALL])
    for choice in ("auto", "required"):
        assert accepts("llama3", trained, "<|python_tag|>" + call, tool_choice=choice)
    assert accepts("llama3", trained, '{"name": 5}')


def test_json_or_calls(trained):
    properties = {"ok": {"type": "boolean"}, "name": {"type": "string"}, "parameters": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    valid, invalid = ('{"ok": true}', '{"name": "Bob"}', '{"name":"get","parameters":5}'), ("Hello", '{"ok": 5}')
    for family in DISTINCT:
        tokenizer, call = tokenizer_for(family, trained), FORMATS[family].render([CALL])
        for reasoning, thought in ((None, ""), ("<think>", "</think>\n")):
            grammar = tool_grammar(FORMATS[family], TOOLS, tokenizer, json_schema=schema, reasoning=reasoning)
            for answer in (*valid, call, *invalid):
                assert accepts_text(grammar, tokenizer, thought + answer) == (answer not in invalid), answer
        assert tool_grammar(FORMATS[family], TOOLS, tokenizer, tool_choice="none", json_schema=schema) is None
    assert tool_grammar(FORMATS["pythonic"], (), tokenizer) is None


@pytest.mark.parametrize(
    ("parameters", "strict", "message"),
    [
        ({"type": "string"}, False, "their type is 'string', not an object"),
        ({"type": "object", "not": {}}, True, '"not" can\'t be enforced while a text is generated'),
        ({"type": "object", "properties": {"a": {"type": "word"}}}, False, 'there is no type "word"'),
        ({"properties": {"a": {"$ref": "#/$defs/a"}}}, False, "which the schema doesn't have"),
        ({"properties": {"a": False}, "required": ["a"]}, False, "no JSON matches it"),
        ({"properties": 5}, False, '"properties" is not an object'),
        ({"properties": {}, "required": [[]]}, False, "required"),
        ({"properties": {}, "required": 5}, False, "required"),
        ({"x-guidance": {}}, True, '"x-guidance" can\'t be set'),
        ({"x-guidance": {}}, False, '"x-guidance" can\'t be set'),
        ({"properties": {"a": {"const": {1}}}}, False, "not JSON serializable"),
    ],
)
def test_parameters_that_cannot_be_enforced(trained, parameters, strict, message):
    with pytest.raises(GenerationError) as caught:
        tool_grammar(FORMATS["pythonic"], [Tool("f", parameters=parameters, strict=strict)], trained)
    assert str(caught.value).startswith("the parameters of the tool f: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "b+"}}}, '"pattern" can\'t be enforced in the calls'),
        ({"type": "object"}, 'arguments that aren\'t in "properties"'),
    ],
)
def test_parameters_that_cannot_be_enforced_between_tags(trained, parameters, message):
    with pytest.raises(GenerationError, match=message):
        tool_grammar(FORMATS["glm4.5"], [Tool("f", parameters=parameters, strict=True)], trained)
    tool_grammar(FORMATS["glm4.5"], [Tool("f", parameters=parameters)], trained)


@pytest.mark.parametrize("family", ["qwen3.5", "glm4.7"])
def test_arguments_between_tags(trained, family):
    parameters = {
        "properties": {
            "ref": {"$ref": "#/$defs/n"},
            "any": {},
            "long": {"type": "string", "maxLength": 50000},
            "list": {"type": "array", "items": {"$ref": "#/properties/ref"}},
            "short": {"type": "string", "maxLength": 0},
        },
        "$defs": {"n": {"type": "integer"}},
        "required": ["any", "other"],
    }
    tokenizer, format = tokenizer_for(family, trained), FORMATS[family]
    grammar = tool_grammar(format, [Tool("f", parameters=parameters)], tokenizer)
    for arguments, accepted in (
        ({"any": "<b>\n", "other": {}}, True),
        ({"ref": 5, "any": [], "long": "a" * 99, "list": [5], "short": "", "more": "x\n"}, True),
        ({"any": 1, "lone": 2, "lon": 3}, True),
        ({"ref": "5.", "any": 1}, False),
        ({"ref": 5}, False),
    ):
        answer = format.render([ToolCall("", "f", json.dumps(arguments))])
        assert accepts_text(grammar, tokenizer, answer) == accepted, answer


@pytest.mark.parametrize("family", ["gemma4", "functiongemma", "lfm2", "lfm2.5"])
def test_objects_that_are_not_json(trained, family):
    parameters = {
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "any": {},
            "short": {"type": "string", "maxLength": 2},
            "list": {"type": "array", "items": {"enum": ["it's", 5, None]}, "minItems": 1, "maxItems": 2},
            "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "union": {"anyOf": [{"type": "string"}, {"type": ["integer", "null"], "minimum": 3}]},
        },
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "children": {"items": {"$ref": "#/$defs/tree"}, "type": "array"},
                },
                "required": ["name"],
                "additionalProperties": False,
            }
        },
        "required": ["any"],
    }
    tokenizer, format = tokenizer_for(family, trained), FORMATS[family]
    grammar = tool_grammar(format, [Tool("f", parameters=parameters, strict=True)], tokenizer)
    for arguments, accepted in (
        ({"any": 'it\'s "it"\n'}, True),
        ({"any": [{"a": [1.5, True]}, {}, ""], "union": None}, True),
        ({"tree": {"name": "", "children": [{"name": "b", "children": []}]}, "any": None, "short": "ab"}, True),
        ({"any": {}, "list": ["it's", None], "map": {}, "union": 3}, True),
        ({"any": False, "map": {"b": True, "c": False}, "union": "x"}, True),
        ({}, False),
        ({"tree": {"children": []}, "any": 1}, False),
        ({"tree": {"name": "b", "other": 1}, "any": 1}, False),
        ({"tree": {"name": "b", "children": [5]}, "any": 1}, False),
        ({"any": 1, "short": "abc"}, False),
        ({"any": 1, "list": []}, False),
        ({"any": 1, "list": [5, 5, 5]}, False),
        ({"any": 1, "list": ["5"]}, False),
        ({"any": 1, "map": {"b": 1}}, False),
        ({"any": 1, "union": 2}, False),
        ({"any": 1, "more": 2}, False),
    ):
        answer = format.render([ToolCall("", "f", json.dumps(arguments))])
        assert accepts_text(grammar, tokenizer, answer) == accepted, answer


@pytest.mark.parametrize("keywords", [{"pattern": "b"}, {"allOf": [{"type": "string"}]}, {"minProperties": 1}])
def test_keywords_that_cannot_be_enforced_in_other_objects(trained, keywords):
    parameters = {"properties": {"a": keywords}}
    with pytest.raises(GenerationError, match=f'"{min(keywords)}" can\'t be enforced in the calls'):
        tool_grammar(FORMATS["gemma4"], [Tool("f", parameters=parameters, strict=True)], trained)
    tool_grammar(FORMATS["gemma4"], [Tool("f", parameters=parameters)], trained)


def test_without_strict_some_keywords_are_ignored(trained):
    parameters = {"properties": {"a": {"type": "string", "format": "uri-template", "not": {"const": "b"}}}}
    grammar = tool_grammar(FORMATS["pythonic"], [Tool("f", parameters=parameters)], trained)
    assert accepts_text(grammar, trained, FORMATS["pythonic"].render([ToolCall("1", "f", '{"a": "b"}')]))
    with pytest.raises(GenerationError, match="the tool f: "):
        tool_grammar(FORMATS["pythonic"], [Tool("f", parameters=parameters, strict=True)], trained)


def test_arguments_that_a_schema_allows_by_itself(trained):
    for parameters in (
        {"type": "object"},
        {"properties": {}, "additionalProperties": {"type": "integer"}},
        {"properties": {}, "required": ["any"]},
    ):
        for family in ("pythonic", "gemma4", "lfm2"):
            grammar = tool_grammar(FORMATS[family], [Tool("f", parameters=parameters)], trained)
            for arguments, accepted in (('{"any": 5}', True), ("{}", "required" not in parameters)):
                answer = FORMATS[family].render([ToolCall("1", "f", arguments)])
                assert accepts_text(grammar, trained, answer) == accepted


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("required", (), "there are no tools"),
        ({"function": {"name": "f"}}, TOOLS, "names 'f', which is not one of the tools .try: one of get, get_weather"),
        ({"function": {"name": "f"}}, (), "names 'f', which is not one of the tools .try: \"auto\""),
        ("any", TOOLS, 'tool_choice is \'any\' .try: "none", "auto"'),
        (None, TOOLS, "tool_choice is None"),
        ({"function": 5}, TOOLS, "tool_choice is "),
    ],
)
def test_invalid_choices(trained, choice, tools, message):
    with pytest.raises(GenerationError, match=message):
        tool_grammar(FORMATS["pythonic"], tools, trained, tool_choice=choice)

"""Tool calls: formats derived from templates in the styles of the families, and calls in a stream.

However a stream is split, the events are the same, and no markup is in the text.
"""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import gemma4, pythonic

from mlxlm.chat.chat_encoder import PlainTextEncoder
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message, Tool, ToolCall
from mlxlm.chat.tool_call_parser import ArgumentsDelta, TextDelta, ToolCallParser, ToolCallStart
from mlxlm.chat.tool_calls import JSON_FORMAT, PYTHON_FORMAT, ArgumentFormat, ObjectFormat, ToolFormat
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
    "kimi-k2": ToolFormat(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_end|><|tool_call_begin|>functions.",
    ),
    "gpt-oss": ToolFormat("to=functions.", "<|channel|>commentary json<|message|>", "", None),  # one of its forms
    "chatml": JSON_FORMAT,
    "gemma-without-tools": JSON_FORMAT,
    "pythonic": JSON_FORMAT,
    "gemma4": ToolFormat(
        "<|tool_call>call:",
        "",
        "<tool_call|>",
        "<tool_call|><|tool_call>call:",
        ObjectFormat("{", ":", ",", '<|"|>'),
    ),
    "functiongemma": ToolFormat(
        "<start_function_call>call:",
        "",
        "<end_function_call>",
        "<end_function_call><start_function_call>call:",
        ObjectFormat("{", ":", ",", "<escape>"),
    ),
    "lfm2": PYTHON_FORMAT,
    "lfm2.5": replace(PYTHON_FORMAT, arguments=ObjectFormat("(", "=", ", ", "'")),
    "qwen3.5": ToolFormat(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        "</function>\n</tool_call>\n<tool_call>\n<function=",
        ArgumentFormat("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "glm4.5": ToolFormat(
        "<tool_call>",
        "\n",
        "</tool_call>",
        "</tool_call>\n<tool_call>",
        ArgumentFormat("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm4.7": ToolFormat(
        "<tool_call>",
        "",
        "</tool_call>",
        "</tool_call><tool_call>",
        ArgumentFormat("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
    ),
    "minimax-m2": ToolFormat(
        '<minimax:tool_call>\n<invoke name="',
        '">\n',
        "</invoke>\n</minimax:tool_call>",
        '</invoke>\n<invoke name="',
        ArgumentFormat('<parameter name="', '">', "</parameter>\n"),
    ),
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
    if family == "gpt-oss":
        start += " "
    if not family.startswith(("mistral", "qwen3")):  # which show tools at the end, or reasoning
        assert text.startswith(start + rendered)


def test_calls_are_numbered(tokens):
    template = ChatTemplate(tokenizer_for("kimi-k2", tokens))
    other = replace(CALL, id="b", name="x-1.y")
    turn = [Message("assistant", "", tool_calls=(CALL, other)), Message("tool", "rain", tool_call_id="b")]
    text = template.render([*turn, Message("user", "?"), *turn])
    shown = [f"functions.{name}:{n}" for n, name in enumerate(["get_weather", "x-1.y"] * 2)]
    assert all(text.count(f"<|tool_call_begin|>{id}<|tool_call_argument_begin|>") == 1 for id in shown)
    assert [text.count(f"Return of {id}\nrain") for id in shown] == [0, 1, 0, 1]
    answer = FORMATS["kimi-k2"].render(calls_of(2)).replace(":1<", ":123<")
    for chunks in ([answer], answer):
        assert [name for name, _ in parse(FORMATS["kimi-k2"], chunks)[1]] == ["get_weather", "a"]


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "gemma4", "lfm2"])
def test_reasoning_before_a_call(family, template):
    call = Message("assistant", "", tool_calls=(CALL,), reasoning_content="Hm.")
    assert template.render([CONVERSATION[0], call, CONVERSATION[2]]).count("Hm.") == 1
    text = template.render([CONVERSATION[0], replace(call, content="Let me see."), CONVERSATION[2]])
    assert text.count("Hm.") == 1 and text.index("Let me see.") < text.index("rain")


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


ARGUMENTS = ['{"city": "Köln"}', "{}", '{"a": {"b": [{}, "}]{\\"\\\\"]}, "c": "</tool_call>[TOOL_CALLS]"}']
DISTINCT = list(dict.fromkeys(FORMATS.values()))


def parse(format, chunks, cut_off=False, tools=()):
    """The text and the calls, as [name, arguments], from the events of a stream."""
    parser = ToolCallParser(format, tools)
    events = [event for chunk in chunks for event in parser.push(chunk)] + parser.finish(cut_off=cut_off)
    text, calls, ids = "", [], set()
    for event in events:
        match event:
            case TextDelta(new):
                assert new
                text += new
            case ToolCallStart(id, name):
                assert len(id) == 9 and id.isalnum() and id.isascii() and id not in ids
                ids.add(id)
                calls.append([name, ""])
            case ArgumentsDelta(new):
                calls[-1][1] += new
    return text, calls


def calls_of(count):
    return [ToolCall("", name, ARGUMENTS[n]) for n, name in enumerate(["get_weather", "a", "x-1.y"][:count])]


def rendered(format, count, text=""):
    """An answer with calls, and what its parts are."""
    count = count if format.separator is not None else min(count, 1)
    calls = calls_of(count)
    expected = [[c.name, json.dumps(c.parsed_arguments(), ensure_ascii=False)] for c in calls]
    text = text if format.follows_text or not calls else ""
    return text + (format.render(calls) if calls else ""), text.rstrip() if calls else text, expected


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("format", DISTINCT, ids=lambda format: format.prefix)
def test_calls_after_text(format, count):
    for text in ("", "Let me see.\n\n", "<tool_cal [ { ``` a\n"):
        answer, expected, calls = rendered(format, count, text)
        assert parse(format, [answer]) == (expected, calls)
        assert parse(format, answer) == (expected, calls)
        for split in range(len(answer)):
            assert parse(format, [answer[:split], answer[split:]]) == (expected, calls)


pieces = st.sampled_from([
    "<tool_call>", "<tool_", "</tool_call>", "\n", " ", '{"name": "', "get", '", "arguments": ', '", "parameters": ',
    "{", "}", '"', "\\", "[TOOL_CALLS]", " [", "]", "}]", "```tool_code\n", "```", ",", "<|python_tag|>", "[ARGS]", "ü",
]) | st.text(max_size=3)  # fmt: skip
answers = st.lists(pieces | st.sampled_from([f.render(calls_of(1)) for f in DISTINCT]), max_size=12)


@given(st.sampled_from(DISTINCT), answers, st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_chunks_do_not_matter(format, parts, sizes, cut_off):
    answer = "".join(parts)
    chunks, position, size = [], 0, itertools.cycle(sizes)
    while position < len(answer):
        chunks.append(answer[position : (position := position + next(size))])
    assert parse(format, chunks, cut_off) == parse(format, [answer], cut_off)


@given(st.sampled_from(DISTINCT), st.text(st.sampled_from('<>[]{}`tol_ca\n "nme:TOLCAS|'), max_size=40))
def test_text_without_a_call_stays_as_it_is(format, text):
    """Also what looks like the beginning of markup."""
    answer, calls = parse(format, text)
    assert calls or answer == text


@pytest.mark.parametrize("format", DISTINCT, ids=lambda format: format.prefix)
def test_an_answer_that_is_cut_off(format):
    """At every character: a part of the text, of the calls, and no markup."""
    answer, text, calls = rendered(format, 3, "See: ")
    lengths = []
    for end in range(len(answer)):
        cut_text, cut_calls = parse(format, [answer[:end]], cut_off=True)
        assert text.startswith(cut_text.rstrip())
        for (name, arguments), (whole_name, whole) in zip(cut_calls, calls, strict=False):
            assert name == whole_name and whole.startswith(arguments)
        lengths.append(sum(len(arguments) for _, arguments in cut_calls))
    assert lengths == sorted(lengths) and lengths[-1] >= sum(len(arguments) for _, arguments in calls) - 1


def test_what_only_looks_like_markup_is_text():
    for text in ("a <tool_call", "<tool_call> is a tag", '<tool_call>\n{"name": 5}', '<tool_call>\n{"name": "a"', "<"):
        assert parse(JSON_FORMAT, text) == (text, [])
    assert parse(JSON_FORMAT, "a <tool_call", cut_off=True) == ("a", [])
    assert parse(JSON_FORMAT, "a \n", cut_off=True) == ("a \n", [])


def test_white_space_in_markup_does_not_matter():
    compact = '<tool_call>{"name":"get","arguments":\n{"a": 1} }  </tool_call>\n<tool_call>{"name":"b","arguments":{}}'
    assert parse(JSON_FORMAT, compact) == ("", [["get", '{"a": 1}'], ["b", "{}"]])


def test_text_after_calls():
    answer = JSON_FORMAT.render(calls_of(1)) + "\n\nDone.\n" + JSON_FORMAT.render(calls_of(1)) + "\n"
    text, calls = parse(JSON_FORMAT, answer)
    assert text == "\n\nDone." and [name for name, _ in calls] == ["get_weather"] * 2


def test_json_is_a_call_only_where_an_answer_begins():
    call = FORMATS["llama3"].render(calls_of(1))
    assert parse(FORMATS["llama3"], call)[1] == parse(FORMATS["llama3"], f"\n<|python_tag|>{call}")[1] != []
    for text in (f"Like {call}", '{"name": "Bob", "age": 5}', "<|python_tag|>print(1)"):
        assert parse(FORMATS["llama3"], text) == (text, [])


def test_a_format_of_one_call():
    assert ToolFormat("<call>", ":", "</call>", None).render(calls_of(2)).count("</call><call>") == 1


TAGGED = [FORMATS[family] for family in ("qwen3.5", "glm4.5", "glm4.7", "minimax-m2")]
PARAMETERS = {
    "properties": {
        "text": {"$ref": "#/$defs/text"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "choice": {"enum": ["1", "2"]},
    },
    "$defs": {"text": {"type": "string"}},
}
TYPED = [Tool("f", parameters=PARAMETERS)]


@pytest.mark.parametrize("format", TAGGED, ids=lambda format: format.prefix)
def test_the_schema_says_what_is_text(format):
    text = '5 "\\\n </arg_valu\n\n'
    values = {"text": text, "number": 5, "flag": True, "list": [{"a": "</x>"}], "optional": None, "choice": "1"}
    values["more"] = {"ü": 1.5}
    answer = format.render([ToolCall("", "f", json.dumps(values))] * 2)
    for size in (1, 7, len(answer)):
        calls = parse(format, [answer[n : n + size] for n in range(0, len(answer), size)], tools=TYPED)[1]
        assert [json.loads(arguments) for _, arguments in calls] == [values, values]
    assert json.loads(parse(format, answer)[1][0][1])["choice"] == 1


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("optional", "5", '"5"'),
        ("optional", "null", "null"),
        ("optional", '"a"', '"\\"a\\""'),
        ("number", "many", '"many"'),
        ("number", "1e999", "1e999"),
        ("number", "", '""'),
        ("flag", "True", "true"),
        ("list", "[1,", '"[1,"'),
        ("list", "[1,  NaN]", '"[1,  NaN]"'),
        ("more", " [1,  2]", "[1,  2]"),
        ("text", "", '""'),
    ],
)
def test_values_of_other_types(key, text, expected):
    answer = FORMATS["qwen3.5"].render([ToolCall("", "f", json.dumps({key: text}))])
    assert parse(FORMATS["qwen3.5"], answer, tools=TYPED)[1] == [["f", f'{{"{key}": {expected}}}']]


def test_text_is_passed_on_as_it_comes():
    parser = ToolCallParser(FORMATS["qwen3.5"], TYPED)
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    for text, decided in (('say "', 'say \\"'), ("a\n", "a"), ("\n</para", "\\n"), ("m", ""), ("x\n", "\\n</paramx")):
        assert "".join(event.text for event in parser.push(text)) == decided


OBJECTS = [FORMATS[family] for family in ("gemma4", "functiongemma", "lfm2", "lfm2.5")]
texts = st.text(st.sampled_from("ab1 \"'\\\n:=,{}[]()<|é"), max_size=8)
keys = st.from_regex(r"[a-z_]{1,4}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-9, 9, width=16) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
)


@given(st.sampled_from(OBJECTS), st.dictionaries(keys, values, max_size=3), st.integers(1, 9))
def test_objects_that_are_not_json(format, arguments, size):
    answer = format.render([ToolCall("", "f", json.dumps(arguments))])
    text, calls = parse(format, [answer[n : n + size] for n in range(0, len(answer), size)])
    assert text == "" and calls == [["f", json.dumps(arguments, ensure_ascii=False)]]


def test_objects_as_mlx_lm_parses_them():
    arguments = {"a": 'say "{b:1}"\n', "n": -1.5, "list": [True, None, {"b": "x, y", "c": {}}]}
    call = ToolCall("", "f", json.dumps(arguments))
    for format, parser in (("gemma4", gemma4), ("lfm2", pythonic), ("lfm2.5", pythonic)):
        answer = FORMATS[format].render([call, call])
        if format == "lfm2.5":  # single quotes are for strings that aren't within others
            assert "a='say" in answer
        assert parser.parse_tool_call(answer) == [{"name": "f", "arguments": arguments}] * 2
        assert [json.loads(text) for _, text in parse(FORMATS[format], [answer])[1]] == [arguments] * 2


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("a='it's', b='dogs\\' \"tails\"'", {"a": "it's", "b": 'dogs\' "tails"'}),
        ("a = 'C:\\temp\\d\\\\', b=\"\\u00e9\\/\\t\"", {"a": "C:\temp\\d\\", "b": "é/\t"}),
        ("a={'b': [True, false, None], 1: 'x'}, c=[ ]", {"a": {"b": [True, False, None], "1": "x"}, "c": []}),
    ],
)
def test_arguments_in_python(written, expected):
    answer = f"<|tool_call_start|>[f({written})]<|tool_call_end|>"
    for chunks in ([answer], answer):
        assert [json.loads(text) for _, text in parse(FORMATS["lfm2"], chunks)[1]] == [expected]

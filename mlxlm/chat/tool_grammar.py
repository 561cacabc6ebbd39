"""The grammar of an answer with reasoning: text, JSON of a schema, or calls with arguments as their functions want."""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxlm.chat.chat_encoder import ChatEncoder
from mlxlm.chat.messages import Tool
from mlxlm.chat.reasoning import HARMONY, THINK, ReasoningTags
from mlxlm.chat.tool_call_parser import STRING, value_types
from mlxlm.chat.tool_calls import PYTHON_TAG, ArgumentFormat, ObjectFormat, ToolFormat, argument_text
from mlxlm.generation import GenerationOptions
from mlxlm.generation.constraint import check_llguidance_schema
from mlxlm.generation.json_schema import resolve_reference, to_llguidance_schema
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

_NEXT_MESSAGE = "<|end|><|start|>assistant"  # in the harmony format
MAX_CALLS = 16  # in one answer: small models tend to repeat calls until they are stopped
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties"}
_CHOICE_HINT = '"none", "auto", "required", or {"type": "function", "function": {"name": NAME}}'


def excludes_reasoning(options: GenerationOptions) -> bool:
    """Whether a constraint is for all of an answer. JSON of a schema may follow reasoning, and calls may replace it."""
    return options.constraint not in (None, "json_schema")


def constrain_calls(
    options: GenerationOptions,
    tools: Sequence[Tool],
    encoder: ChatEncoder,
    tokenizer: Tokenizer,
    generation_prefix: str,
    *,
    tool_choice: Any = "auto",
    parallel_tool_calls: bool = True,
) -> GenerationOptions:
    """Return options with the grammar of an answer that may call tools, or that reasons before JSON of a schema.

    Args:
        options: The options. A JSON schema is the only constraint that can be combined with tools.
        tools: The functions.
        encoder: Encodes the conversation.
        tokenizer: The model's tokenizer.
        generation_prefix: What the template has put at the start of the answer.
        tool_choice: See `tool_grammar`.
        parallel_tool_calls: See `tool_grammar`.

    Raises:
        GenerationError: For another constraint, and as `tool_grammar`.
    """
    if excludes_reasoning(options):
        if tools:
            raise GenerationError(f"{options.constraint} and tools", "one of them")
        return options
    grammar = tool_grammar(
        encoder.tool_format,
        tools,
        tokenizer,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        json_schema=json.loads(options.json_schema) if isinstance(options.json_schema, str) else None,
        reasoning=generation_prefix if encoder.may_reason else None,
        tags=encoder.reasoning_tags,
    )
    return options if grammar is None else replace(options, json_schema=None, grammar=grammar)


def tool_grammar(
    format: ToolFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    tool_choice: Any = "auto",
    parallel_tool_calls: bool = True,
    json_schema: Mapping[str, Any] | bool | None = None,
    reasoning: str | None = None,
    tags: ReasoningTags = THINK,
) -> str | None:
    """Return a Lark grammar for `GenerationOptions.grammar`.

    Args:
        format: How the model writes calls.
        tools: The functions.
        tokenizer: The model's tokenizer, for the special tokens in the markup.
        tool_choice: "auto": text, calls, or text and then calls. "required": calls. {"type": "function", "function":
            {"name": NAME}}: one call of this function. "none": text, in which no call can begin.
        parallel_tool_calls: Whether there may be several calls, at most `MAX_CALLS`.
        json_schema: What the answer must match if it isn't calls.
        reasoning: What the prompt ends with if it opens a <think> block, as in `ChatTemplate.generation_prefix_of`;
            "" if the model may open one itself; None if there is none.
        tags: The markup of reasoning.

    Returns:
        None if nothing has to be constrained, or a `json_schema` alone.

    Raises:
        GenerationError: For an invalid `tool_choice`, and for parameters that can't be enforced: with `strict`, all
            keywords count; without, those that a grammar can't express are ignored.
    """
    allowed = _allowed_tools(tools, tool_choice)
    if not tools and json_schema is None or not allowed and json_schema is not None and reasoning is None:
        return None
    kind = _HarmonyGrammar if tags is HARMONY else _Grammar
    grammar = kind(format, tokenizer.special_tokens, reasoning, tags, or_json=json_schema is not None)
    if allowed:
        named = tool_choice not in ("auto", "required")
        grammar.add_calls(allowed, several=parallel_tool_calls and not named and format.separator is not None)
    if not allowed:
        answer = grammar.text() if json_schema is None else grammar.json(json_schema)
    elif tool_choice != "auto":
        answer = grammar.calls()
    elif json_schema is None:
        answer = f"{grammar.text()} | {grammar.text_and_calls()}"
    else:
        answer = f"{grammar.json(json_schema)} | {grammar.calls()}"
    return grammar.lark(answer)


def _allowed_tools(tools: Sequence[Tool], tool_choice: Any) -> Sequence[Tool]:
    if tool_choice == "none":
        return ()
    if tool_choice in ("auto", "required"):
        if tool_choice == "required" and not tools:
            raise GenerationError('tool_choice is "required", and there are no tools', '"auto", or tools')
        return tools
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is None:
        raise GenerationError(f"tool_choice is {tool_choice!r}"[:100], _CHOICE_HINT)
    if not (named := [tool for tool in tools if tool.name == name]):
        hint = "one of " + ", ".join(tool.name for tool in tools) if tools else '"auto", or tools'
        raise GenerationError(f"tool_choice names {name!r}, which is not one of the tools"[:100], hint)
    return named


class _Grammar:
    """The rules of a Lark grammar.

    The lexer takes the longest match and never goes back. So text must not match what begins a call or reasoning, and
    calls in plain JSON have the same lexemes as JSON of a schema (`or_json`), each string being one.
    """

    def __init__(
        self,
        format: ToolFormat,
        special: Mapping[str, int],
        reasoning: str | None,
        tags: ReasoningTags,
        or_json: bool,
    ):
        self._format, self._special, self._reasoning, self._tags = format, special, reasoning, tags
        self._json_lexemes = or_json and not format.follows_text
        # The quotation mark at the end of the markup belongs to the string of the name.
        self._quote = '"' if self._json_lexemes and format.prefix.endswith('"') else ""
        self._special_pattern = re.compile("|".join(sorted(map(re.escape, special), key=len, reverse=True)) or "(?!)")
        self.rules: dict[str, str] = {"ANY": "/(?s:.*)/"}

    def lark(self, answer: str) -> str:
        """Return the grammar of an answer, with its reasoning."""
        self.rules["answer"] = answer
        reasoning = "" if self._reasoning is None else self._reasoning_rule()
        return "\n".join([f"start: {reasoning} answer", *(f"{name}: {rule}" for name, rule in self.rules.items())])

    def text(self) -> str:
        """Return the name of a terminal: text in which no call begins."""
        trigger = self._format.trigger
        if not self._format.follows_text:
            excluded = [rf"\s*{_escape(trigger)}(?s:.*)"]
        elif self._special_pattern.match(trigger):
            excluded = []  # no text matches special tokens
        else:
            excluded = [f"(?s:.*){_escape(trigger)}(?s:.*)"]
        self.rules["TEXT"] = self._excluding("(?s:.*)", excluded)
        return "TEXT"

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """Return the name of a rule: JSON of a schema."""
        converted = to_llguidance_schema(dict(schema) if isinstance(schema, Mapping) else schema)
        check_llguidance_schema(converted)
        self.rules["json"] = f"%json {json.dumps(converted, ensure_ascii=False)}"
        return f"{self._space()} json"

    def calls(self) -> str:
        """Return an expression: calls without text before them."""
        return (
            f"{self._space()} {self._python_tag()} {self.literal(self._format.prefix.removesuffix(self._quote))} calls"
        )

    def text_and_calls(self) -> str:
        """Return an expression: calls, after text if the format allows it."""
        trigger, rest = self._format.trigger, self.literal(self._format.prefix[len(self._format.trigger) :])
        if not self._format.follows_text:
            self.rules["PREFIX"] = rf"/\s*{_escape(trigger)}/"
            return f"{self._python_tag()} PREFIX calls"
        if self._special_pattern.match(trigger):
            return f"TEXT? {self.literal(trigger)} {rest} calls"
        self.rules["lead[lazy]"] = "LEAD"
        self.rules["LEAD"] = self._excluding(f"(?s:.*){_escape(trigger)}", [])
        return f"lead {rest} calls"

    def add_calls(self, tools: Sequence[Tool], several: bool) -> None:
        """Add the rule `calls`: what follows the prefix."""
        for number, tool in enumerate(tools):
            self.rules[f"call_{number}"] = f"{self._before_arguments(tool)} arguments_{number}"
            schema = _arguments_schema(tool)
            match self._format.arguments:
                case None:
                    self.rules[f"arguments_{number}"] = f"%json {json.dumps(schema, ensure_ascii=False)}"
                case ArgumentFormat() as format:
                    self._add_tagged(f"arguments_{number}", schema, tool, format)
                case ObjectFormat() as format:
                    _ObjectRules(self, format, tool, schema, f"arguments_{number}").add()
        self.rules["call"] = " | ".join(f"call_{number}" for number in range(len(tools)))
        suffix = self._pieces(self._format.suffix)
        separator = self._pieces((self._format.separator or "").removesuffix(self._quote))
        # What both begin with comes first, so that they differ in their first lexeme.
        common = len(os.path.commonprefix([suffix, separator])) if several else len(suffix)
        one = f"call {self.literal(''.join(suffix[:common]))}"
        more = f"({self.literal(''.join(separator[common:]))} {one}){{0,{MAX_CALLS - 1}}}" if several else ""
        self.rules["calls"] = f"{one} {more} {self.literal(''.join(suffix[common:]))}"

    def _add_tagged(self, name: str, schema: Mapping[str, Any], tool: Tool, format: ArgumentFormat) -> None:
        """Add a rule for arguments with tags, in the order of the schema, as llguidance has them in JSON."""
        arguments, required, prefix = [], schema.get("required", ()), self.literal(format.prefix)
        for number, (key, value) in enumerate(schema.get("properties", {}).items()):
            rule = f"{name}_{number}"
            value = self._tagged_value(f"{rule}_value", resolve_reference(schema, value), schema, tool, format.suffix)
            self.rules[rule] = f"{prefix} {self.literal(key + format.between)} ({value})"
            arguments.append(rule if key in required else f"{rule}?")
        if schema.get("additionalProperties") is not False:
            if tool.strict:
                problem = "arguments that aren't in \"properties\" can't be checked in the calls of this model"
                raise _parameters_error(tool, problem, '"additionalProperties": false')
            value = self.text_before(f"{name}_more", format.suffix)
            arguments.append(f"({prefix} /[\\w.-]+/ {self.literal(format.between)} {value})*")
        self.rules[name] = " ".join(arguments) or '""'

    def _tagged_value(self, name: str, value: Any, schema: Mapping[str, Any], tool: Tool, suffix: str) -> str:
        """Return an expression: the value of an argument and the text after it."""
        value = value if isinstance(value, Mapping) else {}
        if "enum" in value or "const" in value:
            texts = map(argument_text, value.get("enum", [value.get("const")]))
            return " | ".join(self.literal(text + suffix) for text in texts)
        root = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
        rule = json.dumps({**value, **root}, ensure_ascii=False)
        refers_out = re.search('"#("|/properties/)', rule)  # to what isn't part of the rule, as by zod-to-json-schema
        if (types := value_types(schema, value)) and not types & STRING and not refers_out:
            self.rules[name] = f"%json {rule}"
            return f"{name} {self.literal(suffix)}"
        _check_enforced(tool, value, {"pattern", "format"})
        return self.text_before(name, suffix, value.get("minLength", 0), value.get("maxLength"))

    def text_before(self, name: str, suffix: str, min_length: int = 0, max_length: int | None = None) -> str:
        """Return an expression: text, which ends where `suffix` first occurs, and the suffix."""
        special = self._special_pattern.search(suffix)
        tag = suffix[: special.start() if special else None].strip()
        max_text = "" if max_length is None else max(min_length, max_length, 1)
        if special and not tag:
            text = f"/(?s:.{{{max(1, min_length)},{max_text}}})/" + "?" * (not min_length)
            return f"{text} {self.literal(suffix[special.start() :])}"
        space, _, rest = suffix.partition(tag)
        optional = f"({_escape(space)})?" if space else ""
        self.rules[f"{name}[lazy]"] = f"/(?s:.{{{min_length},{max_text}}}){optional}{_escape(tag)}/"
        return f"{name} {self.literal(rest)}"

    def _before_arguments(self, tool: Tool) -> str:
        before, *behind = re.split(r"\d+", self._format.between)
        return " /[0-9]{1,4}/ ".join(map(self.literal, [self._quote + tool.name + before, *behind]))

    def _reasoning_rule(self) -> str:
        tags = self._tags
        if tags.close in self._special:
            self.rules["thought"] = f"ANY? {self.literal(tags.close)}"
        else:
            self.rules["thought[lazy]"] = f"/(?s:.*){_escape(tags.close)}/"
        if self._reasoning:
            return "thought"
        self.rules["OPEN"] = rf"/\s*{_escape(tags.open)}/"
        is_text = self._special_pattern.search(tags.open) is None
        return f"({'OPEN' if is_text else self.literal(tags.open)} thought)?"

    def _excluding(self, pattern: str, excluded: Sequence[str]) -> str:
        if self._reasoning is not None and self._special_pattern.search(self._tags.open) is None:
            excluded = [*excluded, rf"\s*{_escape(self._tags.open)}(?s:.*)"]
        return " & ".join([f"/{pattern}/", *(f"~/{other}/" for other in excluded)])

    def _space(self) -> str:
        """Return optional white space, as it follows reasoning."""
        if self._reasoning is None:
            return ""
        self.rules["SPACE"] = r"/\s{1,4}/"
        return "SPACE?"

    def _python_tag(self) -> str:
        tagged = not self._format.follows_text and PYTHON_TAG in self._special
        return f"{self.literal(PYTHON_TAG)}?" if tagged else ""

    def literal(self, text: str) -> str:
        """Return an expression that matches a text, in which special tokens are these tokens."""
        strings = r'|"[^"]*"|[,:] ?' if self._json_lexemes else ""
        parts = re.split(f"({self._special_pattern.pattern}{strings})", text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part, ensure_ascii=False)
            for part in filter(None, parts)
        )

    def _pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and characters."""
        return re.findall(f"{self._special_pattern.pattern}|(?s:.)", text)


class _ObjectRules:
    """The rules of arguments in an `ObjectFormat`, with the members of objects in the order of the schema."""

    def __init__(self, grammar: _Grammar, format: ObjectFormat, tool: Tool, schema: Mapping[str, Any], name: str):
        self._grammar, self._format, self._tool, self._root, self._name = grammar, format, tool, schema, name
        self._names: dict[int, str] = {}  # of the rules of schemas within the root, by the id of the schema
        self._separator, self._colon = ("/,[ ]?/", "/:[ ]?/") if format.is_python else ('","', '":"')

    def add(self) -> None:
        """Add the rules, of which the first has the name that was given."""
        self._grammar.rules[self._name] = self._object(self._name, self._root, is_nested=False)

    def _value(self, schema: Any) -> str:
        """Return the name of the rule of a value."""
        schema = resolve_reference(self._root, schema)
        if (name := self._names.get(id(schema))) is None:
            name = self._names[id(schema)] = f"{self._name}_{len(self._names)}"
            alternatives = self._alternatives(name, schema if isinstance(schema, Mapping) else {})
            self._grammar.rules[name] = " | ".join(alternatives)
        return name

    def _alternatives(self, name: str, schema: Mapping[str, Any]) -> Iterator[str]:
        _check_enforced(self._tool, schema, {"allOf", "format", "pattern", "prefixItems"})
        choices = schema.get("anyOf", schema.get("oneOf"))
        if "enum" in schema or "const" in schema:
            for value in schema.get("enum", [schema.get("const")]):
                yield from map(self._grammar.literal, self._texts(value))
        elif choices and "type" not in schema:
            yield from map(self._value, choices)
        else:
            _check_enforced(self._tool, schema, {"anyOf", "oneOf"})
            types = value_types(self._root, schema) or {*STRING, "number", "boolean", "null", "array", "object"}
            for kind in sorted(types):
                yield self._typed(f"{name}_{kind}", kind, schema)

    def _typed(self, name: str, kind: str, schema: Mapping[str, Any]) -> str:
        """Return an expression: a value of one type."""
        match kind:
            case "object":
                return self._object(name, schema)
            case "array":
                least, most = schema.get("minItems", 0), schema.get("maxItems")
                if most == 0:
                    return '"[" "]"'
                item, more = self._value(schema.get("items", True)), "" if most is None else most - 1
                items = f"{item} ({self._separator} {item}){{{max(0, least - 1)},{more}}}"
                return f'"[" ({items}){"" if least else "?"} "]"'
            case "string":
                return self._string(name, schema.get("minLength", 0), schema.get("maxLength"))
            case "boolean":
                return '"true" | "True" | "false" | "False"'
            case "null":
                return '"null" | "None"'
        limits = {key: schema[key] for key in _NUMBER_KEYWORDS if key in schema}
        self._grammar.rules[name] = f"%json {json.dumps({'type': kind, **limits})}"
        return name

    def _string(self, name: str, least: int = 0, most: int | None = None) -> str:
        if not self._format.is_python:
            quote = self._format.quote
            return f"{self._grammar.literal(quote)} {self._grammar.text_before(name, quote, least, most)}"
        count = f"{{{least},{'' if most is None else max(least, most)}}}"
        double, single = (rf"""[^{quote}\\\x00-\x1F]|\\["'\\bfnrt]""" for quote in "\"'")
        if not least and most is None:  # some templates don't escape an apostrophe
            single += r"|'[^'\\,:\])}\s\x00-\x1F]"
        return f"""/"({double}){count}"/ | /'({single}){count}'/"""

    def _texts(self, value: Any) -> Iterable[str]:
        """Return how a value can be written."""
        if not self._format.is_python:
            return [self._format.render_value(value)]
        texts = [replace(self._format, quote=quote).render_value(value) for quote in "\"'"]
        return dict.fromkeys([*texts, json.dumps(value, ensure_ascii=False)])

    def _object(self, name: str, schema: Mapping[str, Any], is_nested: bool = True) -> str:
        """Return an expression: an object, or the arguments themselves."""
        _check_enforced(self._tool, schema, {"maxProperties", "minProperties", "patternProperties"})
        is_quoted = is_nested and self._format.is_python
        literal, separator = self._grammar.literal, self._separator
        colon = self._colon if is_nested else literal(self._format.between)
        required, additional = schema.get("required", ()), schema.get("additionalProperties", True)
        properties = schema.get("properties", {})
        properties = properties | {key: additional for key in required if key not in properties}
        rest, beginnings = "", [""]
        if additional is not False:
            key = self._string(name) if is_quoted else r"/[\w.-]+/"
            self._grammar.rules[f"{name}_more"] = f"({key}) {colon} {self._value(additional)}"
            rest = f"({separator} {name}_more)*"
            beginnings.append(f"{name}_more {rest}")
        for number, (key, value) in reversed(list(enumerate(properties.items()))):
            keys = " | ".join(map(literal, self._texts(key))) if is_quoted else literal(key)
            member, after = f"{name}_{number}_member", f"{name}_{number}_rest"
            self._grammar.rules[member] = f"({keys}) {colon} {self._value(value)}"
            self._grammar.rules[after] = rest or '""'
            is_required = key in required
            beginnings = [f"{member} {after}", *([] if is_required else beginnings)]
            rest = f"({separator} {member}){'' if is_required else '?'} {after}"
        opening, closing = ("{", "}") if is_nested else (self._format.open, self._format.close)
        return f"{literal(opening)} ({' | '.join(beginnings)}) {literal(closing)}"


_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class _HarmonyGrammar(_Grammar):
    """The rules for the harmony format, whose markup has special tokens, which no text matches.

    An answer is any number of messages of the channels analysis and commentary, and then a final one or a call. If the
    prompt ends inside a final message (`reasoning` is not empty), that is completed first.
    """

    def lark(self, answer: str) -> str:
        head = f'{self.literal("<|channel|>")} ("analysis" | "commentary") {self.literal("<|message|>")}'
        self.rules["before"] = f"{head} ANY? {self.literal(_NEXT_MESSAGE)}"
        self.rules["content_type"] = f'" "? {self.literal("<|constrain|>json")} | " json"'
        self.rules["answer"] = answer
        return "\n".join(["start: answer", *(f"{name}: {rule}" for name, rule in self.rules.items())])

    def text(self) -> str:
        return f"{self._final('')} ANY?"

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        super().json(schema)
        return f"{self._final('content_type?')} json"

    def calls(self) -> str:
        return f"ANY? {self.literal(_NEXT_MESSAGE)} before* call" if self._reasoning else "before* call"

    def text_and_calls(self) -> str:
        return self.calls()

    def _final(self, content_type: str) -> str:
        channel, message = self.literal("<|channel|>final"), self.literal("<|message|>")
        return "" if self._reasoning else f"before* {channel} {content_type} {message}"

    def _before_arguments(self, tool: Tool) -> str:
        channel, recipient = "<|channel|>commentary", f" to=functions.{tool.name}"
        heads = self.literal(channel + recipient), self.literal(recipient + channel)
        return f"({' | '.join(heads)}) content_type? {self.literal('<|message|>')}"


def _escape(text: str) -> str:
    """Return a regular expression that matches a text, without characters that end one in a grammar."""
    return "".join(f"\\x{{{ord(character):X}}}" for character in text)


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a function's arguments for llguidance.

    Arguments that the parameters don't name aren't generated, unless the schema says something about them.
    """
    schema = dict(tool.parameters) or {"properties": {}}
    if schema.setdefault("type", "object") != "object":
        raise _parameters_error(tool, f"their type is {schema['type']!r}, not an object", '"type": "object"')
    if not _COMBINING & set(schema) and _lists_all_required(schema):
        schema["additionalProperties"] = False
    try:
        converted = to_llguidance_schema(schema, lenient=not tool.strict)
        check_llguidance_schema(converted)
    except GenerationError as error:
        raise _parameters_error(tool, error.message.removeprefix("json_schema: "), error.hint) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise _parameters_error(tool, str(error), "values of JSON, nested less deeply") from None
    return converted


def _lists_all_required(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _check_enforced(tool: Tool, schema: Mapping[str, Any], ignored: set[str]) -> None:
    """Raise GenerationError if a strict tool has one of the keywords that are ignored."""
    if tool.strict and (keywords := ignored & set(schema)):
        problem = f'"{min(keywords)}" can\'t be enforced in the calls of this model'
        raise _parameters_error(tool, problem, "a schema without it")


def _parameters_error(tool: Tool, problem: str, hint: str | None) -> GenerationError:
    return GenerationError(f"the parameters of the tool {tool.name}: {problem}", hint)

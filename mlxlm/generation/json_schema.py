"""JSON schemas as llguidance takes them: its settings, `oneOf`, and its errors in the words of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from mlxlm.utils.errors import GenerationError

# Between the parts of a JSON text: at most what json.dumps writes. Left free, a model that has learnt to indent can
# fill a context with spaces.
_SEPARATORS = {"item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_BLANKS = 8  # of a separator that a schema sets itself
_COMPARISONS = 100_000  # of parts of alternatives: time is bounded, whatever the schema

_ONE = ("additionalProperties", "items", "additionalItems", "contains", "not")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties")
_MEANT = {"f64": "a number", "positive integer": "a whole number", "array": "a list", "string": "a text"}
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def to_llguidance_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """The schema with llguidance's settings: no whitespace but a space after a comma or a colon.

    A schema can set other separators in "x-guidance", "item_separator" and "key_separator": a comma or a colon with
    at most 8 blanks around it, which are then written as they are.

    `oneOf` becomes `anyOf` where no JSON can match two of its alternatives, since the grammar can't count matches.

    Raises GenerationError for other settings, for alternatives of `oneOf` that may both match, and for False.
    """
    if schema is False:
        raise GenerationError("json_schema: no JSON matches false", "true, for any JSON")
    schema = {} if schema is True else schema
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict) or (unknown := [name for name in own if name not in _SEPARATORS]):
        what = f"sets {json.dumps(unknown[0])}" if isinstance(own, dict) else "is no object"
        raise GenerationError(f'json_schema: its "x-guidance" {what}', "only " + " and ".join(_SEPARATORS))
    separators = {name: _literal(name, own[name]) if name in own else _SEPARATORS[name] for name in _SEPARATORS}
    try:
        _Alternatives(schema).check()
    except RecursionError:
        raise GenerationError("json_schema: it is nested too deeply", "fewer levels") from None
    return {**schema, "x-guidance": {"whitespace_flexible": False, **separators, "coerce_one_of": True}}


def _literal(name: str, separator: Any) -> str:
    mark = _SEPARATORS[name][0]
    if not isinstance(separator, str) or separator.strip(" \t\r\n") != mark or len(separator) > 1 + _BLANKS:
        reason = f"{name} is {json.dumps(separator)}, not {json.dumps(mark)} with at most {_BLANKS} blanks around it"
        raise GenerationError(f"json_schema: {reason}", json.dumps(mark + " "))
    return re.escape(separator)


class _Alternatives:
    """Whether the alternatives of each `oneOf` that a schema reaches exclude each other."""

    def __init__(self, schema: dict[str, Any]):
        self._root = schema
        self._left = _COMPARISONS

    def check(self) -> None:
        """Raise GenerationError for two of which both may match."""
        waiting, seen = [self._root], set()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            one_of = schema.get("oneOf")
            for (i, a), (j, b) in combinations(enumerate(one_of if isinstance(one_of, list) else [], 1), 2):
                if not self._disjoint(a, b, 0):
                    raise GenerationError(
                        f'json_schema: JSON may match both alternatives {i} and {j} of "oneOf", which can\'t be '
                        "ruled out while a text is generated",
                        'alternatives that differ in their type, or in a required property with "const"; or "anyOf"',
                    )
            waiting.extend(_parts(schema))
            waiting.append(self._target(schema))

    def _target(self, schema: dict[str, Any]) -> Any:
        """What a $ref points to within the schema; None for none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None  # "#name" is an anchor
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            elif isinstance(found, dict) and step in found:
                found = found[step]
            else:
                return None
        return found

    def _disjoint(self, a: Any, b: Any, depth: int) -> bool:
        """Whether certainly no JSON matches both."""
        self._left -= 1
        if self._left < 0:
            raise GenerationError('json_schema: the alternatives of "oneOf" take too long to compare', '"anyOf"')
        if depth > 16:
            return False
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            if (target := self._target(one)) is not None and self._disjoint(target, other, depth + 1):
                return True
            if any(self._disjoint(part, other, depth + 1) for part in _list(one, "allOf")):
                return True
            for name in ("anyOf", "oneOf"):
                if (parts := _list(one, name)) and all(self._disjoint(part, other, depth + 1) for part in parts):
                    return True
        values_a, values_b = _values(a), _values(b)
        if values_a is not None and values_b is not None and not values_a & values_b:
            return True
        common = _types(a) & _types(b)
        return not common or (common == {"object"} and self._disjoint_objects(a, b, depth))

    def _disjoint_objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """By a property that both need, with values of its own; or that one needs, and the other doesn't allow."""
        properties_a, properties_b = (_dict(x, "properties") for x in (a, b))
        needed_a, needed_b = ({n for n in _list(x, "required") if isinstance(n, str)} for x in (a, b))
        for needed, other in ((needed_a, b), (needed_b, a)):
            closed = other.get("additionalProperties") is False and not other.get("patternProperties")
            if closed and needed - set(_dict(other, "properties")):
                return True
        both = sorted(needed_a & needed_b & set(properties_a) & set(properties_b))
        return any(self._disjoint(properties_a[name], properties_b[name], depth + 1) for name in both)


def _parts(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas right inside one."""
    yield from (schema.get(name) for name in _ONE)
    for name in _LISTS:
        yield from _list(schema, name)
    for name in _NAMED:
        yield from _dict(schema, name).values()


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    return found if isinstance(found := schema.get(name), list) else []


def _dict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return found if isinstance(found := schema.get(name), dict) else {}


def _given(schema: dict[str, Any]) -> list[Any] | None:
    """What `const` or `enum` lists; None where neither does."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum") if "enum" in schema else None


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values of `const` or `enum`, in a form that is equal for equal JSON: 1.0 is 1."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    given = _given(schema)
    return None if given is None else {json.dumps(plain(value), sort_keys=True) for value in given}


def _types(schema: dict[str, Any]) -> set[str]:
    given = _given(schema)
    if given is not None:
        return {_TYPES.get(type(value), "null") for value in given}
    types = schema.get("type")
    if not isinstance(types, str | list):
        return {*_TYPES.values(), "null"}
    return {"number" if t == "integer" else str(t) for t in ([types] if isinstance(types, str) else types)}


def explain_schema_error(problem: str) -> tuple[str, str] | None:
    """What is wrong with a schema, by llguidance's message, and what would work; None for one that isn't known."""
    for pattern, reason, hint in _EXPLANATIONS:
        if found := re.search(pattern, problem):
            groups = [_MEANT.get(group, group) for group in found.groups()]
            return reason.format(*groups), hint.format(*groups)
    return None


_SATISFIABLE = "a schema that some JSON matches"
_EXPLANATIONS = (
    (r"^Unimplemented keys: \[(.*)\]", "{0} can't be enforced while a text is generated", "a schema without it"),
    (r"^Unsatisfiable schema: schema is false", "a part of it is false, which no JSON matches", _SATISFIABLE),
    (r"^Unsatisfiable schema: \w+ is empty", "no JSON matches it: one of its lists (anyOf, oneOf, enum, type) is empty",
     "at least one entry"),
    (r"^Unsatisfiable schema: (.*)", "no JSON matches it: {0}", _SATISFIABLE),
    (r"^(?:Pointer|Anchor) '(.*)' does not exist", '"$ref" points to {0}, which the schema doesn\'t have',
     '"#/$defs/NAME", with NAME in its "$defs"'),
    (r"^Resource '(?:json-schema:///)?(.*)' is not present in a registry",
     "it refers to {0}, which isn't part of it, and nothing is downloaded", 'what is there, under "$defs"'),
    (r"^Invalid type: (.*)", 'there is no type "{0}"', "string, number, integer, boolean, null, array or object"),
    (r"^Unknown format: (.*)", 'the format "{0}" can\'t be enforced', 'date, time, uuid, email, or "pattern"'),
    (r"^Expected (.*) for '(.*)'(?: item)?, got (.*)", '"{1}" has {2}', "{0}"),
    (r"^schema must be an object or boolean", "a schema inside it is neither an object nor true or false",
     '{{"type": "string"}}'),
    (r"^(\S+) must be ([^,]*)", '"{0}" is not {1}', "{1}"),
    (r"^invalid multiple of", "multipleOf is not above 0", "a number above 0"),
    (r"(?s)\{\d+,\d*\}.*error: decimal literal invalid", "a length in it is too large", "a smaller one"),
    (r"(?ms)^regex parse error:\n    (.*?)\n.*^error: (.*)", "the pattern {0}: {1}", "a regular expression without it"),
    (r"^lookarounds not supported yet; .* in regex /(.*)/$", "the pattern {0}: ^, $ and \\b can't be inside it",
     "^ at its beginning and $ at its end, or none"),
)  # fmt: skip

"""JSON schemas for llguidance: its settings, `oneOf`, and explanations of its errors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from mlxlm.utils.errors import GenerationError

# Whitespace in JSON: at most what json.dumps writes. Without a limit, a model that has learned to indent can fill a
# context with spaces.
_SETTINGS = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?", "coerce_one_of": True}
_MAX_COMPARISONS = 20_000  # of alternatives of oneOf, to bound the time for any schema

_SCHEMA_KEYS = ("additionalProperties", "items", "additionalItems", "contains", "not")
_SCHEMA_LIST_KEYS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_DICT_KEYS = ("properties", "patternProperties")
_LLG_TYPE_NAMES = {"f64": "a number", "positive integer": "a whole number", "array": "a list", "string": "a string"}
_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


def to_llguidance_schema(schema: dict[str, Any] | bool, lenient: bool = False) -> dict[str, Any]:
    """Add llguidance's settings to a schema: no whitespace except a space after a comma or a colon.

    `oneOf` becomes `anyOf` if no JSON can match two of its alternatives, since a grammar can't count matches.

    Args:
        schema: The schema.
        lenient: Ignore what a grammar can't enforce: keywords, formats, alternatives of `oneOf` that may both match.

    Raises:
        GenerationError: For settings of llguidance, for alternatives of `oneOf` that may both match, and for False.
    """
    if schema is False:
        raise GenerationError("json_schema: no JSON matches false", "true, for any JSON")
    schema = {} if schema is True else schema
    if "x-guidance" in schema:
        raise GenerationError('json_schema: "x-guidance" can\'t be set', "a schema without it")
    if lenient:
        return {**schema, "x-guidance": {**_SETTINGS, "lenient": True}}
    try:
        _OneOfCheck(schema).check()
    except RecursionError:
        raise GenerationError("json_schema: it is nested too deeply", "fewer levels") from None
    return {**schema, "x-guidance": _SETTINGS}


class _OneOfCheck:
    """Checks that the alternatives of each reachable `oneOf` exclude each other."""

    def __init__(self, schema: dict[str, Any]):
        self._root = schema
        self._comparisons_left = _MAX_COMPARISONS

    def check(self) -> None:
        """Raise GenerationError for two alternatives that may both match."""
        pending, seen = [self._root], set()
        while pending:
            schema = pending.pop()
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
            pending.extend(_subschemas(schema))
            pending.append(self._resolve_ref(schema))

    def _resolve_ref(self, schema: dict[str, Any]) -> Any:
        """The schema that a $ref points to within the root; None if there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None  # "#name" is an anchor
        target: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            elif isinstance(target, dict) and step in target:
                target = target[step]
            else:
                return None
        return target

    def _disjoint(self, a: Any, b: Any, depth: int) -> bool:
        """Whether it is certain that no JSON matches both schemas."""
        self._comparisons_left -= 1
        if self._comparisons_left < 0:
            raise GenerationError('json_schema: the alternatives of "oneOf" take too long to compare', '"anyOf"')
        if depth > 16:
            return False
        if a is False or b is False:
            return True
        if not isinstance(a, dict) or not isinstance(b, dict):
            return False
        for one, other in ((a, b), (b, a)):
            if (target := self._resolve_ref(one)) is not None and self._disjoint(target, other, depth + 1):
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
        """Whether a property that both require has disjoint values, or one schema requires what the other forbids."""
        properties_a, properties_b = (_dict(x, "properties") for x in (a, b))
        required_a, required_b = ({n for n in _list(x, "required") if isinstance(n, str)} for x in (a, b))
        for required, other in ((required_a, b), (required_b, a)):
            closed = other.get("additionalProperties") is False and not other.get("patternProperties")
            if closed and required - set(_dict(other, "properties")):
                return True
        both = sorted(required_a & required_b & set(properties_a) & set(properties_b))
        return any(self._disjoint(properties_a[name], properties_b[name], depth + 1) for name in both)


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly inside a schema."""
    yield from (schema.get(name) for name in _SCHEMA_KEYS)
    for name in _SCHEMA_LIST_KEYS:
        yield from _list(schema, name)
    for name in _SCHEMA_DICT_KEYS:
        yield from _dict(schema, name).values()


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    return value if isinstance(value := schema.get(name), list) else []


def _dict(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return value if isinstance(value := schema.get(name), dict) else {}


def _listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """The values of `const` or `enum`; None without either."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum") if "enum" in schema else None


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The values of `const` or `enum` as canonical JSON, in which 1.0 is 1; None without either."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    values = _listed_values(schema)
    return None if values is None else {json.dumps(plain(value), sort_keys=True) for value in values}


def _types(schema: dict[str, Any]) -> set[str]:
    values = _listed_values(schema)
    if values is not None:
        return {_JSON_TYPES.get(type(value), "null") for value in values}
    types = schema.get("type")
    if not isinstance(types, str | list):
        return {*_JSON_TYPES.values(), "null"}
    return {"number" if t == "integer" else str(t) for t in ([types] if isinstance(types, str) else types)}


def explain_schema_error(problem: str) -> tuple[str, str] | None:
    """The reason and a hint for an error message of llguidance; None for an unknown one."""
    for pattern, reason, hint in _EXPLANATIONS:
        if match := re.search(pattern, problem):
            groups = [_LLG_TYPE_NAMES.get(group, group) for group in match.groups()]
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

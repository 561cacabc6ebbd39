"""JSON schemas for llguidance: its settings, `oneOf`, and explanations of its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from mlxlm.utils.errors import GenerationError

# Whitespace in JSON: at most what json.dumps writes. Without a limit, a model that has learned to indent can fill a
# context with spaces.
_SETTINGS = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_MAX_EXPANSIONS, _MAX_DEPTH = 1000, 8  # of "$ref" in alternatives of oneOf, to bound the size of any schema

_VALUES = ("const", "enum", "default", "examples")  # keywords with JSON that isn't a schema
_BY_NAME = {"properties", "patternProperties", "$defs", "definitions"}  # keywords with schemas by any name
_LLG_TYPE_NAMES = {"f64": "a number", "positive integer": "a whole number", "array": "a list", "string": "a string"}


def to_llguidance_schema(schema: dict[str, Any] | bool, lenient: bool = False) -> dict[str, Any]:
    """Add llguidance's settings to a schema: no whitespace except a space after a comma or a colon.

    A grammar can't count matches, so that `oneOf` needs alternatives of which no JSON matches two. llguidance checks
    that, but doesn't look behind "$ref": what the alternatives refer to takes its place.

    Args:
        schema: The schema.
        lenient: Ignore what a grammar can't enforce: keywords, formats, alternatives of `oneOf` that may both match.

    Raises:
        GenerationError: For settings of llguidance, and for False.
    """
    if schema is False:
        raise GenerationError("json_schema: no JSON matches false", "true, for any JSON")
    schema = {} if schema is True else schema
    if "x-guidance" in schema:
        raise GenerationError('json_schema: "x-guidance" can\'t be set', "a schema without it")
    if lenient:
        return {**schema, "x-guidance": {**_SETTINGS, "coerce_one_of": True, "lenient": True}}
    try:
        return {**_OneOfExpansion(schema).copy(schema), "x-guidance": _SETTINGS}
    except RecursionError:
        raise GenerationError("json_schema: it is nested too deeply", "fewer levels") from None


class _OneOfExpansion:
    """Replaces "$ref" in alternatives of `oneOf`, a limited number of times."""

    def __init__(self, root: dict[str, Any]):
        self._root, self._left = root, _MAX_EXPANSIONS

    def copy(self, value: Any) -> Any:
        """A copy of a part of the schema."""
        if isinstance(value, list):
            return [self.copy(item) for item in value]
        if not isinstance(value, dict):
            return value
        copied = {name: part if name in _VALUES else self.copy(part) for name, part in value.items()}
        for name in _BY_NAME & value.keys():
            if isinstance(value[name], dict):
                copied[name] = {key: self.copy(part) for key, part in value[name].items()}
        if isinstance(alternatives := value.get("oneOf"), list):
            copied["oneOf"] = [self._expand(alternative) for alternative in alternatives]
        return copied

    def _expand(self, schema: Any, depth: int = 0) -> Any:
        """A schema, or what it refers to, with the parts of its unions and intersections expanded, too."""
        while (
            isinstance(schema, dict)
            and set(schema) - {"title", "description"} == {"$ref"}
            and self._left > 0
            and depth < _MAX_DEPTH
        ):
            self._left, depth = self._left - 1, depth + 1
            if (target := resolve_reference(self._root, schema)) is schema:
                break
            schema = target
        if not isinstance(schema, dict):
            return schema
        unions = {name: schema[name] for name in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(name), list)}
        return schema | {name: [self._expand(part, depth) for part in parts] for name, parts in unions.items()}


def resolve_reference(root: Mapping[str, Any], schema: Any) -> Any:
    """Return what the "$ref" of a schema points to within the root; the schema itself without one or for others.

    "#name" is an anchor.
    """
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return schema
    target: Any = root
    for step in unquote(reference[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
            target = target[int(step)]
        elif isinstance(target, Mapping) and step in target:
            target = target[step]
        else:
            return schema
    return target


def explain_schema_error(problem: str) -> tuple[str, str] | None:
    """The reason and a hint for an error message of llguidance; None for an unknown one."""
    for pattern, reason, hint in _EXPLANATIONS:
        if match := re.search(pattern, problem):
            groups = [_LLG_TYPE_NAMES.get(group, group) for group in match.groups()]
            return reason.format(*groups), hint.format(*groups)
    return None


_SATISFIABLE = "a schema that some JSON matches"
_EXPLANATIONS = (
    (r"^oneOf constraints are not supported",
     'JSON may match several alternatives of "oneOf", which can\'t be ruled out while a text is generated',
     'alternatives that differ in their type, or in a required property with "const"; or "anyOf"'),
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

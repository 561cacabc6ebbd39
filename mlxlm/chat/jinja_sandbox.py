"""A jinja environment for untrusted chat templates: no access to Python, and bounded time and memory.

jinja2's sandbox stops access to Python objects and caps `range()` at 100,000 items. These limits stop the rest:

- CPU time (`MAX_SECONDS`): nested loops and recursive macros.
- A budget of characters and items that one rendering may produce: text and lists that double in a loop, repetition
  (`'a' * 10**9`), nested lists whose text is exponentially long, `replace`, `join`, padding and wide format strings.
  A size is charged before the value is built.
- Integers of 10,000 bits: `10 ** 10 ** 10`.
- An allow-list of string methods, and no filters that take quadratic time or only serve HTML and debugging.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from math import prod
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0  # CPU time of one rendering; 10,000 messages take about one
_BASE_BUDGET = 10_000_000  # characters and items, for any conversation
_BUDGET_PER_CHARACTER = 200  # of the conversation, more
_MAX_INTEGER_BITS = 10_000
_STRING_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper",
))  # fmt: skip
_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template that takes too long or produces too much."""


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with limits. Render its templates with `render`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        # Constant folding would run operations while the template is compiled, before there is a budget.
        super().__init__(optimized=False, finalize=_charge_output, **options)
        self._state = threading.local()
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: self._bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._tojson
        self.tests = {name: self._timed(function) for name, function in self.tests.items()}

    def render(self, template: jinja2.Template, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        """Render a conversation.

        Raises:
            TemplateLimitError: The template takes too long or produces too much.
            Exception: Whatever error the template ends in.
        """
        size = total_size([messages, list(values.values())])
        self._state.budget = self._state.left = _BASE_BUDGET + _BUDGET_PER_CHARACTER * size
        self._state.deadline = time.thread_time() + MAX_SECONDS
        return template.render({**values, "messages": messages})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Operations().visit(super()._parse(source, name, filename))

    def charge(self, size: int = 1) -> None:
        """Take `size` characters or items from the budget, and check the time."""
        state = self._state
        state.left -= size
        if state.left < 0:
            raise TemplateLimitError(f"it makes more than {state.budget} characters or items")
        if time.thread_time() > state.deadline:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} seconds")

    def size(self, value: Any) -> int:
        """`total_size`, counted no further than the budget."""
        return total_size(value, self._state.left)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also exclude the methods of strings and numbers that can grow their input."""
        if isinstance(obj, str):
            return attr in _STRING_METHODS
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge for the result of `+`, `*`, `**` and `%` before it is computed."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            _check_integer_size(operator, left, right)
            self.charge()
        elif operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            self.charge(self.size(repeated) * max(1, count if isinstance(count, int) else 1))
        elif operator == "%" and isinstance(left, str):
            self.charge(_formatted_size(left, (right,)))
        else:
            self.charge(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge for the arguments and the result of a call."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if owner is self:  # one of `_Operations`
            return function(*args)
        if isinstance(owner, str) and name in _GROWING:
            self.charge(_GROWING[name](owner, *args, **kwargs))
        elif callable(getattr(function, "__wrapped__", None)):  # str.format, which jinja wraps
            self.charge(_formatted_size(str(function.__wrapped__.__self__), (args, kwargs)))
        else:
            self.charge(1 + sum(map(self.size, (*args, *kwargs.values()))))
        return self._charged(super().call(context, function, *args, **kwargs))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of the template or of a macro, its constant text included."""
        texts = list(parts)
        self.charge(sum(map(len, texts)))
        return "".join(texts)

    def concatenate(self, *parts: Any) -> str:
        """Evaluate `parts[0] ~ parts[1] ~ ...`."""
        self.charge(sum(map(self.size, parts)))
        return "".join(map(str, parts))

    def literal(self, value: Any) -> Any:
        """Charge for a list, tuple or dict literal, with all that it contains."""
        self.charge(self.size(value))
        return value

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Evaluate `value[start:stop:step]`."""
        return self._charged(value[start:stop:step])

    def _charged(self, result: Any) -> Any:
        """Charge for a result. A generator becomes a list: no value has a size that is unknown."""
        if isinstance(result, Iterator):
            result = [self._charged(item) for item in result]
        self.charge(_length(result))
        return result

    def _timed(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.charge()
            return function(*args, **kwargs)

        return timed

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            values = args[1:] if hasattr(function, "jinja_pass_arg") else args
            if (name in _TO_TEXT or name in _GROWING) and not isinstance(values[0], str):
                self.charge(self.size(values[0]))
            if name in _GROWING:
                self.charge(_GROWING[name](*values, **kwargs))
            return self._charged(function(*args, **kwargs))

        return bounded

    def _tojson(self, value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        """Serialize as transformers does: jinja's own filter escapes <, > and & for HTML."""
        indent = layout.get("indent")
        if indent is not None:
            self.charge(1000 * (len(indent) if isinstance(indent, str) else abs(indent)))  # 1000 levels of nesting
        parts = []
        for part in json.JSONEncoder(ensure_ascii=ensure_ascii, **layout).iterencode(value):
            self.charge(len(part))
            parts.append(part)
        return "".join(parts)


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %}, which marks answers for training masks in transformers. Only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Operations(NodeTransformer):
    """Routes operations that jinja compiles to plain Python through methods of the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.body.insert(0, nodes.ExprStmt(_call("charge"), lineno=node.lineno))
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        parts = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("sliced", node.node, *(part or nodes.Const(None) for part in parts))

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _call("literal", node)  # store: a, b = ...

    visit_Dict = visit_Tuple = visit_List


def _call(method: str, *arguments: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None)


def total_size(value: Any, limit: int = 1 << 40) -> int:
    """Count the characters and items of a value and all it contains, until they are more than `limit`."""
    total, pending = 0, [value]
    while pending and total <= limit:
        one = pending.pop()
        total += 1
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, list | tuple):
            pending += one
        elif isinstance(one, dict):
            pending += one
            pending += one.values()
        elif isinstance(one, Sized):
            total += len(one)
    return total


@jinja2.pass_environment
def _charge_output(environment: BoundedEnvironment, value: Any) -> Any:
    """Charge for `{{ value }}`."""
    if hasattr(environment._state, "left"):  # the compiler finalizes constants, too
        environment.charge(environment.size(value))
    return value


def _length(value: Any) -> int:
    return 1 + (len(value) if isinstance(value, Sized) else 0)


def _check_integer_size(operator: str, left: float, right: float) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise TemplateLimitError(f"it makes a number of {bits} bits")


def _formatted_size(form: str, values: Any) -> int:
    """Return an upper bound of the length of `form % values` or `form.format(values)`."""
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{|\d{6}", form):
        raise TemplateLimitError("it formats values with a width that is not a small number")
    fields = form.count("%") + form.count("{")
    return len(form) + fields * (total_size(values) + sum(map(int, re.findall(r"\d+", form))))


def _replaced_size(text: Any, old: Any, new: Any, *_count: Any, **_options: Any) -> int:
    return len(str(text)) + str(text).count(str(old)) * len(str(new))


def _joined_size(first: Any, second: Any = "", *_rest: Any, **_options: Any) -> int:
    """Of `separator.join(items)` or `items|join(separator)`."""
    separator, items = (first, second) if isinstance(first, str) and not isinstance(second, str) else (second, first)
    return total_size(items) + _length(items) * len(str(separator))


def _padded_size(value: Any, *options: Any, **named: Any) -> int:
    """Of filters that repeat padding at most as often as `value` is long; their default widths are below 100."""
    sizes = (abs(option) if isinstance(option, int) else total_size(option) for option in (*options, *named.values()))
    return 100 + total_size(value) * prod(1 + size for size in sizes)


def _sum_size(_items: Any, _attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):  # adding lists one by one takes quadratic time
        raise TemplateLimitError("it makes a sum of other values than numbers")
    return 1


# Filters and string methods whose result can be longer than their arguments: an upper bound of its length.
_GROWING: dict[str, Callable[..., int]] = {
    "batch": _padded_size,
    "center": _padded_size,
    "format": lambda form, *values, **named: _formatted_size(str(form), (values, named)),
    "indent": _padded_size,
    "join": _joined_size,
    "replace": _replaced_size,
    "slice": _padded_size,
    "sum": _sum_size,
}
# Filters that convert lists and dicts to text, which may be exponentially longer than they are.
_TO_TEXT = frozenset((
    "capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "striptags", "title", "trim",
    "upper", "urlencode", "wordcount", "xmlattr",
))  # fmt: skip

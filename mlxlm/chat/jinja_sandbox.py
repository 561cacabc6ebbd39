"""A jinja environment for templates that nobody has checked: no access to Python, and bounded work and memory.

Every operation that makes text or goes through values spends steps: about one for each node of the template that runs
and for each character or item that is made or looked through. Where a render has spent its steps it ends in an error.
What would be too large is refused before it is made.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sized, ValuesView
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes

_LEAST_STEPS = 1_000_000  # less than a second of rendering, and a few megabytes
_LARGEST_INTEGER = 10_000  # bits
# Filters and globals for HTML and fillers, whose output can be much longer than their input.
_LEFT_OUT = ("urlize", "wordwrap", "xmlattr", "pprint", "lipsum")
_CONSTANT_TIME = ("length", "count", "first", "last", "default", "d", "attr", "abs", "int", "float", "round", "items")
_COMPARING = (
    "in", "eq", "==", "equalto", "ne", "!=", "gt", ">", "greaterthan", "ge", ">=", "lt", "<", "lessthan", "le", "<=",
    "lower", "upper",
)  # fmt: skip


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template that takes too many steps or makes too much text."""


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox that transformers has, with a limit on steps; its templates are rendered by `render`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any):
        # Folding constants would run a template's operations while it is compiled, where nothing counts them.
        super().__init__(optimized=False, finalize=_counted_output, **options)
        self.code_generator_class = _CodeGenerator
        for name, function in list(self.filters.items()):
            if name not in _CONSTANT_TIME:
                self.filters[name] = self._counted(function, _GROWTH.get(name))
        self.filters["tojson"] = self._tojson
        for name in _COMPARING:
            self.tests[name] = self._counted(self.tests[name])
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.sizes: dict[str, int] = {}  # of each macro, and of the whole template as ""
        self._state = threading.local()

    def render(self, template: jinja2.Template, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        """Raises TemplateLimitError, or whatever error the template ends in."""
        per_message = 2000 + 20 * self.sizes.get("", 0)
        self._state.limit = _LEAST_STEPS + per_message * len(messages) + 200 * sum(map(weight, messages))
        self._state.left = self._state.limit
        return template.render(messages=messages, **values)

    def spend(self, steps: int) -> None:
        if steps > self._state.limit:
            raise TemplateLimitError(f"it makes a value of about {steps} characters or items")
        self._state.left -= steps
        if self._state.left < 0:
            raise TemplateLimitError(f"it takes more than {self._state.limit} steps")

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        self.sizes = {"": _count(source)}
        for macro in source.find_all((nodes.Macro, nodes.CallBlock)):
            name = getattr(macro, "name", "caller")
            self.sizes[name] = max(self.sizes.get(name, 0), _count(macro))
        return super()._generate(source, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int | float) and isinstance(right, int | float):
            _check_integer(operator, left, right)
        elif operator == "*":
            count, repeated = (left, right) if isinstance(left, int) else (right, left)
            size = len(repeated) if isinstance(repeated, Sized) else 1
            self.spend(1 + size * max(0, count if isinstance(count, int) else 1))
        elif operator == "%" and isinstance(left, str):
            self.spend(_formatted(left, left.count("%"), (right,)))
        else:
            self.spend(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(function, jinja2.runtime.Macro):
            self.spend(self.sizes.get(function.name, self.sizes[""]))
        elif isinstance(function, jinja2.runtime.LoopContext):  # a recursive loop goes on with other items
            args = (self.items(args[0], self.sizes[""]), *args[1:]) if args else args
        elif isinstance(owner, str | bytes | int | float | list | tuple | dict):
            looked_through = () if isinstance(owner, dict) else (owner, *args, *kwargs.values())
            self.spend(1 + sum(map(self.weight, looked_through)))
            growth = _GROWTH.get(function.__name__)
            if growth is not None:
                self.spend(growth(owner, *args, **kwargs))
        else:
            self.spend(1)
        return super().call(context, function, *args, **kwargs)

    def items(self, iterable: Any, size: int) -> Any:
        """What a loop whose body has `size` nodes goes through."""
        iterable = self._held(iterable)
        if isinstance(iterable, Sized):
            self.spend(1 + len(iterable) * size)
        return iterable

    def joined(self, *parts: Any) -> str:
        """parts[0] ~ parts[1] ~ ..."""
        self.spend(sum(map(self.weight, parts)))
        return "".join(map(str, parts))

    def sliced(self, value: Any, part: slice) -> Any:
        if isinstance(value, Sized):
            self.spend(1 + len(range(len(value))[part]))
        return value[part]

    def compared(self, value: Any) -> Any:
        """An operand of a comparison."""
        if isinstance(value, str):
            self.spend(1 + len(value) // 64)
        elif value is not None and not isinstance(value, int | float):
            self.spend(self.weight(value))
        return value

    def container(self, value: Any) -> Any:
        """What an operand is looked for in."""
        return value if isinstance(value, Mapping) else self.compared(value)

    def weight(self, value: Any) -> int:
        return weight(value, self._state.left)

    def _counted(self, function: Callable, growth: Callable[..., int] | None = None) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            args = tuple(map(self._held, args))
            self.spend(1 + sum(map(self.weight, (*args, *kwargs.values()))))
            if growth is not None:
                given = args[1:] if hasattr(function, "jinja_pass_arg") else args
                self.spend(growth(*given, **kwargs))
            return function(*args, **kwargs)

        return counted

    def _held(self, value: Any) -> Any:
        """The items of a generator, which could be counted in no other way; other values as they are."""
        return list(islice(value, self._state.limit + 1)) if isinstance(value, Iterator) else value

    def _tojson(self, value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        # jinja's own filter escapes <, > and & for HTML.
        if "indent" in layout:
            self.spend(_extent(layout["indent"]) * 1000)  # a thousand levels, as deep as it goes
        parts = []
        for part in json.JSONEncoder(ensure_ascii=ensure_ascii, **layout).iterencode(value):
            self.spend(len(part))
            parts.append(part)
        return "".join(parts)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Leads what the sandbox leaves to Python through the environment."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:
        size = nodes.Const(_count(node), lineno=node.lineno)
        items = nodes.EnvironmentAttribute("items", lineno=node.lineno)
        node.iter = nodes.Call(items, [node.iter, size], [], None, None, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.joined(")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(", slice(")
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            self.write("None") if part is None else self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:
        self.write("(environment.compared(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Any) -> None:
        operand = "container" if node.op in ("in", "notin") else "compared"
        self.write(f" {jinja2.compiler.operators[node.op]} environment.{operand}(")
        self.visit(node.expr, frame)
        self.write(")")


def weight(value: Any, limit: int = 1 << 40) -> int:
    """Characters and items of a value and of all in it, counted until they are more than `limit`."""
    total, waiting = 0, [value]
    while waiting and total <= limit:
        one = waiting.pop()
        total += 1
        if isinstance(one, str | bytes | range):
            total += len(one)
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, dict):
            waiting += one
            waiting += one.values()
        elif not isinstance(one, int | float) and isinstance(one, AbstractSet | ValuesView):  # an abstract one is slow
            waiting += one
    return total


@jinja2.pass_environment
def _counted_output(environment: BoundedEnvironment, value: Any) -> Any:
    """What `{{ value }}` puts into the text."""
    if hasattr(environment._state, "left"):  # constants are looked at while compiling, too
        environment.spend(environment.weight(value))
    return value


def _count(node: nodes.Node) -> int:
    """Nodes, and characters of text, in a part of a template."""
    text = getattr(node, "data", None) or getattr(node, "value", None)
    return 1 + (len(text) if isinstance(text, str) else 0) + sum(map(_count, node.iter_child_nodes()))


def _length(value: Any) -> int:
    return 1 + (len(value) if isinstance(value, Sized) else 0)


def _check_integer(operator: str, left: float, right: float) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _LARGEST_INTEGER:
            raise TemplateLimitError(f"it makes a number of {bits} bits")


def _extent(size: Any) -> int:
    """Of a width, which is a number of spaces or a text."""
    return abs(size) if isinstance(size, int) else weight(size)


def _formatted(form: str, fields: int, values: Any) -> int:
    """An upper bound of the characters that a format string makes of `values`."""
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{|\d{6}", form):
        raise TemplateLimitError("it formats values with a width that is not a small number")
    return len(form) + fields * (weight(values) + sum(map(int, re.findall(r"\d+", form))))


def _replaced(text: Any, old: Any, new: Any, *_count: Any, **_options: Any) -> int:
    return (len(text) // max(1, len(old)) + 1) * len(new) if isinstance(text, Sized) else 0


# Filters and methods whose results can be longer than what they are given: an upper bound of what they add.
_GROWTH: dict[str, Callable[..., int]] = {
    "center": lambda text, width=80, *fill: _extent(width),
    "ljust": lambda text, width, *fill: _extent(width),
    "rjust": lambda text, width, *fill: _extent(width),
    "zfill": lambda text, width: _extent(width),
    "expandtabs": lambda text, tabsize=8: len(text) * _extent(tabsize),
    "to_bytes": lambda number, length=1, *order, **kind: _extent(length),
    "indent": lambda text, width=4, *more, **kind: (str(text).count("\n") + 1) * _extent(width),
    "replace": _replaced,
    "join": lambda first, second="", *rest, **kind: _length(first) * weight(second),
    "format": lambda form, *values, **named: _formatted(str(form), _fields(form), (*values, *named.values())),
    "format_map": lambda form, values: _formatted(form, _fields(form), (values,)),
    "translate": lambda text, table: len(text) * weight(table),
    "batch": lambda items, linecount, *fill, **kind: _extent(linecount),
    "slice": lambda items, slices, *fill, **kind: _extent(slices),
    "sum": lambda items, attribute=None, start=0: _length(items) * weight(items) if isinstance(start, list) else 0,
}


def _fields(form: Any) -> int:
    return str(form).count("%") + str(form).count("{")

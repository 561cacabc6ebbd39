"""Rewrites Metal to clang's "C++ for OpenCL".

Works on tokens, after the preprocessor. Rewrites conversions to vectors and declarations of threadgroup variables, and
rejects what would have another meaning in OpenCL.
"""

from __future__ import annotations

import itertools
import re

from .fault import Fault

SPACES = {"device", "constant", "threadgroup", "thread"}
_ELEMENTS = ("char", "uchar", "short", "ushort", "int", "uint", "half", "float", "bfloat")
VECTORS = {f"{t}{n}" for t in _ELEMENTS for n in (2, 3, 4)}

# What C++ for OpenCL accepts, and Metal, whose language is a subset of C++14, doesn't. metal_rules.py has the rest.
_REFUSED = {
    **dict.fromkeys(("vertex", "fragment"), "is a Metal keyword"),
    **dict.fromkeys(("asm", "goto", "new", "virtual"), "is not in Metal"),
    **dict.fromkeys(("__global", "__local", "__constant", "__private", "__generic", "__kernel"), "is OpenCL's"),
}
_LONG_LITERAL = re.compile(r"\d.*(?:ll|LL)|(?!0[xX])[\d.]*[.eE].*[lL]$")

_TOKEN = re.compile(
    r"""(?P<line>^\#[^\n]*)|(?P<space>\s+)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<word>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<mark>::|->|&&|\|\||<<=|<<|.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


class Text:
    """The tokens of a source text, with their file and line."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        self.before: list[str] = []  # white space and line markers before each token
        self.locations: list[str] = []
        gap, line, file = "", 1, ""
        for match in _TOKEN.finditer(text):
            token = match.group()
            if match.lastgroup in ("line", "space"):
                gap += token
                if marker := _MARKER.match(token):
                    line, file = int(marker[1]) - 1, marker[2]
            else:
                self.tokens.append(token)
                self.before.append(gap)
                self.locations.append(f"{file}:{line}")
                gap = ""
            line += token.count("\n")
        self.tail = gap

    def __str__(self) -> str:
        return "".join(g + t for g, t in zip(self.before, self.tokens, strict=True)) + self.tail

    def __getitem__(self, i: int) -> str:
        return self.tokens[i] if 0 <= i < len(self.tokens) else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, end: int) -> str:
        """The text of tokens `start` to `end - 1` on one line."""
        return "".join((" " if self.before[k] else "") + self[k] for k in range(start, end))

    def closing(self, i: int) -> int:
        """Index of the bracket that closes the one at `i`, or -1."""
        return self._partner(i, {"(": ")", "[": "]", "{": "}", "<": ">"}, range(i, len(self)))

    def opening(self, i: int) -> int:
        """Index of the bracket that is closed at `i`, or -1."""
        return self._partner(i, {")": "(", "]": "[", "}": "{", ">": "<"}, range(i, -1, -1))

    def _partner(self, i: int, pairs: dict[str, str], way: range) -> int:
        partner, depth = pairs[self[i]], 0
        for k in way:
            if self[k] == self[i]:
                depth += 1
            elif self[k] == partner:
                depth -= 1
                if not depth:
                    return k
            elif self[i] in "<>" and self[k] in (";", "{"):
                break
        return -1


def translate(text: str, function: str) -> str:
    """Return C++ for OpenCL.

    Args:
        text: Preprocessed Metal source.
        function: Name of the kernel function.
    """
    tokens = Text(text)
    _reject_words(tokens)
    _reject_unqualified_auto(tokens)
    _rewrite_threadgroup_variables(tokens, function)
    _rewrite_conversions(tokens, _aliases(tokens))
    return str(tokens)


def _aliases(text: Text) -> set[str]:
    """Names of type aliases and template type parameters, which may be vectors."""
    aliases = set()
    for i, token in enumerate(text.tokens):
        if (token in ("typename", "class") and text[i + 2] in (",", ">", "=")) or (
            token == "using" and text[i + 2] == "="
        ):
            aliases.add(text[i + 1])
        elif token == "typedef":
            end = text.tokens.index(";", i)
            name = end - 1
            while text[name] == "]":
                name = text.opening(name) - 1
            aliases.add(text[name])
    return aliases


def _fail(text: Text, i: int, message: str) -> None:
    raise Fault(f"{text.locations[i]}: {message}")


def _reject_words(text: Text) -> None:
    for i, token in enumerate(text.tokens):
        if token in _REFUSED:
            _fail(text, i, f"'{token}' {_REFUSED[token]}")
        if (token == "long" and text[i + 1] in ("long", "double")) or _LONG_LITERAL.match(token):
            _fail(text, i, f"'{text.part(i, i + 2).strip()}': Metal has no long long and no long double")


def _reject_unqualified_auto(text: Text) -> None:
    """Clang deduces the address space of `auto*`, Metal doesn't. metal_rules.py checks all other pointers."""
    for i, token in enumerate(text.tokens):
        if token == "auto" and text[i + 1] in ("*", "&", "&&"):
            k = i - 1
            while text[k] in ("const", "volatile"):
                k -= 1
            if text[k] not in SPACES:
                _fail(text, i, f"'auto{text[i + 1]} {text[i + 2]}' needs device, constant, threadgroup or thread")


def _rewrite_conversions(text: Text, aliases: set[str]) -> None:
    """Rewrite T(x) and static_cast<T>(x) to hx::make<T>(x) if T may be a vector."""
    may_be_vector = VECTORS | aliases
    for i, token in enumerate(text.tokens):
        if token == "static_cast" and text[i + 1] == "<":
            end = text.closing(i + 1)
            inside = text.tokens[i + 2 : end]
            if not {"*", "&"} & set(inside) and set(inside) & (may_be_vector | {"vec"}):
                text.tokens[i] = "hx::make"
        elif token in may_be_vector and text[i + 1] == "(" and text[i + 2] != "&" and _is_metal(text, i):
            _drop_qualifier(text, i)
            text.tokens[i] = f"hx::make<{token}>"
        elif token in VECTORS and text[i + 2] == "(" and _is_variable(text, i + 1, may_be_vector):
            text.tokens[i + 2] = f" = hx::make<{token}>("
        elif token == "vec" and text[i + 1] == "<" and text[text.closing(i + 1) + 1] == "(" and _is_metal(text, i):
            _drop_qualifier(text, i)
            text.tokens[text.closing(i + 1)] = ">>"
            text.tokens[i] = "hx::make<vec"


def _is_variable(text: Text, i: int, types: set[str]) -> bool:
    """Whether the name at `i`, with a bracket after it, is that of a variable, not of a function."""
    if not text[i].isidentifier() or text[i] == "operator":
        return False
    inside = text.tokens[i + 2 : text.closing(i + 1)]
    declares = any(a.isidentifier() and b.isidentifier() for a, b in itertools.pairwise(inside))
    return bool(inside) and not declares and not (inside[0] in types | set(_ELEMENTS) and inside[1:2] in ([], [","]))


def _is_metal(text: Text, i: int) -> bool:
    """Whether the name at `i` is unqualified or metal::name, and not a member or operator."""
    return text[i - 2] == "metal" if text[i - 1] == "::" else text[i - 1] not in (".", "->", "~", "operator")


def _drop_qualifier(text: Text, i: int) -> None:
    if text[i - 1] == "::":
        text.tokens[i - 2] = text.tokens[i - 1] = ""


def _rewrite_threadgroup_variables(text: Text, function: str) -> None:
    """Rewrite `threadgroup T a[N], b;` in the kernel function to references to memory of the runtime."""
    depth, count = 0, 0
    start = next(i for i, t in enumerate(text.tokens) if t == function and text[i + 1] == "(")
    body = text.closing(start + 1) + 1
    for i in range(len(text)):
        if i >= body:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
        if text[i] == "threadgroup" and (end := _end_of_declaration(text, i)):
            if i < body or not depth:
                _fail(text, i, "threadgroup variables must be declared in the kernel function")
            count = _rewrite_declaration(text, i, end, count)


def _end_of_declaration(text: Text, i: int) -> int:
    """Index of the semicolon if a threadgroup variable is declared at `i`; 0 for a pointer or reference."""
    k = i + 1
    if not text[k].isidentifier():  # no type
        return 0
    while k < len(text) and text[k] not in (";", "*", "&", "&&", ")", "{", "}"):
        if text[k] == "<":
            k = max(text.closing(k), k)
        elif text[k] == "[":
            k = text.closing(k)
        k = _end_of_initializer(text, k) if text[k] == "=" else k + 1
    return k if text[k] == ";" else 0


def _end_of_initializer(text: Text, k: int) -> int:
    """Index of the comma or semicolon that ends the initializer at `k`."""
    while text[k] not in (",", ";"):
        k = text.closing(k) + 1 if text[k] in ("(", "{", "[") else k + 1
    return k


def _rewrite_declaration(text: Text, start: int, end: int, count: int) -> int:
    k = start + 1  # the type: words up to the one that is followed by [ , or ;
    while text[k + 1] not in ("[", ",", ";", "="):
        k = text.closing(k + 1) if text[k + 1] == "<" else k + 1
    type_name = text.part(start + 1, k).strip()
    declarations = []
    while k < end:
        name, extents = text[k], ""
        k += 1
        while text[k] == "[":
            close = text.closing(k)
            extents += text.part(k, close + 1)
            k = close + 1
        if text[k] == "=":  # ignored: the memory counts as uninitialized
            k = _end_of_initializer(text, k)
        array = f"hx_array_{count}"
        declarations.append(
            f"typedef {type_name} {array}{extents}; __local {array}& {name} = *(__local {array}*)"
            f'hx::hx_threadgroup_memory({count}, "{name}", sizeof({array}), '
            f"hx::unit<{type_name}>);"
        )
        count += 1
        k += 1
    for i in range(start, end):
        text.before[i] = "\n" * text.before[i].count("\n") if i > start else text.before[i]
        text.tokens[i] = ""
    text.tokens[start] = " ".join(declarations)
    text.tokens[end] = ""
    return count

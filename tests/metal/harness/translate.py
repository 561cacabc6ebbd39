"""From Metal to clang's "C++ for OpenCL": the few constructs that differ, and the rules that clang doesn't know.

Works on the tokens of the text after the preprocessor (so macros can't hide anything). Types are told from values
by collecting the names that the text declares as types.
"""

from __future__ import annotations

import re

from .fault import Fault

SPACES = {"device", "constant", "threadgroup", "thread"}
_ELEMENTS = ("char", "uchar", "short", "ushort", "int", "uint", "half", "float", "bfloat")
VECTORS = {f"{t}{n}" for t in _ELEMENTS for n in (2, 3, 4)} | {"long2", "ulong2"}
SCALARS = {*_ELEMENTS, "bfloat16_t", "float16_t", "bool", "long", "ulong", "void", "auto", "unsigned", "signed"}
SCALARS |= {"size_t", "ptrdiff_t", *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64))}
LIBRARY = {"vec", "simdgroup_matrix", "simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8"}

_TOKEN = re.compile(
    r"""(?P<line>^\#[^\n]*)|(?P<space>\s+)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<word>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<mark>::|->|&&|\|\||<<=|<<|.)""",
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')


class Text:
    """The tokens of a text without white space, with the place of each."""

    def __init__(self, text: str):
        self.tokens: list[str] = []
        self.before: list[str] = []  # white space and line markers before each token
        self.places: list[str] = []
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
                self.places.append(f"{file}:{line}")
                gap = ""
            line += token.count("\n")
        self.tail = gap

    def __str__(self) -> str:
        return "".join(g + t for g, t in zip(self.before, self.tokens, strict=True)) + self.tail

    def __getitem__(self, i: int) -> str:
        return self.tokens[i] if 0 <= i < len(self.tokens) else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def closing(self, i: int) -> int:
        """The index of the bracket that closes the one at `i`; of < only where template arguments are plain."""
        pairs = {"(": ")", "[": "]", "{": "}", "<": ">"}
        close, depth = pairs[self[i]], 0
        for k in range(i, len(self)):
            if self[k] == self[i]:
                depth += 1
            elif self[k] == close:
                depth -= 1
                if not depth:
                    return k
            elif self[i] == "<" and self[k] in (";", "{"):
                break
        return -1

    def opening(self, i: int) -> int:
        """The index of the bracket that is closed at `i`."""
        pairs = {")": "(", "]": "[", "}": "{", ">": "<"}
        depth = 0
        for k in range(i, -1, -1):
            if self[k] == self[i]:
                depth += 1
            elif self[k] == pairs[self[i]]:
                depth -= 1
                if not depth:
                    return k
            elif self[i] == ">" and self[k] in (";", "{"):
                break
        return -1


def translate(text: str, body_marker: str) -> str:
    """The text for clang. `body_marker` is the name of the generated function, whose braces hold the body."""
    tokens = Text(text)
    aliases, classes = _declared_types(tokens)
    _reject_unqualified_pointers(tokens, SCALARS | VECTORS | LIBRARY | aliases | classes)
    _reject_atomics(tokens)
    _reject_vector_casts(tokens)
    _rewrite_threadgroup_arrays(tokens, body_marker)
    _rewrite_conversions(tokens, aliases)
    return str(tokens)


def _declared_types(text: Text) -> tuple[set[str], set[str]]:
    """Names that stand for some other type (aliases, template parameters), and classes."""
    aliases, classes = set(), set()
    for i, token in enumerate(text.tokens):
        if token in ("struct", "enum") or (token == "class" and text[i - 1] not in ("<", ",")):
            classes.add(text[i + 1] if text[i + 1] != "class" else text[i + 2])
        elif (token in ("typename", "class") and text[i + 2] in (",", ">", "=")) or (
            token == "using" and text[i + 2] == "="
        ):
            aliases.add(text[i + 1])
        elif token == "typedef":
            end = text.tokens.index(";", i)
            name = end - 1
            while text[name] == "]":
                name = text.opening(name) - 1
            aliases.add(text[name])
    return aliases, classes


def _fail(text: Text, i: int, message: str) -> None:
    raise Fault(f"{text.places[i]}: {message}")


def _reject_unqualified_pointers(text: Text, types: set[str]) -> None:
    """In Metal every pointer and reference names its address space; clang would take a generic one.

    A `*` or `&` after the name of a type belongs to a declaration or a cast, never to a product.
    """
    for i, token in enumerate(text.tokens):
        if token not in ("*", "&", "&&"):
            continue
        k = i - 1
        while text[k] in ("*", "const", "volatile"):
            k -= 1
        if text[k] in SPACES:
            continue
        if text[k] == ">":
            opening = text.opening(k)
            k = opening - 1 if opening > 0 else k
        dependent = False
        while text[k - 1] == "::":
            k -= 2
            dependent = text[k - 1] == "typename"
        if text[k] not in types and not dependent:
            continue
        while text[k] in types or text[k] in ("const", "volatile", "metal", "::", "typename"):
            k -= 1
        if text[k] not in SPACES:
            _fail(text, i, f"'{' '.join(text.tokens[k + 1 : i + 2])}' needs device, constant, threadgroup or thread")


def _reject_atomics(text: Text) -> None:
    """OpenCL has types of the same names; the runtime's notion of a race does not know atomic operations."""
    for i, token in enumerate(text.tokens):
        if token.startswith("atomic"):
            _fail(text, i, f"{token}: the harness has no atomics")


def _reject_vector_casts(text: Text) -> None:
    """`(float4)x` converts in Metal and reinterprets in OpenCL; float4(x) is rewritten, this is not."""
    for i, token in enumerate(text.tokens):
        if token == "(" and text[i + 1] in VECTORS and text[i + 2] == ")" and text[i - 1] not in ("sizeof", "alignof"):
            follows = text[i + 3]
            if follows == "(" or follows[:1].isalnum() or follows.startswith("_"):
                _fail(text, i, f"write {text[i + 1]}(x): the harness can't follow a cast of a vector")


def _rewrite_conversions(text: Text, aliases: set[str]) -> None:
    """T(x) and static_cast<T>(x) to hx::make<T>(x), where T may be a vector."""
    may_be_vector = VECTORS | aliases
    for i, token in enumerate(text.tokens):
        if token == "static_cast" and text[i + 1] == "<":
            end = text.closing(i + 1)
            inside = text.tokens[i + 2 : end]
            if not {"*", "&"} & set(inside) and set(inside) & (may_be_vector | {"vec"}):
                text.tokens[i] = "hx::make"
        elif token in may_be_vector and text[i + 1] == "(" and _is_metal(text, i):
            _drop_qualifier(text, i)
            text.tokens[i] = f"hx::make<{token}>"
        elif token == "vec" and text[i + 1] == "<" and text[text.closing(i + 1) + 1] == "(":
            _drop_qualifier(text, i)
            text.tokens[text.closing(i + 1)] = ">>"
            text.tokens[i] = "hx::make<vec"


def _is_metal(text: Text, i: int) -> bool:
    """Whether the name at `i` stands alone or as metal::name: no member, operator or name of a class."""
    return text[i - 2] == "metal" if text[i - 1] == "::" else text[i - 1] not in (".", "->", "~", "operator")


def _drop_qualifier(text: Text, i: int) -> None:
    if text[i - 1] == "::":
        text.tokens[i - 2] = text.tokens[i - 1] = ""


def _rewrite_threadgroup_arrays(text: Text, body_marker: str) -> None:
    """`threadgroup T a[N], b;` at the outermost level of the body to references to the runtime's memory."""
    depth, sites = 0, 0
    start = next(i for i, t in enumerate(text.tokens) if t == body_marker and text[i + 1] == "(")
    body = text.closing(start + 1) + 1
    for i in range(len(text)):
        if i >= body:
            depth += {"{": 1, "}": -1}.get(text[i], 0)
        if text[i] == "threadgroup" and (end := _end_of_declaration(text, i)):
            if i < body or depth != 1:
                _fail(text, i, "threadgroup memory must be declared at the outermost level of the kernel's body")
            sites = _rewrite_declaration(text, i, end, sites)


def _end_of_declaration(text: Text, i: int) -> int:
    """The index of the ; if a variable in threadgroup memory is declared at `i`, else 0 (a pointer, a reference)."""
    k = i + 1
    while k < len(text) and text[k] not in (";", "*", "&", "&&", ")", "{", "}"):
        if text[k] == "<":
            k = max(text.closing(k), k)
        elif text[k] == "[":
            k = text.closing(k)
        if text[k] == "=":
            _fail(text, i, "threadgroup memory can't be initialised where it is declared")
        k += 1
    return k if text[k] == ";" else 0


def _rewrite_declaration(text: Text, start: int, end: int, sites: int) -> int:
    k = start + 1  # the type: words up to the one that is followed by [ , or ;
    while text[k + 1] not in ("[", ",", ";"):
        k = text.closing(k + 1) if text[k + 1] == "<" else k + 1
    type_name = " ".join(text.tokens[start + 1 : k])
    declarations = []
    while k < end:
        name, extents = text[k], ""
        k += 1
        while text[k] == "[":
            close = text.closing(k)
            extents += " ".join(text.tokens[k : close + 1])
            k = close + 1
        array = f"hx_array_{sites}"
        declarations.append(
            f"typedef {type_name} {array}{extents}; __local {array}& {name} = *(__local {array}*)"
            f'hx::hx_threadgroup_memory({sites}, "{name}", sizeof({array}), hx::unit<{type_name}>);'
        )
        sites += 1
        k += 1
    for i in range(start, end):
        text.before[i] = "\n" * text.before[i].count("\n") if i > start else text.before[i]
        text.tokens[i] = ""
    text.tokens[start] = " ".join(declarations)
    text.tokens[end] = ""
    return sites

"""Runs the kernel functions of MLX's own Metal sources in the harness.

MLX's wheel contains the header files of its kernels. Its repository has the .metal files as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .build import preprocess
from .kernel import Kernel
from .run import Launch, launch
from .signature import ATTRIBUTES, TYPES, Parameter, Signature
from .translate import Text

ROOT = Path(mx.__file__).parent / "include"
FOLDER = "mlx/backend/metal/kernels"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"(mlx/[^"]+)".*$', re.MULTILINE)
_FUNCTION_CONSTANT = re.compile(r"constant (\w+ (\w+)) \[\[function_constant\(\d+\)\]\];")
# Overloads for bfloat, calling Metal's internal functions. The harness has these functions for all types.
_LEFT_OUT = f"{FOLDER}/bf16_math.h"
_DTYPES = {name: dtype for dtype, name in TYPES.items()} | {"int": mx.int32, "uint": mx.uint32, "size_t": mx.uint64}


@dataclass(frozen=True)
class _Function(Signature):
    """A function as its source declares it."""

    declaration: str
    arguments: tuple[str, ...]

    may_recurse = True  # LoopedElemToLoc does, to a depth of 1
    prelude = '#include "metal_stdlib.h"\n'  # MLX's sources contain the utilities

    @property
    def text(self) -> str:
        return self.declaration

    @property
    def entry(self) -> str:
        names = (
            f"using {name} = {value};" if kind == "typename" else f"constexpr {kind} {name} = {value};"
            for kind, name, value in self.template
        )
        return self.entry_with(self.arguments, " ".join(names))


def run(
    files: Sequence[str],
    function: str,
    arguments: Mapping[str, Any],
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Mapping[str, mx.Dtype | int | str] | None = None,
    constants: Mapping[str, int] | None = None,
    init_value: float | None = None,
    seed: int = 0,
    root: Path = ROOT,
) -> tuple[dict[str, mx.array], Launch]:
    """Run a kernel function of MLX.

    Args:
        files: The source files that are compiled, in `mlx/backend/metal/kernels`. The last one has the function.
        function: Name of the function.
        arguments: Values of the inputs by name: arrays, numbers, or lists of numbers. A struct is an array of its
            8-byte words.
        outputs: Shape and dtype of each output by name.
        grid: Number of threads.
        threadgroup: Threads per threadgroup.
        template: Values of the template parameters by name. A string is Metal code.
        constants: Values of function constants by name; the others are 0.
        init_value: Value of all output elements before the launch; None: uninitialized.
        seed: Random seed for the order of the threads.
        root: Folder that contains `mlx/`.

    Returns:
        The outputs by name, and counts of the launch.

    Raises:
        Fault: An error in the kernel.
    """
    __tracebackhide__ = True
    constants, included = constants or {}, {_LEFT_OUT}
    source = "".join(_with_includes(f"{FOLDER}/{file}", root, included) for file in files)
    source = _FUNCTION_CONSTANT.sub(
        lambda found: f"constant constexpr {found[1]} = {int(constants.get(found[2], 0))};", source
    )
    text = Text(preprocess(source, function))
    start, opening, body = _find(text, function)
    values = {name: _value(value) for name, value in (template or {}).items()}
    absent = _remove_absent_parameters(text, opening, constants)
    parameters, calls = _parameters(text, opening)
    kinds = _template_parameters(text, start)
    signature = _Function(
        name=function,
        template=tuple((kinds[name], name, value) for name, value in values.items()),
        parameters=tuple(parameters),
        attributes=(),
        declaration=_code(text, start, body + 1) + "\n",
        arguments=tuple(calls),
    )
    inputs = [p for p in parameters if p.name not in outputs]
    kernel = Kernel(
        name=function,
        input_names=tuple(p.name for p in inputs),
        output_names=tuple(outputs),
        source=absent + _marker(text, body) + _code(text, body + 1, text.closing(body)),
        header=_code(text, 0, start),
    )
    arrays = [_array(arguments[p.name], p, values) for p in inputs]
    results, report = launch(kernel, signature, arrays, grid, threadgroup, list(outputs.values()), init_value, seed)
    return dict(zip(outputs, results, strict=True)), report


def _with_includes(path: str, root: Path, included: set[str]) -> str:
    if path in included:
        return ""
    included.add(path)
    text = (root / path).read_text(encoding="utf-8")
    parts, line, at = [f'#line 1 "{Path(path).name}"\n'], 1, 0
    for found in _INCLUDE.finditer(text):
        parts.append(text[at : found.start()])
        line += text[at : found.end()].count("\n")
        parts.append(_with_includes(found[1], root, included) + f'\n#line {line} "{Path(path).name}"\n')
        at = found.end()
    return "".join(parts) + text[at:] + "\n"


def _find(text: Text, function: str) -> tuple[int, int, int]:
    """Delete the other kernel functions, which may have threadgroup variables.

    Returns:
        The index of the first token of the function, of the bracket before its parameters, and of its body.
    """
    found = None
    for i in range(len(text)):
        if not (text[i] == text[i + 1] == "[" and text[i + 2] == "kernel"):
            continue
        start = text.opening(i - 1) - 1 if text[i - 1] == ">" else i
        opening = text.tokens.index("(", text.closing(i))
        body = text.closing(opening) + 1
        if text[body] != "{":  # an instantiation
            start, end = i - text.tokens[i::-1].index("template"), text.tokens.index(";", i)
        elif text[opening - 1] == function:
            found = start, opening, body
            continue
        else:
            end = text.closing(body)
        _delete(text, start, end + 1)
    if found is None:
        raise ValueError(f"no kernel function {function} in these files")
    return found


def _delete(text: Text, start: int, end: int) -> None:
    text.tokens[start:end] = [""] * (end - start)
    text.before[start + 1 : end] = [""] * (end - start - 1)
    if end < len(text):
        text.before[end] += _marker(text, end)


def _marker(text: Text, i: int) -> str:
    """Tells clang the location of token `i`."""
    file, line = text.locations[i].rsplit(":", 1)
    return f'\n# {line} "{file}"\n'


def _split(text: Text, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens between commas."""
    k = start
    while k < end:
        if text[k] in ("(", "[", "{", "<"):
            k = max(text.closing(k), k)
        elif text[k] == ",":
            yield start, k
            start = k + 1
        k += 1
    if start < end:
        yield start, end


def _code(text: Text, start: int, end: int) -> str:
    return "".join(text.before[k] + text[k] for k in range(start, end))


def _attribute(text: Text, first: int, last: int) -> int:
    """Index of the attribute of a parameter, or `last`."""
    return next((k for k in range(first, last) if text[k] == text[k + 1] == "["), last)


def _remove_absent_parameters(text: Text, opening: int, constants: Mapping[str, int]) -> str:
    """Remove the parameters whose function constant is 0. Returns declarations of null pointers of their names."""
    absent = ""
    for first, last in list(_split(text, opening + 1, text.closing(opening))):
        attribute = _attribute(text, first, last)
        words = text.tokens[attribute:last]
        if "function_constant" in words and not constants.get(words[words.index("function_constant") + 2]):
            absent += text.part(first, attribute) + " = nullptr;"
            _delete(text, *((first, last + 1) if text[last] == "," else (first - 1, last)))
    return absent


def _parameters(text: Text, opening: int) -> tuple[list[Parameter], list[str]]:
    """The buffer parameters, and the argument for each parameter."""
    parameters: list[Parameter] = []
    calls = []
    for first, last in _split(text, opening + 1, text.closing(opening)):
        attribute = _attribute(text, first, last)
        is_array = text[attribute - 1] == "]"
        at = text.opening(attribute - 1) - 1 if is_array else attribute - 1
        kind, name = text.part(first, at).strip() + "*" * is_array, text[at]
        if position := next((word for word in text.tokens[attribute:last] if word in ATTRIBUTES), None):
            vector = {"uint2": "hx::attribute(hx::{}).xy", "uint3": "hx::attribute(hx::{})"}
            calls.append(vector.get(kind, "hx::hx_attribute(hx::{}, 0)").format(position))
        else:
            parameter = Parameter(kind, name, name, "data")
            calls.append(parameter.argument(len(parameters)))
            parameters.append(parameter)
    return parameters, calls


def _template_parameters(text: Text, start: int) -> dict[str, str]:
    """Kind of each template parameter, by name."""
    kinds = {}
    if text[start] == "template":
        for first, last in _split(text, start + 2, text.closing(start + 1)):
            name = next((k for k in range(first, last) if text[k] == "="), last) - 1
            kinds[text[name]] = text.part(first, name).strip()
    return kinds


def _value(value: mx.Dtype | int | str) -> str:
    if isinstance(value, mx.Dtype):
        return TYPES[value]
    return value if isinstance(value, str) else str(int(value))


def _array(value: Any, parameter: Parameter, values: Mapping[str, str]) -> mx.array:
    if isinstance(value, mx.array):
        return value
    name = parameter.type.rstrip("&*").split()[-1]
    return mx.array(value, _DTYPES[values.get(name, name)])

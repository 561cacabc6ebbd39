"""Generates the function signature that `mx.fast.metal_kernel` generates (mlx/backend/common/metal_kernel.cpp)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .fault import Fault
from .kernel import Kernel

MAX_BUFFERS = 31  # Metal's limit per function
CONSTANT_BELOW = 8  # inputs of fewer elements are passed in the constant address space

TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.float32: "float",
    mx.bfloat16: "bfloat16_t",
}

# Name of each attribute, and whether it is a uint3 (otherwise uint), in MLX's order.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": False,
    "dispatch_simdgroups_per_threadgroup": False,
    "dispatch_threads_per_threadgroup": True,
    "grid_origin": True,
    "grid_size": True,
    "quadgroup_index_in_threadgroup": False,
    "quadgroups_per_threadgroup": False,
    "simdgroup_index_in_threadgroup": False,
    "simdgroups_per_threadgroup": False,
    "thread_execution_width": False,
    "thread_index_in_quadgroup": False,
    "thread_index_in_simdgroup": False,
    "thread_index_in_threadgroup": False,
    "thread_position_in_grid": True,
    "thread_position_in_threadgroup": True,
    "threadgroup_position_in_grid": True,
    "threadgroups_per_grid": True,
    "threads_per_grid": True,
    "threads_per_simdgroup": False,
    "threads_per_threadgroup": True,
}


@dataclass(frozen=True)
class Parameter:
    """One buffer parameter of the generated function.

    Attributes:
        type: Type with address space and * or &.
        name: Name of the parameter.
        of: Name of the input or output that it belongs to.
        what: "data", "shape", "strides" or "ndim".
    """

    type: str
    name: str
    of: str
    what: str

    def argument(self, buffer: int) -> str:
        """The expression that passes a buffer."""
        pointer = f"({self.type[:-1]}*)hx::hx_buffer({buffer})"
        return f"*{pointer}" if self.type.endswith("&") else pointer


@dataclass(frozen=True)
class Signature:
    name: str
    template: tuple[tuple[str, str, str], ...]  # kind, name, value
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]

    @property
    def text(self) -> str:
        """The function's declaration, up to the opening brace."""
        lines = []
        if self.template:
            lines.append("template <" + ", ".join(f"{kind} {name}" for kind, name, _ in self.template) + ">")
        lines.append(f"[[kernel]] void {self.name}(")
        arguments = [f"  {p.type} {p.name} [[buffer({i})]]" for i, p in enumerate(self.parameters)]
        arguments += [f"  {'uint3' if ATTRIBUTES[a] else 'uint'} {a} [[{a}]]" for a in self.attributes]
        return "\n".join(lines) + "\n" + ",\n".join(arguments) + ") {\n"

    def source(self, kernel: Kernel) -> str:
        """The source that MLX compiles, without MLX's own utilities."""
        text = f"{kernel.header}{self.text}{kernel.source}\n}}\n"
        if self.template:
            instance = f"{self.name}<{', '.join(value for _, _, value in self.template)}>"
            text += f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({instance}) {instance};\n'
        return text

    @property
    def entry(self) -> str:
        """A function without parameters that calls the kernel; the runtime calls it once per thread."""
        arguments = [p.argument(i) for i, p in enumerate(self.parameters)]
        for a in self.attributes:
            arguments.append(f"hx::attribute(hx::{a})" if ATTRIBUTES[a] else f"hx::hx_attribute(hx::{a}, 0)")
        values = ", ".join(value for _, _, value in self.template)
        call = self.name + (f"<{values}>" if self.template else "")
        joined = ",\n    ".join(arguments)
        return f'extern "C" __attribute__((no_sanitize("thread"))) void hx_entry() {{\n  {call}(\n    {joined});\n}}\n'


def signature(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, bool | int | mx.Dtype]],
    output_dtypes: Sequence[mx.Dtype],
) -> Signature:
    """Return the signature for these arguments. Raises Fault where MLX would generate invalid Metal code."""
    arguments = tuple(_template_argument(kernel, name, value) for name, value in template)
    name = f"custom_kernel_{kernel.name}"
    if arguments:
        name += "__" + "_".join(value for _, _, value in arguments)
    parameters = []
    for array_name, array in zip(kernel.input_names, inputs, strict=True):
        space = "constant" if array.size < CONSTANT_BELOW else "device"
        dtype = _type(kernel, array.dtype)
        parameters.append(
            Parameter(f"const {space} {dtype}{'*' if array.ndim else '&'}", array_name, array_name, "data")
        )
        name += f"_{dtype}{'s' if not array.ndim else 'c' if array.size < CONSTANT_BELOW else ''}"
        if array.ndim:
            for what, dtype in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
                if f"{array_name}_{what}" in kernel.source:
                    parameters.append(Parameter(f"const constant {dtype}", f"{array_name}_{what}", array_name, what))
    for array_name, dtype in zip(kernel.output_names, output_dtypes, strict=True):
        dtype = _type(kernel, dtype)
        parameters.append(Parameter(f"device {dtype}*", array_name, array_name, "data"))
        name += f"_{dtype}"
    if len(parameters) > MAX_BUFFERS:
        raise Fault(
            f"{kernel.name}: {len(parameters)} buffers including shapes and strides; Metal's limit is {MAX_BUFFERS}"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise Fault(
            f"{kernel.name}: MLX names the function {name}, which is not an identifier (a negative template argument?)"
        )
    attributes = tuple(a for a in ATTRIBUTES if a in kernel.source)
    arrays = len(inputs) + len(output_dtypes)
    if not attributes and len(output_dtypes) > 1 and len(parameters) > arrays:
        raise Fault(
            f"{kernel.name}: with a shape, several outputs and no attribute, MLX generates an invalid signature"
        )
    return Signature(name, arguments, tuple(parameters), attributes)


def _type(kernel: Kernel, dtype: mx.Dtype) -> str:
    if dtype not in TYPES:
        raise Fault(f"{kernel.name}: {dtype} is not supported by the harness")
    return TYPES[dtype]


def _template_argument(kernel: Kernel, name: str, value: bool | int | mx.Dtype) -> tuple[str, str, str]:
    if isinstance(value, bool):
        return "bool", name, str(int(value))
    if isinstance(value, int):
        return "int", name, str(value)
    return "typename", name, _type(kernel, value)

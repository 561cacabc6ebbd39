"""The Metal sources of `metal_kernels/`, and how one is launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from mlxlm.backend.mlx import mx
from mlxlm.utils.resources import resource

FLOATS = (mx.float32, mx.float16, mx.bfloat16)  # what the kernels take

Output = tuple[Sequence[int], mx.Dtype]  # shape and dtype


@dataclass(frozen=True)
class MetalKernel:
    """`metal_kernels/<name>.metal`: the body of a kernel function, around which MLX writes the signature.

    `inputs` and `outputs` are the names that the body uses, `headers` what it needs before the function. Inputs
    that are not `contiguous` arrive as they lie in memory, and the body must use their `_strides`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contiguous: bool = True
    headers: tuple[str, ...] = ("common.h",)

    @cached_property
    def source(self) -> str:
        return resource("metal_kernels", f"{self.name}.metal").read_text(encoding="utf-8")

    @cached_property
    def header(self) -> str:
        """The headers' text, which compilers' messages refer to by name and line."""
        texts = ((name, resource("metal_kernels", name).read_text(encoding="utf-8")) for name in self.headers)
        return "".join(f'#line 1 "{name}"\n{text}\n' for name, text in texts)

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Mapping[str, int | bool | mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Sequence[Output],
    ) -> list[mx.array]:
        """Launch `grid` threads (threads, not threadgroups) in groups of `threadgroup`; the outputs, lazily."""
        return launch(self, inputs, template, grid, threadgroup, outputs)


def launch(kernel: MetalKernel, inputs, template, grid, threadgroup, outputs) -> list[mx.array]:
    """Run a kernel on the GPU. Raises RuntimeError without Metal; a compile error comes with the evaluation."""
    return _compiled(kernel)(
        inputs=list(inputs),
        template=list(template.items()),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[tuple(shape) for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )


@cache
def _compiled(kernel: MetalKernel):
    return mx.fast.metal_kernel(
        name=f"mlxlm_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=f'#line 1 "{kernel.name}.metal"\n{kernel.source}',
        header=kernel.header,
        ensure_row_contiguous=kernel.contiguous,
    )

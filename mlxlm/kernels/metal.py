"""Loads and launches the Metal kernels of `metal_kernels/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.utils.resources import resource

Output = tuple[Sequence[int], mx.Dtype]  # shape and dtype
_launches: ContextVar[set[str] | None] = ContextVar("launches", default=None)


@contextmanager
def record_launches() -> Iterator[set[str]]:
    """Context manager that collects the names of the kernels that are launched. Compiled functions launch unseen."""
    names: set[str] = set()
    token = _launches.set(names)
    try:
        yield names
    finally:
        _launches.reset(token)


def _code(file: str) -> str:
    """Return a source without comments and indentation, line by line: MLX copies and hashes the text in each launch."""
    text = resource("metal_kernels", file).read_text(encoding="utf-8")
    return "\n".join(line.split("//", 1)[0].strip() for line in text.split("\n"))


@lru_cache(maxsize=1024)
def scalar(value: float, dtype: mx.Dtype) -> mx.array:
    """Return a 0-d input. It is data, not an operation, so that traces and threads can share it."""
    return mx.array(value, dtype)


@dataclass(frozen=True)
class MetalKernel:
    """A kernel of `metal_kernels/`.

    The file is the body of a kernel function; MLX generates the signature.

    Args:
        name: File name without ".metal".
        inputs: Names of the input arrays in the body.
        outputs: Names of the output arrays in the body.
        contiguous: Whether MLX makes the inputs contiguous. Otherwise the body must use their `_strides`.
        headers: Header files to include before the function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contiguous: bool = True
    headers: tuple[str, ...] = ("common.h",)

    @cached_property
    def source(self) -> str:
        """The body of the kernel."""
        return _code(f"{self.name}.metal")

    @cached_property
    def header(self) -> str:
        """The text of all headers, with `#line` directives so that compiler messages name the file and line."""
        return "".join(f'#line 1 "{name}"\n{_code(name)}\n' for name in self.headers)

    def __call__(
        self,
        inputs: Sequence[mx.array],
        template: Mapping[str, int | bool | mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        outputs: Sequence[Output],
    ) -> list[mx.array]:
        """Launch the kernel lazily. Raises RuntimeError without Metal; compile errors are raised on evaluation.

        Args:
            inputs: Input arrays.
            template: Template arguments.
            grid: Number of threads (not of threadgroups).
            threadgroup: Threads per threadgroup.
            outputs: Shape and dtype of each output.

        Returns:
            The output arrays.
        """
        if (names := _launches.get()) is not None:
            names.add(self.name)
        return _function(mx.fast.metal_kernel, self)(
            inputs=list(inputs),
            template=list(template.items()),
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[tuple(shape) for shape, _ in outputs],
            output_dtypes=[dtype for _, dtype in outputs],
        )


@cache
def _function(metal_kernel: Callable[..., Any], kernel: MetalKernel) -> Callable[..., list[mx.array]]:
    """MLX's function for a kernel; per `metal_kernel`, so that a test can replace `mx.fast.metal_kernel`."""
    return metal_kernel(
        name=f"mlxlm_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=f'#line 1 "{kernel.name}.metal"\n{kernel.source}',
        header=kernel.header,
        ensure_row_contiguous=kernel.contiguous,
    )

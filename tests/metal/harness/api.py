"""`metal_kernel`, which runs kernels on the CPU, and `use`, which puts it in place of `mx.fast.metal_kernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import unwrap
from typing import Any

import mlx.core as mx

from .kernel import Kernel
from .run import Launch, launch
from .signature import signature

_mlx_metal_kernel = unwrap(mx.fast.metal_kernel)  # MLX's own, if a test has replaced it


@dataclass
class Log:
    """The launches inside a `with use()` block.

    Attributes:
        seed: Random seed for the order of the threads and the layout of the inputs. Launch i uses `seed + i`.
        launches: One entry per launch.
    """

    seed: int = 0
    launches: list[Launch] = field(default_factory=list)


_log: Log | None = None


@contextmanager
def use(seed: int = 0) -> Iterator[Log]:
    """Replace `mx.fast.metal_kernel` with `metal_kernel` inside a `with` block.

    Args:
        seed: Random seed for the order of the threads and the layout of the inputs.

    Yields:
        The log of the launches.
    """
    global _log
    before = _log, mx.fast.metal_kernel
    _log, mx.fast.metal_kernel = Log(seed), metal_kernel
    try:
        yield _log
    finally:
        _log, mx.fast.metal_kernel = before


def install() -> None:
    """Replace `mx.fast.metal_kernel` for the rest of the process, so that `use` affects kernels constructed before it.

    Outside of `use`, the kernels run on the GPU, as without the harness.
    """

    outside = mx.fast.metal_kernel

    @wraps(outside)
    def construct(*args: Any, **kwargs: Any) -> Callable[..., list[mx.array]]:
        on_gpu, in_harness = outside(*args, **kwargs), metal_kernel(*args, **kwargs)

        def call(**arguments: Any) -> list[mx.array]:
            __tracebackhide__ = True
            return (on_gpu if _log is None else in_harness)(**arguments)

        return call

    mx.fast.metal_kernel = construct


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
) -> Callable[..., list[mx.array]]:
    """Like `mx.fast.metal_kernel`, but runs the kernel on the CPU and checks it.

    Takes the arguments that mlxlm uses, and raises the same errors for wrong ones.

    Returns:
        A function with the parameters of the one that MLX returns. It evaluates its inputs, so it can't be used in
        `mx.compile`. It raises `Fault` for an error in the kernel.
    """
    # Without Metal, too, MLX constructs kernels and checks the arguments of calls.
    check_arguments = _mlx_metal_kernel(name, input_names, output_names, source, header, ensure_row_contiguous)
    kernel = Kernel(name, tuple(input_names), tuple(output_names), source, header, ensure_row_contiguous)

    def call(
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, bool | int | mx.Dtype]] | None = None,
    ) -> list[mx.array]:
        __tracebackhide__ = True
        arguments = {
            "inputs": inputs,
            "output_shapes": output_shapes,
            "output_dtypes": output_dtypes,
            "grid": grid,
            "threadgroup": threadgroup,
            "template": template,
        }
        try:
            check_arguments(**arguments)
        except RuntimeError as error:
            if "No Metal back-end" not in str(error):
                raise
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        outputs = [(tuple(shape), dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        generated = signature(kernel, arrays, template or (), [dtype for _, dtype in outputs])
        seed = _log.seed + len(_log.launches) if _log else 0
        results, report = launch(kernel, generated, arrays, grid, threadgroup, outputs, seed)
        if _log:
            _log.launches.append(report)
        return results

    return call

"""Kernels whose text stands in a test."""

from __future__ import annotations

from textwrap import dedent

from mlxlm.kernels.metal import MetalKernel


def inline(
    source: str,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    contiguous=True,
    header="",
    name="",
) -> MetalKernel:
    kernel = MetalKernel(name or "inline", inputs, outputs, contiguous)
    vars(kernel).update(source=dedent(source), header=dedent(header))  # in place of the cached properties
    return kernel

"""Launches of custom Metal kernels on a simulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

from tests.simulated_gpu.gpu_primitives import primitive
from tests.simulated_gpu.install import SimulatedGPU


class SimulatedKernel:
    """What `mx.fast.metal_kernel` returns: constructed with its arguments, called with those of a launch."""

    def __init__(
        self, gpu: SimulatedGPU, mx: ModuleType, name: str, input_names: Sequence[str], *args: Any, **kwargs: Any
    ):
        self.gpu, self.mx, self.name, self.input_names = gpu, mx, name.removeprefix("mlxlm_"), input_names
        self.arguments, self.options = (name, input_names, *args), kwargs

    def __call__(
        self, *, inputs: Sequence[Any], template: Sequence[tuple[str, Any]], output_shapes: Any, output_dtypes: Any,
        **launch: Any,
    ) -> list[Any]:  # fmt: skip
        mx, gpu = self.mx, self.gpu
        gpu.launches.append(self.name)
        gpu.faults.launch(self.name)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        if gpu.recording:
            outputs = list(zip(output_shapes, output_dtypes, strict=True))
            contiguous = self.options.get("ensure_row_contiguous", True)
            return primitive(mx, "CustomKernel", arrays, outputs, self.name, contiguous)
        if gpu.kernels == "harness" and _evaluate(mx, arrays):
            outputs = self._harness(
                inputs=arrays, template=template, output_shapes=output_shapes, output_dtypes=output_dtypes, **launch
            )
        else:
            outputs = self._reference(arrays, dict(template), list(zip(output_shapes, output_dtypes, strict=True)))
        return [1.25 * y for y in outputs] if self.name in gpu.faults.wrong else outputs

    @cached_property
    def _harness(self) -> Any:
        from tests.metal import harness

        return harness.metal_kernel(*self.arguments, **self.options)

    def _reference(self, inputs: list[Any], template: dict[str, Any], outputs: list[tuple[Any, Any]]) -> list[Any]:
        """The results of the kernel by lazy MLX operations. Like a kernel, they have no gradient of their own."""
        from tests.simulated_gpu.kernel_references import REFERENCES

        @self.mx.custom_function
        def compute(*arrays: Any) -> tuple[Any, ...]:
            named = dict(zip(self.input_names, arrays, strict=True))
            results = REFERENCES[self.name](named, template, outputs)
            for result, (shape, dtype) in zip(results, outputs, strict=True):
                assert (result.shape, result.dtype) == (tuple(shape), dtype), f"reference of {self.name}"
            return tuple(results)

        @compute.vjp
        def gradient(primals: Any, cotangents: Any, results: Any) -> Any:
            raise ValueError("[Primitive::vjp] Not implemented for CustomKernel.")

        return list(compute(*inputs))


def _evaluate(mx: ModuleType, arrays: list[Any]) -> bool:
    """Compute the arrays; False inside of a trace, where they have no values."""
    try:
        mx.eval.__wrapped__(arrays)
    except (RuntimeError, ValueError) as error:
        if "function transformations" not in str(error):
            raise
        return False
    return True

"""Compares the outputs and gradients of a path with those of MLX's operations in float32."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.kernels import measurements

if TYPE_CHECKING:
    from mlxlm.kernels.dispatch import Case, Operation

# Maximum relative error |actual - reference| / |reference| (Frobenius norms) by rounding: a few units of the dtype's
# last place; for float32, that of matrix units with shorter factors (TF32). One missing key of 70 gives 0.1.
TOLERANCE = {"float32": 2e-3, "float16": 5e-3, "bfloat16": 3e-2}


def cotangents(operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[mx.array]:
    """Make random cotangents for the outputs of a path; an empty list if the operation has no gradient."""
    if not operation.differentiable:
        return []
    outs = _as_list(operation.paths[path](*args, **kwargs))
    seeds = mx.random.split(mx.random.key(1), len(outs))
    return [mx.random.normal(y.shape, key=seed).astype(y.dtype) for y, seed in zip(outs, seeds, strict=True)]


def outputs(
    operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any], cotangents: Sequence[mx.array]
) -> list[mx.array]:
    """Return the outputs of a path, followed by its gradients if there are cotangents. Nothing is evaluated."""
    arrays = list(args)

    def call(*primals: mx.array) -> list[mx.array]:
        for i, primal in zip(operation.differentiable, primals, strict=True):
            arrays[i] = primal
        return _as_list(operation.paths[path](*arrays, **kwargs))

    primals = [args[i] for i in operation.differentiable]
    if not cotangents:
        return call(*primals)
    outs, gradients = mx.vjp(call, primals, list(cotangents))
    return [*outs, *gradients]


def relative_error(operation: Operation, path: str, case: Case) -> float:
    """Return the largest relative error of outputs and gradients, against MLX's operations in float32 on the CPU."""
    args, kwargs = operation.sample_inputs(case)
    grads = cotangents(operation, path, args, kwargs)
    mx.eval(args, grads)
    reference = operation.reference(case)
    with mx.stream(mx.cpu):  # a GPU's matrix units may shorten float32
        expected = outputs(operation, reference, *tree_map(_as_float32, (args, kwargs, grads)))
        mx.eval(expected)
    actual = outputs(operation, path, args, kwargs, grads)
    mx.eval(actual)
    with mx.stream(mx.cpu):
        errors = [relative_distance(x, y) for x, y in zip(actual, expected, strict=True)]
    return _largest(errors)


def check_on_first_use(operation: Operation, cases: tuple[Case, ...]) -> str | None:
    """Check the Metal kernels of these cases on this machine. Passed checks are saved across processes.

    Returns:
        None if they are correct, else what is wrong, which is also a warning.
    """
    name = "; ".join(map(str, cases))
    if measurements.is_verified(name):
        return None
    try:
        error = _largest(relative_error(operation, "metal", case) for case in cases)
        if error <= TOLERANCE[cases[0].dtype]:
            measurements.save_verified(name)
            return None
        reason = f"its Metal kernel is wrong on this machine (error {error:.1e})"
    except Exception as exception:  # compilers and drivers raise anything
        reason = f"its Metal kernel failed on this machine ({in_one_line(exception)})"
    warnings.warn(f"{name}: {reason}; another path is used", stacklevel=2)
    return reason


def in_one_line(exception: Exception) -> str:
    """Return the message of a compiler or driver on one line, truncated to 200 characters."""
    return " ".join(str(exception).split())[:200]


def _largest(errors: Iterable[float]) -> float:
    return max(errors, key=lambda e: (math.isnan(e), e))  # NaN counts as the largest


def _as_list(out: Any) -> list[mx.array]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _as_float32(x: Any) -> Any:
    return x.astype(mx.float32) if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) else x


def relative_distance(actual: mx.array, expected: mx.array) -> float:
    """Return |actual - expected| / |expected| in float32 (Frobenius norms)."""
    difference = mx.linalg.norm((actual.astype(mx.float32) - expected).flatten())
    return (difference / mx.maximum(mx.linalg.norm(expected.flatten()), 1e-30)).item()

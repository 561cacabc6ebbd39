"""Tries a path of an operation: its values and gradients, and how far they are from MLX's in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlxlm.backend.mlx import mx, tree_map
from mlxlm.kernels import measurements

if TYPE_CHECKING:
    from mlxlm.kernels.dispatch import Case, Operation

# Largest |found - reference| / |reference| (Frobenius norms) that is rounding: a few units of the dtype's last
# place, and for float32 what matrix units with shorter factors (TF32) leave. One key left out of 70 gives 0.1.
TOLERANCE = {"float32": 2e-3, "float16": 5e-3, "bfloat16": 3e-2}


def cotangents(operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[mx.array]:
    """Random cotangents for the outputs of a path; none if the operation has no gradient."""
    if not operation.differentiable:
        return []
    found = _as_list(operation.paths[path](*args, **kwargs))
    seeds = mx.random.split(mx.random.key(1), len(found))
    return [mx.random.normal(y.shape, key=seed).astype(y.dtype) for y, seed in zip(found, seeds, strict=True)]


def outputs(
    operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[mx.array]
) -> list[mx.array]:
    """Outputs of a path and, with `given` cotangents, its gradient; not evaluated."""
    arrays = list(args)

    def call(*primals: mx.array) -> list[mx.array]:
        for i, primal in zip(operation.differentiable, primals, strict=True):
            arrays[i] = primal
        return _as_list(operation.paths[path](*arrays, **kwargs))

    primals = [args[i] for i in operation.differentiable]
    if not given:
        return call(*primals)
    found, gradients = mx.vjp(call, primals, list(given))
    return [*found, *gradients]


def relative_error(operation: Operation, path: str, case: Case) -> float:
    """Largest relative error of a path's outputs and gradients against MLX's operations in float32 on the CPU."""
    args, kwargs = operation.sample_inputs(case)
    given = cotangents(operation, path, args, kwargs)
    mx.eval(args, given)
    reference = operation.reference(case)
    with mx.stream(mx.cpu):  # a GPU's matrix units may shorten float32
        wanted = outputs(operation, reference, *tree_map(_as_float32, (args, kwargs, given)))
        mx.eval(wanted)
    found = outputs(operation, path, args, kwargs, given)
    mx.eval(found)
    with mx.stream(mx.cpu):
        errors = [_distance(x, y) for x, y in zip(found, wanted, strict=True)]
    return _largest(errors)


def check_on_first_use(operation: Operation, kind: tuple[Case, ...]) -> str | None:
    """None if the Metal kernels of these cases are right on this machine, else, with a warning, what is wrong.

    What was right is remembered from one process to the next.
    """
    name = "; ".join(map(str, kind))
    if measurements.is_verified(name):
        return None
    try:
        found = _largest(relative_error(operation, "metal", case) for case in kind)
        if found <= TOLERANCE[kind[0].dtype]:
            measurements.save_verified(name)
            return None
        reason = f"its Metal kernel is wrong on this machine (error {found:.1e})"
    except Exception as problem:  # whatever a compiler or a driver may say
        reason = f"its Metal kernel failed on this machine ({in_one_line(problem)})"
    warnings.warn(f"{name}: {reason}; another path is taken", stacklevel=2)
    return reason


def in_one_line(problem: Exception) -> str:
    """What a compiler or a driver says, cut."""
    return " ".join(str(problem).split())[:200]


def _largest(errors: Iterable[float]) -> float:
    return max(errors, key=lambda e: (e != e, e))  # NaN is the largest error of all


def _as_list(out: Any) -> list[mx.array]:
    return list(out) if isinstance(out, tuple | list) else [out]


def _as_float32(x: Any) -> Any:
    return x.astype(mx.float32) if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) else x


def _distance(found: mx.array, wanted: mx.array) -> float:
    difference = mx.linalg.norm((found.astype(mx.float32) - wanted).flatten())
    return (difference / mx.maximum(mx.linalg.norm(wanted.flatten()), 1e-30)).item()

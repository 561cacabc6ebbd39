"""Which implementation of an operation runs: by what the call needs, what was measured here, and the mode.

The paths of an operation are "metal" (a kernel of `metal_kernels/`), "mlx" (MLX's own operations) and
"blockwise" (MLX operations in blocks, with linear memory). In mode "auto" MLX's kernel is taken wherever it
has one, unless another path was measured to be faster on this machine (`mlxlm kernels bench`); ours where
MLX has none, or where its memory would grow with the square of the length.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlxlm._mlx import ON_CPU, mx, tree_map
from mlxlm.errors import ConfigError, PlatformError
from mlxlm.kernels import records

MODES = ("auto", "metal", "mlx", "blockwise")
VARIABLE = "MLXLM_KERNELS"

# Largest |found - reference| / |reference| (Frobenius norms) that is rounding. A key left out of the 70 of a
# first-use check moves an output by more than a hundredth.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Case:
    """What decides the choice. Lengths are rounded up to a power of two, so that few cases cover all calls."""

    operation: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in self.sizes]
        return " ".join([self.operation, self.dtype, *sizes, *self.features])

    def __getitem__(self, name: str) -> int:
        return dict(self.sizes)[name]


@dataclass(frozen=True)
class Choice:
    path: str
    why: str


@dataclass(frozen=True)
class Operation:
    """An operation with several paths.

    `prefers(case)` gives the paths that "auto" may take, the first one being taken unless another was measured
    to be faster, and why. `trial(case, small)` makes arguments for a call of the case. `lacks(path, case)` is why
    a path can't serve a case, or None. The arguments at `differentiable` are primals of a gradient, which is
    tried and measured with the value if there are any.
    """

    name: str
    paths: Mapping[str, Callable]
    prefers: Callable[[Case], tuple[Sequence[str], str]]
    trial: Callable[[Case, bool], tuple[list[Any], dict[str, Any]]]
    lacks: Callable[[str, Case], str | None] = lambda path, case: None
    differentiable: tuple[int, ...] = ()

    def implementation(self, case: Case) -> Callable:
        """The function that runs a call of this case. Raises PlatformError if the mode can't be had."""
        return self.paths[choose(self, case).path]

    def blocked(self, path: str, case: Case) -> str | None:
        """Why a path can't be taken here, or None. The first use of a Metal kernel on a machine tries it."""
        if path == "metal" and not metal_available():
            return "there is no Metal on this machine"
        return self.lacks(path, case) or (_failure(self, case) if path == "metal" else None)


def round_up(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def dtype_name(x: mx.array) -> str:
    """ "float16" for `mx.float16`."""
    return str(x.dtype).removeprefix("mlx.core.")


def metal_available() -> bool:
    return mx.metal.is_available() and not ON_CPU


_mode: str | None = None
_choices: dict[tuple[Case, str], Choice] = {}
_failures: dict[Case, str | None] = {}


def mode() -> str:
    """The mode in force: that of `using`, else `$MLXLM_KERNELS`, else "auto". Raises ConfigError."""
    chosen = _mode or os.environ.get(VARIABLE) or "auto"
    if chosen not in MODES:
        raise ConfigError(f"there is no kernel mode {chosen!r}", "one of " + ", ".join(MODES))
    return chosen


@contextmanager
def using(chosen: str) -> Iterator[None]:
    """Take these paths within the block, where an operation has them: "auto", "metal", "mlx", "blockwise".

    A compiled function keeps the paths that it was traced with.
    """
    global _mode
    before, _mode = _mode, chosen
    try:
        mode()
        yield
    finally:
        _mode = before


def choose(operation: Operation, case: Case) -> Choice:
    """The path of a case and why. Raises PlatformError if the mode asks for what can't run here."""
    key = (case, mode())
    if key not in _choices:
        _choices[key] = _choose(operation, case)
    return _choices[key]


def _choose(operation: Operation, case: Case) -> Choice:
    wanted = mode()
    if wanted in operation.paths:
        if reason := operation.blocked(wanted, case):
            raise PlatformError(f"kernel mode {wanted}: {case}: {reason}", f"{VARIABLE}=auto")
        return Choice(wanted, "asked for")
    order, why = operation.prefers(case)
    fastest = records.fastest(str(case))
    if fastest in order and not operation.blocked(fastest, case):
        return Choice(fastest, "measured fastest here" if fastest != order[0] else f"{why}; measured fastest here")
    skipped = []
    for path in order:
        if reason := operation.blocked(path, case):
            skipped.append(f"{path}: {reason}")
        else:
            return Choice(path, "; ".join(skipped) or why)
    raise PlatformError(f"{case}: no implementation can run here ({'; '.join(skipped)})")


def forget_choices() -> None:
    """Choose again: after a measurement."""
    _choices.clear()


def evaluate(operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[mx.array]:
    """Outputs of a path and, if the operation has one, its gradient for a cotangent of ones; not evaluated."""
    arrays = list(args)

    def call(*primals: mx.array) -> list[mx.array]:
        for i, primal in zip(operation.differentiable, primals, strict=True):
            arrays[i] = primal
        out = operation.paths[path](*arrays, **kwargs)
        return list(out) if isinstance(out, tuple | list) else [out]

    if not operation.differentiable:
        return call()
    primals = [args[i] for i in operation.differentiable]
    outputs = call(*primals)
    ones = [mx.ones_like(out) for out in outputs]
    outputs, gradients = mx.vjp(call, primals, ones)
    return [*outputs, *gradients]


def error(operation: Operation, path: str, args: Sequence[Any], kwargs: Mapping[str, Any], case: Case) -> float:
    """Largest relative error of a path's outputs and gradients against MLX's operations in float32."""
    exact = tree_map(_as_float32, args)
    reference = next(p for p in ("mlx", "blockwise") if p in operation.paths and not operation.lacks(p, case))
    wanted = evaluate(operation, reference, exact, kwargs)
    found = evaluate(operation, path, args, kwargs)
    mx.eval(wanted, found)
    errors = [_distance(x, y) for x, y in zip(found, wanted, strict=True)]
    return max(errors, key=lambda e: (e != e, e))  # NaN is the largest error of all


def _as_float32(x: Any) -> Any:
    return x.astype(mx.float32) if isinstance(x, mx.array) and mx.issubdtype(x.dtype, mx.floating) else x


def _distance(found: mx.array, wanted: mx.array) -> float:
    if not found.size:
        return 0.0
    difference = mx.linalg.norm((found.astype(mx.float32) - wanted).flatten(), stream=mx.cpu)
    return (difference / mx.maximum(mx.linalg.norm(wanted.flatten(), stream=mx.cpu), 1e-30)).item()


def _failure(operation: Operation, case: Case) -> str | None:
    """None if the Metal kernels of a case are known to be right on this machine, else why they are off."""
    sizes = tuple((name, size) for name, size in case.sizes if name not in ("T", "S", "rows"))
    kind = Case(case.operation, case.dtype, sizes, case.features)
    if kind not in _failures:
        _failures[kind] = None if records.is_verified(str(kind)) else _first_use(operation, kind, case)
    return _failures[kind]


def _first_use(operation: Operation, kind: Case, case: Case) -> str | None:
    try:
        found = error(operation, "metal", *operation.trial(case, True), case)
        if found <= TOLERANCE[case.dtype]:
            records.verified(str(kind))
            return None
        reason = f"its Metal kernel is wrong on this machine (error {found:.1e})"
    except Exception as problem:  # whatever a compiler or a driver may say
        reason = f"its Metal kernel failed on this machine ({' '.join(str(problem).split())[:200]})"
    warnings.warn(f"{kind}: {reason}; another path is taken", stacklevel=2)
    return reason

"""Chooses the implementation (path) of an operation by the arguments, measurements on this machine, and the mode.

The paths of an operation are "metal" (a kernel of `metal_kernels/`), "mlx" (MLX's own operations) and "blockwise"
(MLX operations in blocks, with linear memory). Mode "auto" prefers MLX's kernel where it has one, unless another path
was measured to be faster on this machine (`mlxlm kernels bench`). It uses mlxlm's kernels where MLX has none or needs
more launches. Training attention uses blocks from 1,024 tokens on, where MLX's memory would grow with the square of the
length, and the Metal kernels only where they were measured to be fastest. A Metal kernel is checked on its first use
on a machine: outputs and gradients are compared with those of MLX's operations in float32.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlxlm.backend.mlx import ON_CPU, mx, tree_map
from mlxlm.kernels import measurements
from mlxlm.utils.errors import ConfigError, PlatformError

MODES = ("auto", "metal", "mlx", "blockwise")
VARIABLE = "MLXLM_KERNELS"
NO_METAL = "no Metal on this machine"
DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


class Case(NamedTuple):
    """The properties of a call that decide its path. Lengths are rounded, so that few cases cover all calls.

    Args:
        operation: Name of the operation.
        dtype: "float32", "float16" or "bfloat16".
        names: Names of the sizes, such as "D" and "T".
        sizes: Their values.
        features: Optional arguments in use, such as "window".
    """

    operation: str
    dtype: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.operation, self.dtype, self.label])

    @property
    def label(self) -> str:
        """Sizes and features, for example "D=64 T=1024 window"."""
        return " ".join([*(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)), *self.features])

    def size(self, name: str) -> int:
        """Return a size by name."""
        return self.sizes[self.names.index(name)]

    def with_sizes(self, **sizes: int) -> Case:
        """Return the case with other sizes. Names that the case doesn't have are ignored."""
        return self._replace(sizes=tuple(sizes.get(n, s) for n, s in zip(self.names, self.sizes, strict=True)))


class Choice(NamedTuple):
    """The chosen path of a case, and why it was chosen."""

    path: str
    why: str


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation with several implementations (paths).

    Args:
        name: Name of the operation.
        paths: The implementations by path name, all with the same arguments.
        preferred_paths: Returns the paths that "auto" may choose for a case, best first, and why the first is best.
        sample_inputs: Makes random arguments `(args, kwargs)` for a call of exactly this case.
        check_cases: Returns cases that run the same Metal kernels on little data, for the check on first use.
        unsupported_reason: Returns why a path doesn't support a case, or None.
        differentiable: Indices of the arguments with a gradient. If not empty, checks and benchmarks include it.
    """

    name: str
    paths: Mapping[str, Callable[..., Any]]
    preferred_paths: Callable[[Case], tuple[Sequence[str], str]]
    sample_inputs: Callable[[Case], tuple[list[Any], dict[str, Any]]]
    check_cases: Callable[[Case], tuple[Case, ...]]
    unsupported_reason: Callable[[str, Case], str | None] = lambda path, case: None
    differentiable: tuple[int, ...] = ()

    def implementation(self, case: Case) -> Callable[..., Any]:
        """Return the function for calls of this case.

        Raises:
            PlatformError: The mode requires a kernel that can't run here.
        """
        if (cases := _recording.get()) is not None:
            cases[case] = self
            return self.paths[self.reference(case)]
        choice = _choices.get((case, mode())) or choose_path(self, case)
        return self.paths[choice.path]

    def reference(self, case: Case) -> str:
        """Return a path of MLX operations that supports a case on every device."""
        return next(
            path for path in ("mlx", "blockwise") if path in self.paths and not self.unsupported_reason(path, case)
        )

    def unavailable_reason(self, path: str, case: Case) -> str | None:
        """Why a path can't be used here, or None. Checks a Metal kernel on its first use on a machine."""
        if reason := self.unsupported_reason(path, case):
            return reason
        if path != "metal":
            return None
        return _failure(self, case) if metal_available() else NO_METAL


def metal_available() -> bool:
    """Whether Metal kernels can run on the current device."""
    return mx.metal.is_available() and not ON_CPU


_mode: ContextVar[str | None] = ContextVar("mode", default=None)
_environment = os.environ.get(VARIABLE) or "auto"
_choices: dict[tuple[Case, str], Choice] = {}
_failures: dict[tuple[Case, ...], str | None] = {}
_lock = threading.RLock()


def mode() -> str:
    """Return the current mode: of `use_kernels`, else of `$MLXLM_KERNELS` at startup, else "auto"."""
    return _mode.get() or _environment


@contextmanager
def use_kernels(mode: str) -> Iterator[None]:
    """Context manager that sets the mode: "auto", "metal", "mlx" or "blockwise".

    Operations without a path of this name still choose automatically. A compiled function keeps the paths that it was
    traced with.

    Raises:
        ConfigError: Unknown mode.
    """
    token = _mode.set(_checked(mode))
    try:
        yield
    finally:
        _mode.reset(token)


_recording: ContextVar[dict[Case, Operation] | None] = ContextVar("recording", default=None)


@contextmanager
def record_cases() -> Iterator[dict[Case, Operation]]:
    """Context manager that records the cases of all calls. They run on MLX's operations, without a choice or check."""
    cases: dict[Case, Operation] = {}
    token = _recording.set(cases)
    try:
        yield cases
    finally:
        _recording.reset(token)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ConfigError(f"unknown kernel mode {mode!r}", "one of " + ", ".join(MODES))
    return mode


def choose_path(operation: Operation, case: Case) -> Choice:
    """Choose the path of a case.

    Raises:
        PlatformError: The mode requires a kernel that can't run here.
        ConfigError: `$MLXLM_KERNELS` is an unknown mode.
    """
    key = (case, _checked(mode()))
    with _lock:
        if key not in _choices:
            _choices[key] = _choose(operation, case)
        return _choices[key]


def _choose(operation: Operation, case: Case) -> Choice:
    requested, skipped = mode(), []
    if requested in operation.paths:
        if reason := operation.unsupported_reason(requested, case):
            skipped.append(f"not {requested}: {reason}")
        elif reason := operation.unavailable_reason(requested, case):
            raise PlatformError(f"kernel mode {requested}: {case}: {reason}", f"{VARIABLE}=auto")
        else:
            return Choice(requested, "requested")
    order, why = operation.preferred_paths(case)
    fastest = measurements.fastest_path(str(case))
    if fastest and fastest in order and not operation.unavailable_reason(fastest, case):
        return Choice(fastest, "; ".join(["measured fastest here", *skipped]))
    for path in order:
        if reason := operation.unavailable_reason(path, case):
            skipped.append(f"not {path}: {reason}")
        else:
            return Choice(path, "; ".join([why, *skipped]))
    raise PlatformError(f"{case}: no implementation can run here ({'; '.join(skipped)})")


def clear_choices() -> None:
    """Forget all choices, after a measurement."""
    _choices.clear()


def _failure(operation: Operation, case: Case) -> str | None:
    """Why the Metal kernels of a case are disabled on this machine; None if they passed the check."""
    cases = operation.check_cases(case)
    if cases not in _failures:
        _failures[cases] = check_on_first_use(operation, cases)
    return _failures[cases]


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

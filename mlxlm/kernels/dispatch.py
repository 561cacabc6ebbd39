"""Which implementation of an operation runs: by what the call needs, what was measured here, and the mode.

The paths of an operation are "metal" (a kernel of `metal_kernels/`), "mlx" (MLX's own operations) and
"blockwise" (MLX operations in blocks, with linear memory). In mode "auto" MLX's kernel is taken wherever it
has one, unless another path was measured to be faster on this machine (`mlxlm kernels bench`); ours where
MLX has none, or where its memory would grow with the square of the length.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import measurements
from mlxlm.kernels.self_check import check_on_first_use
from mlxlm.utils.errors import ConfigError, PlatformError

MODES = ("auto", "metal", "mlx", "blockwise")
VARIABLE = "MLXLM_KERNELS"
DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


class Case(NamedTuple):
    """What decides the choice. Lengths are rounded, so that few cases cover all calls."""

    operation: str
    dtype: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.operation, self.dtype, self.label])

    @property
    def label(self) -> str:
        """ "D=64 T=1024 window" """
        return " ".join([*(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True)), *self.features])

    def size(self, name: str) -> int:
        return self.sizes[self.names.index(name)]

    def with_sizes(self, **sizes: int) -> Case:
        """The same with other sizes; those that it doesn't have are left out."""
        return self._replace(sizes=tuple(sizes.get(n, s) for n, s in zip(self.names, self.sizes, strict=True)))


class Choice(NamedTuple):
    path: str
    why: str


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation with several paths.

    `prefers(case)` gives the paths that "auto" may take, the first one being taken unless another was measured
    to be faster, and why. `trial(case)` makes random arguments for a call of exactly this case. `small(case)`
    gives cases that launch the same kernels on little data: a kernel is tried on these before its first use.
    `lacks(path, case)` is why a path can't serve a case, or None. The arguments at `differentiable` are
    primals of a gradient, which is tried and measured with the value if there are any.
    """

    name: str
    paths: Mapping[str, Callable]
    preferred_paths: Callable[[Case], tuple[Sequence[str], str]]
    sample_inputs: Callable[[Case], tuple[list[Any], dict[str, Any]]]
    check_cases: Callable[[Case], tuple[Case, ...]]
    unsupported_reason: Callable[[str, Case], str | None] = lambda path, case: None
    differentiable: tuple[int, ...] = ()

    def implementation(self, case: Case) -> Callable:
        """The function that runs a call of this case. Raises PlatformError if the mode can't be had."""
        if (cases := _recording.get()) is not None:
            cases[case] = self
            return self.paths[self.reference(case)]
        choice = _choices.get((case, mode())) or choose_path(self, case)
        return self.paths[choice.path]

    def reference(self, case: Case) -> str:
        """A path of MLX's operations that can serve a case anywhere."""
        return next(
            path for path in ("mlx", "blockwise") if path in self.paths and not self.unsupported_reason(path, case)
        )

    def unavailable_reason(self, path: str, case: Case) -> str | None:
        """Why a path can't be taken here, or None. The first use of a Metal kernel on a machine tries it."""
        if reason := self.unsupported_reason(path, case):
            return reason
        if path != "metal":
            return None
        return _failure(self, case) if metal_available() else "there is no Metal on this machine"


def metal_available() -> bool:
    return mx.metal.is_available() and not ON_CPU


_mode: ContextVar[str | None] = ContextVar("mode", default=None)
_environment = os.environ.get(VARIABLE) or "auto"
_choices: dict[tuple[Case, str], Choice] = {}
_failures: dict[tuple[Case, ...], str | None] = {}
_lock = threading.RLock()


def mode() -> str:
    """The mode in force: that of `use_kernels`, else that of `$MLXLM_KERNELS` at the start, else "auto"."""
    return _mode.get() or _environment


@contextmanager
def use_kernels(chosen: str) -> Iterator[None]:
    """Take these paths within the block, wherever they exist: "auto", "metal", "mlx" or "blockwise".

    A compiled function keeps the paths that it was traced with. Raises ConfigError for another word.
    """
    token = _mode.set(_checked(chosen))
    try:
        yield
    finally:
        _mode.reset(token)


_recording: ContextVar[dict[Case, Operation] | None] = ContextVar("recording", default=None)


@contextmanager
def record_cases() -> Iterator[dict[Case, Operation]]:
    """Collect what is asked for within the block. Nothing is chosen or tried for it: MLX's operations are taken."""
    cases: dict[Case, Operation] = {}
    token = _recording.set(cases)
    try:
        yield cases
    finally:
        _recording.reset(token)


def _checked(chosen: str) -> str:
    if chosen not in MODES:
        raise ConfigError(f"there is no kernel mode {chosen!r}", "one of " + ", ".join(MODES))
    return chosen


def choose_path(operation: Operation, case: Case) -> Choice:
    """The path of a case and why.

    Raises PlatformError if the mode asks for a kernel that can't run here, ConfigError for an unknown mode.
    """
    key = (case, _checked(mode()))
    with _lock:
        if key not in _choices:
            _choices[key] = _choose(operation, case)
        return _choices[key]


def _choose(operation: Operation, case: Case) -> Choice:
    wanted, skipped = mode(), []
    if wanted in operation.paths:
        if lacking := operation.unsupported_reason(wanted, case):
            skipped.append(f"not {wanted}: {lacking}")
        elif reason := operation.unavailable_reason(wanted, case):
            raise PlatformError(f"kernel mode {wanted}: {case}: {reason}", f"{VARIABLE}=auto")
        else:
            return Choice(wanted, "asked for")
    order, why = operation.preferred_paths(case)
    fastest = measurements.fastest_path(str(case))
    if fastest in order and not operation.unavailable_reason(fastest, case):
        return Choice(fastest, "; ".join(["measured fastest here", *skipped]))
    for path in order:
        if reason := operation.unavailable_reason(path, case):
            skipped.append(f"not {path}: {reason}")
        else:
            return Choice(path, "; ".join([why, *skipped]))
    raise PlatformError(f"{case}: no implementation can run here ({'; '.join(skipped)})")


def clear_choices() -> None:
    """Choose again: after a measurement."""
    _choices.clear()


def _failure(operation: Operation, case: Case) -> str | None:
    """None if the Metal kernels of a case are known to be right on this machine, else why they are off."""
    kind = operation.check_cases(case)
    if kind not in _failures:
        _failures[kind] = check_on_first_use(operation, kind)
    return _failures[kind]

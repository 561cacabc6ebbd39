"""Checks and benchmarks of the implementations of norms and attention, at the shapes of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from mlxlm.backend.mlx import ON_CPU
from mlxlm.doctor.check import BENCHMARKS, KERNELS, Check, CheckFailed, CheckSkipped
from mlxlm.doctor.sizes import KernelModel, Sizes
from mlxlm.kernels.bench import benchmark, narrow
from mlxlm.kernels.dispatch import NO_METAL, TOLERANCE, Case, Operation, choose_path, metal_available, relative_error
from mlxlm.kernels.metal import record_launches
from mlxlm.plan.kernel_cases import cases_of
from mlxlm.plan.model_lookup import find_config
from mlxlm.train.start import DEVICE_DTYPE

_FAILURES = ("failed", "its Metal kernel")  # how a Measurement says that a path should run here and doesn't


def kernel_checks(sizes: Sizes) -> Iterator[Check]:
    """Compare each implementation with MLX's operations in float32 on the CPU, in outputs and gradients.

    A case that dispatch distinguishes is checked with as many keys and rows as the model has; a Metal kernel, as on its
    first use, also with few that are ragged against every tile, and with many that several threadgroups share.
    """
    if not metal_available():
        yield Check(KERNELS, "Metal kernels", _skip)
    yield Check(KERNELS, "implementations in use", partial(_in_use, sizes.kernel_models))
    checked: set[tuple[str, Case]] = set()
    for operation, case in _cases(sizes.kernel_models):
        for path in operation.paths:
            for one in _cases_to_compare(operation, path, case, sizes.ragged):
                if (path, one) not in checked:
                    checked.add((path, one))
                    label = f"{one.dtype} {one.label}"
                    yield Check(KERNELS, f"{operation.name}, {path}", partial(_compare, operation, path, one), label)


def benchmark_checks(sizes: Sizes) -> Iterator[Check]:
    """Time all implementations at the largest shapes of models. Nothing is saved: dispatch stays as it is."""
    largest: dict[tuple[Any, ...], tuple[Operation, Case]] = {}
    for operation, case in _cases(sizes.benchmark_models):
        others = tuple(size for name, size in zip(case.names, case.sizes, strict=True) if name not in ("T", "S"))
        key = (case.operation, case.dtype, others, case.features)
        if key not in largest or case.sizes > largest[key][1].sizes:
            largest[key] = operation, case
    for operation, case in largest.values():
        run = partial(_benchmark, operation, case, sizes.repeats)
        yield Check(BENCHMARKS, operation.name, run, f"{case.dtype} {case.label}")


def _cases(models: Iterable[KernelModel]) -> list[tuple[Operation, Case]]:
    cases: dict[Case, Operation] = {}
    for model in models:
        config = find_config(model.name).with_changes(**model.changes)
        cases |= {case: operation for operation, case in cases_of(config, model.dtype, DEVICE_DTYPE)}
    return [(operation, case) for case, operation in cases.items()]


def _cases_to_compare(operation: Operation, path: str, case: Case, ragged: bool) -> tuple[Case, ...]:
    """The cases of a path that can run here; on a CPU, the reference itself can't be wrong."""
    if operation.unsupported_reason(path, case) or (ON_CPU and path == operation.reference(case)):
        return ()
    first_use = operation.check_cases(case)
    if path != "metal":
        return first_use[:1] if ragged else (narrow(case),)
    return (first_use if ragged else (*first_use, narrow(case))) if metal_available() else ()


def _skip() -> dict[str, Any]:
    raise CheckSkipped(NO_METAL)


def _in_use(models: Iterable[KernelModel]) -> dict[str, Any]:
    """Which implementation is chosen for each case, and why."""
    choices = [(case, choose_path(operation, case)) for operation, case in _cases(models)]
    counts = Counter(choice.path for _, choice in choices)
    operations = [{"case": str(case), "path": choice.path, "why": choice.why} for case, choice in choices]
    values = {**counts, "operations": operations}
    disabled = [choice for _, choice in choices if _FAILURES[1] in choice.why]
    if disabled:
        raise CheckFailed(f"in {len(disabled)} cases the Metal kernel is disabled: {disabled[0].why}", values)
    return values


def _compare(operation: Operation, path: str, case: Case) -> dict[str, Any]:
    with record_launches() as kernels:
        error, tolerance = relative_error(operation, path, case), TOLERANCE[case.dtype]
    values = {"error": error, "tolerance": tolerance, "kernels": sorted(kernels)}
    if not error <= tolerance:
        raise CheckFailed(f"the relative error is {error:.2g}, above {tolerance:g}", values)
    return values


def _benchmark(operation: Operation, case: Case, repeats: int) -> dict[str, Any]:
    chosen, why = choose_path(operation, case)
    measured = benchmark(operation, case, repeats)
    milliseconds = {f"{path}_ms": 1e3 * t.median for path, t in measured.timings.items()}
    values: dict[str, Any] = {**milliseconds, "in_use": chosen, "why": why, "fastest": measured.fastest}
    if {"metal_ms", "mlx_ms"} <= milliseconds.keys():
        values["metal_speedup"] = milliseconds["mlx_ms"] / milliseconds["metal_ms"]
    values["details"] = measured.to_dict()
    wrong = [f"{path}: {reason}" for path, reason in measured.skipped.items() if reason.startswith(_FAILURES)]
    if wrong:
        raise CheckFailed("; ".join(wrong), values)
    if measured.fastest is None:
        raise CheckFailed("no implementation is correct", values)
    return values

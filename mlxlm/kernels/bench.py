"""Measures the paths of the operations that a model calls, on this machine, and keeps the fastest ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.backend import device
from mlxlm.backend.mlx import mx
from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.attention_dispatch import LINEAR_MEMORY_FROM, TRAINING
from mlxlm.kernels.dispatch import Case, Operation
from mlxlm.kernels.self_check import TOLERANCE, cotangents, in_one_line, outputs, relative_error
from mlxlm.utils.errors import MlxlmError

_LEAST_SECONDS = 0.01  # of one timing: as many calls as it takes
_MARGIN = 0.97  # of the time of the path that would run anyway: what counts as faster
_MEMORY = 2  # times that of the path that would run anyway: what is too much, however fast
_LARGEST = 0.25  # of the device's memory: more isn't tried


@dataclass(frozen=True)
class Timing:
    """Seconds of single calls, gradient included where the operation has one, after a warm-up."""

    seconds: list[float]
    error: float  # relative, against MLX's operations in float32 on the CPU
    peak_bytes: int  # the most memory that MLX held at once, arguments included

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Measurement:
    """The paths of a case that can run here, and the one that is taken from now on."""

    case: Case
    timings: dict[str, Timing]
    skipped: dict[str, str]  # path: why it wasn't measured
    fastest: str | None

    def to_dict(self) -> dict[str, Any]:
        timings = {
            path: {
                "milliseconds": [round(1e3 * s, 4) for s in sorted(t.seconds)],
                "error": float(f"{t.error:.2e}") if math.isfinite(t.error) else None,
                "peak_bytes": t.peak_bytes,
            }
            for path, t in self.timings.items()
        }
        return {"case": str(self.case), "fastest": self.fastest, "paths": timings, "skipped": self.skipped}


def benchmark_all(cases: Sequence[tuple[Operation, Case]], num_repeats: int) -> Iterator[Measurement]:
    """Measure each case in turn, `num_repeats` timings per path; each is kept, and used from then on.

    Raises MlxlmError at the end if something couldn't be written.
    """
    unkept = None
    for operation, case in cases:
        measurement = benchmark(operation, case, num_repeats)
        if measurement.fastest:
            try:
                measurements.save_measurement(str(case), measurement.to_dict())
                dispatch.clear_choices()
            except MlxlmError as problem:
                unkept = problem
        yield measurement
    if unkept:
        raise unkept


def benchmark(operation: Operation, case: Case, num_repeats: int) -> Measurement:
    """Time the paths that "auto" may take for a case, in turn, so that a noisy moment hits them all."""
    order, why = operation.preferred_paths(case)
    skipped = {path: f"not taken: {why}" for path in operation.paths if path not in order}
    args, kwargs = operation.sample_inputs(case)
    mx.eval(args)
    calls, errors, peaks = {}, {}, {}
    for path in order:
        if reason := operation.unavailable_reason(path, case) or _too_large(path, case):
            skipped[path] = reason
            continue
        try:
            errors[path] = relative_error(operation, path, _narrow(case))
            call = _call(operation, path, args, kwargs)
            call(1)
            mx.clear_cache()
            mx.reset_peak_memory()
            call(1)
            peaks[path], calls[path] = mx.get_peak_memory(), call
        except Exception as problem:  # whatever a compiler or a driver may say: the others are measured
            skipped[path] = f"failed: {in_one_line(problem)}"
    repeats = {path: _repeats(call) for path, call in calls.items()}
    seconds: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(num_repeats):
        for path, call in calls.items():
            seconds[path].append(call(repeats[path]))
    timings = {path: Timing(seconds[path], errors[path], peaks[path]) for path in calls}
    return Measurement(case, timings, skipped, _fastest(order, case, timings))


def _too_large(path: str, case: Case) -> str | None:
    """Why a path isn't tried: MLX's gradient may keep the square of the scores, several times in float32."""
    if path != "mlx" or case.operation != TRAINING.name or case.size("T") < LINEAR_MEMORY_FROM:
        return None
    batch = max(1, 2048 // case.size("T"))  # of its trial
    needed = 4 * 4 * batch * case.size("H") * case.size("T") ** 2
    return "its scores could take too much memory" if needed > _LARGEST * device.device_memory() else None


def _narrow(case: Case) -> Case:
    """What the error is taken on: one key head and up to 1,024 positions; the reference keeps the whole square."""
    if "K" not in case.names:
        return case
    narrow = case.with_sizes(H=case.size("H") // case.size("K"), K=1)
    return narrow if "S" in case.names else narrow.with_sizes(T=min(1024, case.size("T")))


def _call(operation: Operation, path: str, args, kwargs):
    """A function that runs the path n times in one evaluation and gives seconds per run."""
    given = cotangents(operation, path, args, kwargs)
    mx.eval(given)
    compiled = mx.compile(lambda args, given: outputs(operation, path, args, kwargs, given))

    def run(n: int) -> float:
        start = time.perf_counter()
        mx.eval([compiled(args, given) for _ in range(n)])
        return (time.perf_counter() - start) / n

    return run


def _repeats(call) -> int:
    return max(1, min(64, int(_LEAST_SECONDS / max(call(1), 1e-6))))


def _fastest(order: Sequence[str], case: Case, timings: dict[str, Timing]) -> str | None:
    """The path to take: the first one that is right, unless another is clearly faster and doesn't take much more
    memory; None if none is right."""
    right = [p for p in order if p in timings and timings[p].error <= TOLERANCE[case.dtype]]
    faster = [
        p for p in right[1:]
        if timings[p].median < _MARGIN * timings[right[0]].median
        and timings[p].peak_bytes <= _MEMORY * timings[right[0]].peak_bytes
    ]  # fmt: skip
    return min(faster, key=lambda p: timings[p].median, default=next(iter(right), None))

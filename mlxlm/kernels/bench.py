"""Benchmarks the paths of operations on this machine and saves which is fastest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.backend import device
from mlxlm.backend.mlx import mx
from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.attention import LINEAR_MEMORY_FROM, TRAINING
from mlxlm.kernels.dispatch import TOLERANCE, Case, Operation, cotangents, in_one_line, outputs, relative_error
from mlxlm.utils.errors import MlxlmError

_MIN_SECONDS = 0.01  # a timing repeats the call until it takes this long
_MAX_TIME_RATIO = 0.97  # to the time of the default path: above, a path doesn't count as faster
_MAX_MEMORY_RATIO = 2  # to the peak memory of the default path: above, a path isn't chosen however fast it is
_MAX_MEMORY_SHARE = 0.25  # of the device's memory: paths that need more aren't tried


@dataclass(frozen=True)
class Timing:
    """Timings of one path, after a warm-up.

    Args:
        seconds: Seconds per call, including the gradient if the operation has one.
        error: Relative error against MLX's operations in float32 on the CPU.
        peak_bytes: Peak memory of MLX, including the arguments.
    """

    seconds: list[float]
    error: float
    peak_bytes: int

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Measurement:
    """Benchmark results of a case.

    Args:
        case: The case.
        timings: Timings by path.
        skipped: Paths that were not measured, and why.
        fastest: The path to use from now on, None if none is correct.
    """

    case: Case
    timings: dict[str, Timing]
    skipped: dict[str, str]
    fastest: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the results as JSON values."""
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
    """Benchmark cases one by one, with `num_repeats` timings per path. Results are saved and used immediately.

    Raises:
        MlxlmError: At the end, if a result couldn't be saved.
    """
    save_error = None
    for operation, case in cases:
        measurement = benchmark(operation, case, num_repeats)
        if measurement.fastest:
            try:
                measurements.save_measurement(str(case), measurement.to_dict())
                dispatch.clear_choices()
            except MlxlmError as error:
                save_error = error
        yield measurement
    if save_error:
        raise save_error


def benchmark(operation: Operation, case: Case, num_repeats: int) -> Measurement:
    """Time the paths that "auto" may choose for a case. Timings alternate, so that noise affects all paths."""
    order, why = operation.preferred_paths(case)
    skipped = {path: f"not used: {why}" for path in operation.paths if path not in order}
    args, kwargs = operation.sample_inputs(case)
    mx.eval(args)
    calls, errors, peaks = {}, {}, {}
    for path in order:
        if reason := operation.unavailable_reason(path, case) or _too_large(path, case):
            skipped[path] = reason
            continue
        try:
            errors[path] = relative_error(operation, path, narrow(case))
            call = _call(operation, path, args, kwargs)
            call(1)
            mx.clear_cache()
            mx.reset_peak_memory()
            call(1)
            peaks[path], calls[path] = mx.get_peak_memory(), call
        except Exception as exception:  # compilers and drivers raise anything; measure the other paths
            skipped[path] = f"failed: {in_one_line(exception)}"
    repeats = {path: _repeats(call) for path, call in calls.items()}
    seconds: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(num_repeats):
        for path, call in calls.items():
            seconds[path].append(call(repeats[path]))
    timings = {path: Timing(seconds[path], errors[path], peaks[path]) for path in calls}
    return Measurement(case, timings, skipped, _fastest(order, case, timings))


def _too_large(path: str, case: Case) -> str | None:
    """Why a path needs too much memory: MLX's gradient may keep several float32 arrays of T² scores."""
    if path != "mlx" or case.operation != TRAINING.name or case.size("T") < LINEAR_MEMORY_FROM:
        return None
    batch = max(1, 2048 // case.size("T"))  # as in `sample_inputs`
    needed = 4 * 4 * batch * case.size("H") * case.size("T") ** 2
    memory = device.device_memory()
    too_large = memory is not None and needed > _MAX_MEMORY_SHARE * memory
    return "its scores could take too much memory" if too_large else None


def narrow(case: Case) -> Case:
    """Reduce a case for the error: one key head and up to 1,024 positions, since the reference keeps all T² scores.

    A window is reduced in proportion.
    """
    if "T" not in case.names:
        return case
    narrow = case.with_sizes(H=case.size("H") // case.size("K"), K=1)
    if "S" in case.names:
        return narrow
    times = max(1, case.size("T") // 1024)
    lengths = {n: -(-s // times) for n, s in zip(case.names, case.sizes, strict=True) if n in ("T", "window")}
    return narrow.with_sizes(**lengths)


def _call(operation: Operation, path: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[int], float]:
    """Make a function that runs the path n times in one evaluation and returns the seconds per run."""
    grads = cotangents(operation, path, args, kwargs)
    mx.eval(grads)
    compiled = mx.compile(lambda args, grads: outputs(operation, path, args, kwargs, grads))

    def run(n: int) -> float:
        start = time.perf_counter()
        mx.eval([compiled(args, grads) for _ in range(n)])
        return (time.perf_counter() - start) / n

    return run


def _repeats(call: Callable[[int], float]) -> int:
    return max(1, min(64, int(_MIN_SECONDS / max(call(1), 1e-6))))


def _fastest(order: Sequence[str], case: Case, timings: dict[str, Timing]) -> str | None:
    """Choose the first correct path, unless another is clearly faster without much more memory; None if none is."""
    correct = [p for p in order if p in timings and timings[p].error <= TOLERANCE[case.dtype]]
    faster = [
        p
        for p in correct[1:]
        if timings[p].median < _MAX_TIME_RATIO * timings[correct[0]].median
        and timings[p].peak_bytes <= _MAX_MEMORY_RATIO * timings[correct[0]].peak_bytes
    ]
    return min(faster, key=lambda p: timings[p].median, default=next(iter(correct), None))

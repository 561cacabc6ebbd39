"""Measures the paths of the operations that a model calls, on this machine, and keeps the fastest ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlxlm._mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.kernels import dispatch, records
from mlxlm.kernels.attention import DECODE, PREFILL, QUANTIZED, TRAINING
from mlxlm.kernels.dispatch import Case, Operation, round_up
from mlxlm.kernels.rms_norm import ADD_NORM, NORM

ROUNDS = 7
_LEAST_SECONDS = 0.01  # of one timing: as many calls as it takes
_MARGIN = 0.97  # of the time of the path that would run anyway: what counts as faster


@dataclass(frozen=True)
class Timing:
    """Seconds of single calls, gradient included where the operation has one, after a warm-up."""

    seconds: list[float]
    error: float  # relative, against MLX's operations in float32
    peak_bytes: int  # the most memory that MLX held at once, arguments included

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Measurement:
    """All paths of a case that can run here, and the path that `mlxlm` takes from now on."""

    operation: Operation
    case: Case
    timings: dict[str, Timing]
    refused: dict[str, str]  # path: why it can't run
    fastest: str

    def to_dict(self) -> dict[str, Any]:
        timings = {
            path: {
                "milliseconds": [round(1e3 * s, 4) for s in sorted(t.seconds)],
                "error": float(f"{t.error:.2e}") if t.error == t.error else None,
                "peak_bytes": t.peak_bytes,
            }
            for path, t in self.timings.items()
        }
        return {"case": str(self.case), "fastest": self.fastest, "paths": timings, "refused": self.refused}


def cases_of(config: ModelConfig) -> list[tuple[Operation, Case]]:
    """The operations that a model calls: decoding, reading a prompt and training at typical lengths.

    Inference in float16 (float32 on the CPU), training in float32.
    """
    dtype = "float32" if ON_CPU else "float16"
    N, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    found: list[tuple[Operation, Case]] = []

    def norm(operation: Operation, dtype: str, rows: int) -> None:
        found.append((operation, Case(operation.name, dtype, (("N", N), ("rows", rows)))))

    def attend(operation: Operation, dtype: str, **sizes: int) -> None:
        found.append((operation, Case(operation.name, dtype, (("D", D), ("H", H), ("K", K), *sizes.items()))))

    longest = round_up(config.max_position_embeddings)
    lengths = sorted({min(longest, n) for n in (256, 1024, 4096)})
    for operation in (NORM, ADD_NORM):
        norm(operation, dtype, 1)
        norm(operation, "float32", 2048)
    for S in lengths:
        attend(DECODE, dtype, T=1, S=S)
    group_size = next((n for n in (64, 32) if D % n == 0), None)
    for bits in (8, 4) if group_size else ():
        attend(QUANTIZED, dtype, group_size=group_size, bits=bits, T=1, S=lengths[-1])
    for T in lengths:
        attend(PREFILL, dtype, T=T)
    for T in lengths:
        attend(TRAINING, "float32", T=T)
    return found


def measure_all(config: ModelConfig, rounds: int = ROUNDS) -> Iterator[Measurement]:
    """Measure each case of a model in turn; at the end, what was found is kept and used from then on.

    Raises MlxlmError if it can't be written.
    """
    found: dict[str, dict[str, Any]] = {}
    for operation, case in cases_of(config):
        measurement = measure(operation, case, rounds)
        found[str(case)] = measurement.to_dict()
        yield measurement
    records.measured(found)
    dispatch.forget_choices()


def measure(operation: Operation, case: Case, rounds: int = ROUNDS) -> Measurement:
    """Time the paths of a case in turn, so that a noisy moment of the machine hits them all."""
    refused = {path: reason for path in operation.paths if (reason := operation.blocked(path, case))}
    args, kwargs = operation.trial(case, False)
    mx.eval(args)
    calls, errors, peaks = {}, {}, {}
    for path in operation.paths:
        if path not in refused:
            errors[path] = dispatch.error(operation, path, args, kwargs, case)
            calls[path] = _call(operation, path, args, kwargs)
            calls[path](1)
            mx.clear_cache()
            mx.reset_peak_memory()
            calls[path](1)
            peaks[path] = mx.get_peak_memory()
    repeats = {path: _repeats(call) for path, call in calls.items()}
    seconds: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(rounds):
        for path, call in calls.items():
            seconds[path].append(call(repeats[path]))
    timings = {path: Timing(seconds[path], errors[path], peaks[path]) for path in calls}
    return Measurement(operation, case, timings, refused, _fastest(operation, case, timings))


def _call(operation: Operation, path: str, args, kwargs):
    """A function that runs the path n times in one evaluation and gives seconds per run."""
    compiled = mx.compile(lambda *args: dispatch.evaluate(operation, path, args, kwargs))

    def run(n: int) -> float:
        start = time.perf_counter()
        mx.eval([compiled(*args) for _ in range(n)])
        return (time.perf_counter() - start) / n

    return run


def _repeats(call) -> int:
    return max(1, min(64, int(_LEAST_SECONDS / max(call(1), 1e-6))))


def _fastest(operation: Operation, case: Case, timings: dict[str, Timing]) -> str:
    """The path to take: of those that may be taken, the first one unless another is clearly faster."""
    order, _ = operation.prefers(case)
    right = [p for p in order if p in timings and timings[p].error <= dispatch.TOLERANCE[case.dtype]]
    first, *others = right or [p for p in order if p in timings]
    faster = [p for p in others if timings[p].median < _MARGIN * timings[first].median]
    return min(faster, key=lambda p: timings[p].median, default=first)

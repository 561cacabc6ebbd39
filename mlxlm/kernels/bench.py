"""Measures the paths of the operations that a model calls, on this machine, and keeps the fastest ones."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm._mlx import ON_CPU, mx
from mlxlm.config import ModelConfig
from mlxlm.errors import MlxlmError
from mlxlm.kernels import dispatch, records
from mlxlm.kernels.attention_paths import DECODE, LENGTHS, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import Case, Operation
from mlxlm.kernels.rms_norm import ADD_NORM, NORM, ROWS, norm_case
from mlxlm.kernels.trial import TOLERANCE, cotangents, error, in_one_line, outputs

_LEAST_SECONDS = 0.01  # of one timing: as many calls as it takes
_MARGIN = 0.97  # of the time of the path that would run anyway: what counts as faster


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
    refused: dict[str, str]  # path: why it wasn't measured
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
        return {"case": str(self.case), "fastest": self.fastest, "paths": timings, "refused": self.refused}


def cases_of(config: ModelConfig, dtype: str | None = None) -> list[tuple[Operation, Case]]:
    """The operations of a model: decoding, reading a prompt and training, at the lengths that are told apart.

    Inference in `dtype` (float16 if None, on the CPU float32), training in float32. Decoding on a quantized cache
    is `attention` with keys and values that are `Quantized`; where heads share keys, a CPU dequantizes those.
    """
    dtype = dtype or ("float32" if ON_CPU else "float16")
    N, H, K, D = config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    least, most = LENGTHS
    longest = max(least, min(most, config.max_position_embeddings))
    powers = [least << i for i in range((most // least).bit_length())]
    lengths = [n for n in powers if n <= longest]
    found: list[tuple[Operation, Case]] = []
    for operation in (NORM, ADD_NORM) if config.norm == "rms" else ():
        for rows, kind in zip(ROWS, (dtype, dtype, "float32"), strict=True):
            found.append((operation, norm_case(operation, kind, N, rows)))

    # A case knows whether there is a window, a soft cap, a slope, and nothing of their values.
    windows = sorted({config.window(i) for i in range(config.num_hidden_layers)}, key=str)
    softcap, slopes = config.attn_logit_softcapping, True if config.positions == "alibi" else None

    def attend(operation: Operation, dtype: str, T: int, S: int, **form: int) -> None:
        for window in windows:
            found.append((operation, attention_case(operation, dtype, D, H, K, T, S, window, softcap, slopes, **form)))

    for n in powers[: len(lengths) + (longest not in lengths)]:
        attend(DECODE, dtype, 1, n)
    if (not ON_CPU or H == K) and (group_size := next((n for n in (64, 32) if D % n == 0), None)):
        for bits in (8, 4):
            attend(QUANTIZED, dtype, 1, lengths[-1], group_size=group_size, key_bits=bits, value_bits=bits)
    for operation, kind in ((PREFILL, dtype), (TRAINING, "float32")):
        for n in lengths:
            attend(operation, kind, n, n)
    return found


def measure_all(cases: Sequence[tuple[Operation, Case]], rounds: int) -> Iterator[Measurement]:
    """Measure each case in turn, `rounds` timings per path; each is kept, and used from then on.

    Raises MlxlmError at the end if something couldn't be written.
    """
    unkept = None
    for operation, case in cases:
        measurement = measure(operation, case, rounds)
        if measurement.fastest:
            try:
                records.measured(str(case), measurement.to_dict())
                dispatch.forget_choices()
            except MlxlmError as problem:
                unkept = problem
        yield measurement
    if unkept:
        raise unkept


def measure(operation: Operation, case: Case, rounds: int) -> Measurement:
    """Time the paths that "auto" may take for a case, in turn, so that a noisy moment hits them all."""
    order, why = operation.prefers(case)
    refused = {path: f"not taken: {why}" for path in operation.paths if path not in order}
    args, kwargs = operation.trial(case)
    mx.eval(args)
    calls, errors, peaks = {}, {}, {}
    for path in order:
        if reason := operation.blocked(path, case):
            refused[path] = reason
            continue
        try:
            errors[path] = error(operation, path, _narrow(case))
            call = _call(operation, path, args, kwargs)
            call(1)
            mx.clear_cache()
            mx.reset_peak_memory()
            call(1)
            peaks[path], calls[path] = mx.get_peak_memory(), call
        except Exception as problem:  # whatever a compiler or a driver may say: the others are measured
            refused[path] = f"failed: {in_one_line(problem)}"
    repeats = {path: _repeats(call) for path, call in calls.items()}
    seconds: dict[str, list[float]] = {path: [] for path in calls}
    for _ in range(rounds):
        for path, call in calls.items():
            seconds[path].append(call(repeats[path]))
    timings = {path: Timing(seconds[path], errors[path], peaks[path]) for path in calls}
    return Measurement(case, timings, refused, _fastest(order, case, timings))


def _narrow(case: Case) -> Case:
    """What the error is taken on: one key head and up to 1,024 positions; the reference keeps the whole square."""
    if "K" not in case.names:
        return case
    narrow = case.resized(H=case.size("H") // case.size("K"), K=1)
    return narrow if "S" in case.names else narrow.resized(T=min(1024, case.size("T")))


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
    """The path to take: the first one that is right, unless another is clearly faster; None if none is right."""
    right = [p for p in order if p in timings and timings[p].error <= TOLERANCE[case.dtype]]
    faster = [p for p in right[1:] if timings[p].median < _MARGIN * timings[right[0]].median]
    return min(faster, key=lambda p: timings[p].median, default=next(iter(right), None))

"""Helpers of the benchmarks: alternate measurements, tables, JSON, peak memory."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def train_settings(text: str) -> dict[str, Any]:
    """Fields of `TrainSettings`, given as "param_dtype=bfloat16+ema_decay=0.9"."""
    values = dict(pair.split("=") for pair in text.split("+"))
    return {name: float(value) if value[0].isdigit() else value for name, value in values.items()}


def in_turn(rounds: int, **functions: Callable[[], float]) -> dict[str, list[float]]:
    """Call every function once per round, so that noise of the machine affects all of them."""
    values: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name, function in functions.items():
            values[name].append(function())
            print(f"round {i + 1}/{rounds} {name}: {values[name][-1]:.4g}", file=sys.stderr)
    return values


def median(values: list[float]) -> float:
    """The median of some measurements."""
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """The median, and the range."""
    return f"{median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def report(title: str, rows: list[tuple[str, str]], result: dict[str, Any]) -> None:
    """Print a table on stderr, and one JSON line on stdout."""
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}", file=sys.stderr)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}", file=sys.stderr)
    print(json.dumps(result))


def timed_command(command: list[str], **environment: str) -> tuple[float, int, str]:
    """Run a command; returns wall seconds, peak resident bytes and its standard output. Exits if it fails."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment}, text=True,
    )  # fmt: skip
    start = time.perf_counter()
    out = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {' '.join(command)}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), out


def peak_memory(who: int = resource.RUSAGE_SELF) -> int:
    """Peak resident bytes of this process, or with `RUSAGE_CHILDREN` of the largest of its children that have ended."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def plain_mlx() -> Iterator[None]:
    """Replace mlxlm's attention, activation and loss by MLX's own, for everything that is traced inside."""
    from mlxlm.backend.mlx import mx, nn
    from mlxlm.model import attention as attention_module
    from mlxlm.model import block
    from mlxlm.train import step as step_module

    def attention(queries, keys, values, scale, **_):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")

    def activation(_function):
        return lambda gate, up: nn.silu(gate) * up

    def linear_cross_entropy(hidden, weight, targets, _weights, **_):
        return nn.losses.cross_entropy(hidden @ weight.T, targets, reduction="sum")

    places = ((attention_module, "attention"), (block, "with_fused_gradients"), (step_module, "linear_cross_entropy"))
    originals = [getattr(*place) for place in places]
    for place, function in zip(places, (attention, activation, linear_cross_entropy), strict=True):
        setattr(*place, function)
    try:
        yield
    finally:
        for place, function in zip(places, originals, strict=True):
            setattr(*place, function)


def limit_memory() -> None:
    """Limit this process to four fifths of the machine's memory, so that it fails instead of swapping."""
    from mlxlm.backend import platform

    if sys.platform == "linux":
        limit = int(0.8 * platform.total_memory())
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_or_none(command: list[str]) -> dict[str, Any] | None:
    """Run a command that prints JSON; None if it fails, as it does when it runs out of memory."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout.strip() or done.stderr.strip()[-200:] or done.returncode
    print(f"{' '.join(command[2:])}: {output}", file=sys.stderr)
    return json.loads(done.stdout) if done.returncode == 0 else None

"""What the benchmarks share: running two things in turn, a table, one JSON line."""

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


def in_turn(rounds: int, **things: Callable[[], float]) -> dict[str, list[float]]:
    """Call every thing once per round, so that a noisy moment of the machine hits all of them."""
    found: dict[str, list[float]] = {name: [] for name in things}
    for i in range(rounds):
        for name, thing in things.items():
            found[name].append(thing())
            print(f"round {i + 1}/{rounds} {name}: {found[name][-1]:.4g}", file=sys.stderr)
    return found


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """The median with the smallest and largest value."""
    return f"{median(values):,.4g} ({min(values):,.4g} to {max(values):,.4g})"


def report(title: str, rows: list[tuple[str, str]], result: dict[str, Any]) -> None:
    """A table for people on stderr, one JSON line on stdout."""
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}", file=sys.stderr)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}", file=sys.stderr)
    print(json.dumps(result))


def timed_command(command: list[str], **environment: str) -> tuple[float, int, str]:
    """Run a command: wall seconds, peak resident bytes, its standard output. Raises if it fails."""
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


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def plain_mlx() -> Iterator[None]:
    """Inside, what is traced has MLX's own attention, activation and loss where mlxlm has others."""
    from mlxlm.backend.mlx import mx, nn
    from mlxlm.model import attention as of_model
    from mlxlm.model import feed_forward
    from mlxlm.train import step as of_training

    def attention(queries, keys, values, scale, **_):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask="causal")

    def summed_loss(model, tokens, _segments, _weights):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="sum")

    places = ((of_model, "attention"), (feed_forward, "swiglu"), (of_training, "summed_loss"))
    own = [getattr(*place) for place in places]
    for place, other in zip(places, (attention, lambda gate, up: nn.silu(gate) * up, summed_loss), strict=True):
        setattr(*place, other)
    try:
        yield
    finally:
        for place, function in zip(places, own, strict=True):
            setattr(*place, function)

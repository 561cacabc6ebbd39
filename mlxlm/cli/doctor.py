"""`mlxlm doctor`: show what MLX finds on this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from mlxlm.backend import device, platform
from mlxlm.backend.blas import blas_warning, load_blas
from mlxlm.cli import render
from mlxlm.cli.options import json_option
from mlxlm.utils.formatting import human_bytes


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Show the device, MLX, the BLAS and its measured speed, memory, and the folder of downloaded models."""
    facts = collect()
    if as_json:
        render.emit_json(facts)
        return
    for name, value in facts.items():
        render.result(f"{name.replace('_', ' '):<24} {_format(name, value)}")
    for line in advice(facts):
        render.say(line, style="yellow")


def collect() -> dict[str, Any]:
    """Collect the facts; numbers are in bytes and GFLOP/s."""
    from importlib.metadata import version

    from mlxlm.backend.mlx import ON_CPU, mx
    from mlxlm.plan.machines import measure_matmul

    blas = load_blas()
    return {
        "chip": platform.chip(),
        "cores": platform.cpu_cores(),
        "device": "CPU" if ON_CPU else f"GPU ({mx.device_info().get('device_name', 'unnamed')})",
        "python": sys.version.split()[0],
        "mlx": version("mlx"),
        "metal": mx.metal.is_available(),
        "cuda": mx.cuda.is_available(),
        "blas": f"{blas.name} ({blas.path})" if blas.path else blas.name,
        "matmul_gflops": round(measure_matmul(), 1),
        "memory": platform.total_memory(),
        "working_set": device.device_memory(),
        "compiler": platform.has_compiler() if ON_CPU else "not needed",
        "model_cache": str(platform.model_cache()),
    }


def advice(facts: dict[str, Any]) -> list[str]:
    """Return what would make training faster, one line each."""
    lines = []
    if facts["device"] == "CPU":
        if warning := blas_warning():
            lines.append(warning)
        if not facts["compiler"]:
            lines.append("no g++ found: compiled graphs are off, training is slower (try: apt-get install g++)")
    return lines


def _format(name: str, value: Any) -> str:
    if name in ("memory", "working_set"):
        return "unknown" if value is None else human_bytes(value)
    if name == "matmul_gflops":
        return f"{value} GFLOP/s (float32, 1024 x 1024)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)

"""Memory of MLX's default device."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx

_processes = 1  # that train together on this machine


def split_memory_between(processes: int) -> None:
    """From now on `device_memory` is what each of so many processes may use; NVIDIA GPUs are each one's own."""
    global _processes
    _processes = processes


def device_memory() -> int | None:
    """Bytes that a model may use on the default device: a CPU's and an NVIDIA GPU's whole memory, on Metal what macOS
    recommends. None for a GPU that doesn't say."""
    if ON_CPU:
        return platform.total_memory() // _processes
    info = mx.device_info()
    if recommended := info.get("max_recommended_working_set_size"):
        return recommended // _processes
    return info.get("total_memory") or None

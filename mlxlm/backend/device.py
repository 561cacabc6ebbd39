"""Memory of MLX's default device."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx

_num_processes = 1  # that train together on this machine


def split_memory_between(num_processes: int) -> None:
    """Make `device_memory` the share of one of several processes. Each has an NVIDIA GPU of its own."""
    global _num_processes
    _num_processes = num_processes


def emulates_bfloat16() -> bool:
    """Whether the device computes bfloat16 in software, as the GPUs of M1 and M2 do (families G13 and G14)."""
    return mx.metal.is_available() and mx.device_info()["architecture"].startswith(("applegpu_g13", "applegpu_g14"))


def device_memory() -> int | None:
    """Bytes that a model may use on the default device, or None if a GPU doesn't tell.

    A CPU's and an NVIDIA GPU's whole memory; on Metal, the working set that macOS recommends.
    """
    if ON_CPU:
        return platform.total_memory() // _num_processes
    info = mx.device_info()
    if working_set := info.get("max_recommended_working_set_size"):
        return working_set // _num_processes
    return info.get("total_memory") or None

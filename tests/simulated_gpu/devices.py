"""The devices that can be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Device:
    """A GPU.

    Args:
        name: What MLX reports as `device_name`.
        backend: "metal" or "cuda".
        architecture: What MLX reports as `architecture`.
        memory: Bytes of memory, on a Mac shared with the CPU.
        working_set: On a Mac, the bytes that macOS recommends to use at most.
    """

    name: str
    backend: str
    architecture: str
    memory: int
    working_set: int = 0

    @property
    def info(self) -> dict[str, Any]:
        """What `mx.device_info()` returns."""
        if self.backend == "cuda":
            return {
                "device_name": self.name,
                "architecture": self.architecture,
                "total_memory": self.memory,
                "free_memory": self.memory - GIB,
                "compute_capability_major": 9,
                "compute_capability_minor": 0,
            }
        return {
            "device_name": self.name,
            "architecture": self.architecture,
            "memory_size": self.memory,
            "max_recommended_working_set_size": self.working_set,
            "max_buffer_length": self.memory // 2,
            "resource_limit": 499_000,
        }


# On Macs the working set is two thirds of a small memory, and three quarters of a large one.
DEVICES = {
    "simulated-m1": Device("Apple M1", "metal", "applegpu_g13g", 8 * GIB, 16 * GIB // 3),
    "simulated-m2": Device("Apple M2 Max", "metal", "applegpu_g14s", 32 * GIB, 24 * GIB),
    "simulated-m5": Device("Apple M5", "metal", "applegpu_g17g", 16 * GIB, 12 * GIB),
    "simulated-cuda": Device("NVIDIA H200", "cuda", "sm_90", 141 * 10**9),
}

"""MLX's default device: its memory, and how a CPU's cores share the rows of a batch in training."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
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


def num_batch_shards(batch_size: int) -> int:
    """Number of parts that a batch is divided into: one per CPU core, or 1 if it isn't divided.

    A batch isn't divided if unequal parts would waste a quarter of the cores' time, or if the BLAS can't be limited to
    one thread. Each part has its own gradients, as large as the weights. Measured on two cores only.
    """
    cores = platform.cpu_cores()
    if not ON_CPU or not load_blas().sets_threads or batch_size < cores:
        return 1
    largest_shard = -(-batch_size // cores)
    return cores if 4 * batch_size > 3 * cores * largest_shard else 1

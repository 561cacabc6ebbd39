"""How the rows of a batch are divided among a CPU's cores in training."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU


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

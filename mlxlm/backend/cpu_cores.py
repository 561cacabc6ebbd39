"""How a CPU's cores share the rows of a batch in training."""

from __future__ import annotations

from mlxlm.backend import platform
from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import ON_CPU


def num_batch_shards(batch_size: int) -> int:
    """Into how many parts the rows of a batch are cut here: one for each core of a CPU, or 1, which is not at all.

    Cores that have unequally many rows wait for each other: where a quarter of their time would be lost, the
    batch stays whole. So it does where the threads of the BLAS can't be set. Each part has gradients of its own, as
    large as the weights. Measured on two cores only.
    """
    cores = platform.cpu_cores()
    if not ON_CPU or not load_blas().sets_threads or batch_size < cores:
        return 1
    most_rows = -(-batch_size // cores)
    return cores if 4 * batch_size > 3 * cores * most_rows else 1

"""How many parts of a batch are computed at once."""

import pytest

from mlxlm.backend import device, platform
from mlxlm.backend.blas import Blas
from mlxlm.backend.device import num_batch_shards


@pytest.mark.parametrize(
    ("there", "batch_size", "parts"),
    [(2, 1, 1), (2, 2, 2), (2, 3, 1), (2, 5, 2), (2, 8, 2), (1, 8, 1), (4, 8, 4), (6, 8, 1), (6, 32, 6), (16, 8, 1)],
)
def test_num_batch_shards(monkeypatch, there, batch_size, parts):
    monkeypatch.setattr(platform, "cpu_cores", lambda: there)
    monkeypatch.setattr(device, "ON_CPU", True)
    assert num_batch_shards(batch_size) == parts


def test_one_shard_without_blas_threads_or_on_a_gpu(monkeypatch):
    monkeypatch.setattr(platform, "cpu_cores", lambda: 2)
    monkeypatch.setattr(device, "load_blas", lambda: Blas("BLIS", "libblis.so"))
    assert num_batch_shards(8) == 1
    monkeypatch.undo()
    monkeypatch.setattr(device, "ON_CPU", False)
    assert num_batch_shards(8) == 1

"""Device memory while decoding."""

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.generation import device_memory


@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers aren't on the heap")
def test_the_heap_is_trimmed_near_the_limit_of_the_process(monkeypatch):
    trimmed = []
    monkeypatch.setattr(device_memory.platform, "trim_heap", lambda: trimmed.append(1))
    monkeypatch.setattr(device_memory, "_trimmed", {})
    device_memory.clear_memory_cache()
    device_memory.trim_heap_from(1 << 50)
    device_memory.clear_memory_cache()
    assert not trimmed
    device_memory.trim_heap_from(1)
    device_memory.clear_memory_cache()
    assert trimmed == [1]

"""The memory of a run: flat over its steps, and within what the system recommends."""

import pytest

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.train import Step
from mlxlm.train import memory_limits as module
from mlxlm.train.memory_limits import limit_buffer_cache, memory_limits
from tests.train.training_runs import finish


def test_memory_does_not_grow(new_run, monkeypatch):
    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: 1)  # parts overlap by chance
    held = []
    real = Step.__init__

    def counted(self, *values):
        held.append(mx.get_active_memory() + mx.get_cache_memory())
        real(self, *values)

    monkeypatch.setattr(Step, "__init__", counted)
    changes = {"eval_every": 3, "eval_tokens": 256, "sample_every": 4, "sample_tokens": 20, "save_every": 5}
    finish(new_run("run", steps=24, ema_decay=0.9, **changes))
    assert len(held) == 24 and max(held[12:]) < 1.15 * max(held[:12])


@pytest.mark.skipif(not ON_CPU, reason="about the CPU backend")
def test_buffer_cache_on_a_cpu():
    before = mx.set_cache_limit(3 << 30)
    try:
        with memory_limits():
            mx.reset_peak_memory()
            mx.eval(mx.zeros((1 << 20,)))
            limit_buffer_cache()
            freed = mx.get_peak_memory() - mx.get_active_memory()
            assert mx.set_cache_limit(freed) == freed >= 4 << 20
        assert mx.set_cache_limit(3 << 30) == 3 << 30
    finally:
        mx.set_cache_limit(before)


@pytest.mark.skipif(mx.cuda.is_available(), reason="an NVIDIA GPU has no wired limit")
def test_memory_limit_on_metal(monkeypatch):
    before = mx.set_memory_limit(10 << 30)
    try:
        monkeypatch.setattr(module, "ON_CPU", False)
        monkeypatch.setattr(mx.metal, "is_available", lambda: False)
        with memory_limits():
            assert mx.set_memory_limit(10 << 30) == 10 << 30
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr("mlxlm.backend.device.device_memory", lambda: 6 << 30)
        with memory_limits():
            assert mx.set_memory_limit(6 << 30) == 6 << 30
        assert mx.set_memory_limit(10 << 30) == 10 << 30
    finally:
        mx.set_memory_limit(before)

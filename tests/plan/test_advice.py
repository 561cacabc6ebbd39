"""What fits in memory, and changes that make training fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from mlxlm.backend import device, mlx, platform
from mlxlm.backend.mlx import mx
from mlxlm.families import load_preset
from mlxlm.plan import Training, find_limits, suggest_change, training_memory
from mlxlm.plan.inference import Serving
from mlxlm.plan.machines import this_machine
from mlxlm.utils.errors import ConfigError

SMALL = Training(batch_size=2, max_seq_length=64)


def test_find_limits():
    config, memory = load_preset("1m"), 1 << 30
    found = find_limits(config, SMALL, Serving(), memory)
    assert found.training and found.inference
    for name in ("batch_size", "max_seq_length"):
        largest = getattr(found, name)
        assert training_memory(config, replace(SMALL, **{name: largest})).total <= 0.9 * memory
        assert training_memory(config, replace(SMALL, **{name: largest + 1})).total > 0.9 * memory
    assert training_memory(load_preset(found.preset), SMALL).total <= 0.9 * memory
    assert find_limits(config, SMALL, Serving(), 10**6).batch_size == 0


def test_cheapest_change_that_fits():
    config = load_preset("5m")
    training = Training(batch_size=16, max_seq_length=512, device="cpu")
    assert suggest_change(config, training, 1 << 40) is None
    change = suggest_change(config, training, 2 * 10**9)
    assert change.text == "--batch-size 8 --grad-accumulation-steps 2"
    assert change.peak_memory == training_memory(config, change.training).total <= 0.9 * 2 * 10**9
    alone = replace(training, batch_size=1)
    assert suggest_change(config, alone, 200 * 10**6).text == "--grad-checkpoint"
    together = suggest_change(config, alone, 140 * 10**6)
    assert together.text == "--grad-checkpoint --optimizer-state int8"
    assert (together.training.grad_checkpoint, together.training.optimizer_state) == (True, "int8")
    assert (
        suggest_change(config, replace(alone, grad_checkpoint=True, optimizer="adafactor"), 60 * 10**6).text
        == "preset 1m"
    )
    assert suggest_change(config, alone, 10**6) is None


def test_preset_in_the_hint(monkeypatch):
    from mlxlm.train import TrainSettings
    from mlxlm.train.memory_limits import check_memory

    config = load_preset("5m")
    small = {"batch_size": 1, "max_seq_length": 512, "grad_checkpoint": True, "optimizer": "adafactor"}
    settings = TrainSettings(steps=1, learning_rate=1.0, **small)
    monkeypatch.setattr(device, "device_memory", lambda: 60 * 10**6)
    with pytest.raises(ConfigError, match=r"try: --preset (1m|0\.3m), which takes"):
        check_memory(config, settings)
    with pytest.raises(ConfigError, match="try: a smaller model"):
        check_memory(config, settings, preset="")


@pytest.mark.parametrize("info", ["max_recommended_working_set_size", "total_memory"])
def test_memory_of_the_device(info, monkeypatch):
    """By a plan and by training; where nobody knows how much it is, by neither."""
    from mlxlm.train import TrainSettings
    from mlxlm.train.budget import auto_size
    from mlxlm.train.memory_limits import check_memory

    config, settings = load_preset("1m"), TrainSettings(steps=1, learning_rate=1.0)
    monkeypatch.setattr(mlx, "ON_CPU", False)
    monkeypatch.setattr(device, "ON_CPU", False)
    memory = round(training_memory(config, Training.from_settings(settings)).total / 0.9)
    found = {info: memory + 9}
    monkeypatch.setattr(mx, "device_info", lambda: found)
    monkeypatch.setattr("mlxlm.train.budget.measure_matmul", lambda **options: 50.0)
    assert this_machine(measure=False).memory == memory + 9
    check_memory(config, settings)
    found[info] = memory - 9
    with pytest.raises(ConfigError, match="training takes about"):
        check_memory(config, settings)
    found[info] = 1000
    with pytest.raises(ConfigError, match="no model fits the memory"):
        auto_size(60.0, 1000, 300, {})
    found.clear()
    assert this_machine(measure=False).memory is None
    check_memory(config, settings)


@pytest.mark.parametrize("memory", [160, 180, 200, 250, 300, 350, 500, 700, 900, 1100])
def test_every_suggested_change_is_needed(memory):
    """Each change taken back, or a batch twice as large, is too much."""
    config, there = load_preset("5m"), 0.9 * memory * 10**6
    training = Training(batch_size=16, max_seq_length=512)
    found = suggest_change(config, training, memory * 10**6)
    assert found.peak_memory <= there
    for field in ("attention", "grad_checkpoint", "optimizer"):
        if getattr(found.training, field) != getattr(training, field):
            less = replace(found.training, **{field: getattr(training, field)})
            assert training_memory(config, less).total > there, field
    if found.training.batch_size < 16:
        larger = replace(found.training, batch_size=2 * found.training.batch_size)
        assert training_memory(config, larger).total > there


def test_environment_variable_in_the_suggestion():
    config = load_preset("5m")
    training = Training(batch_size=1, max_seq_length=768, grad_checkpoint=True, device="cpu")
    with_kernels = replace(training, attention="blockwise")
    needed = training_memory(config, with_kernels).total
    assert needed < training_memory(config, training).total
    change = suggest_change(config, training, round(needed / 0.9) + 1)
    assert change.text == "MLXLM_KERNELS=blockwise in the environment" and change.training == with_kernels


def test_larger_batch_that_cores_do_not_share(monkeypatch):
    from mlxlm.backend import device

    monkeypatch.setattr(device, "ON_CPU", True)
    monkeypatch.setattr(device, "load_blas", lambda: SimpleNamespace(sets_threads=True))
    monkeypatch.setattr(platform, "cpu_cores", lambda: 16)
    config, training = load_preset("5m"), replace(SMALL, batch_size=16, device="cpu")
    whole = replace(training, batch_size=20)
    assert (training.num_workers, whole.num_workers) == (16, 1)
    memory = round(training_memory(config, whole).total / 0.9) + 1
    found = find_limits(config, training, Serving(), memory)
    assert not found.training and found.batch_size == 20
    assert find_limits(config, training, Serving(), 1 << 40).batch_size > 10**4

"""`mlxlm.plan`: settings, time, probes and forecasts."""

import json
from dataclasses import replace

import pytest

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.families import load_preset
from mlxlm.plan import MACHINES, Training
from mlxlm.plan.inference import Serving
from mlxlm.utils.errors import ConfigError


def test_invalid_settings():
    with pytest.raises(ConfigError, match="batch_size is 0, .*optimizer is 'sgd', it must be one of adamw, muon"):
        Training(batch_size=0, optimizer="sgd")
    with pytest.raises(ConfigError, match="bits is 7, it must be one of 32, 16, .*kv_bits is 3"):
        Serving(bits=7, kv_bits=3)
    with pytest.raises(ConfigError, match="unknown machine 'pdp11'"):
        mlxlm.plan("1m", machine="pdp11")
    with pytest.raises(ConfigError, match="unknown option nonsense"):
        mlxlm.plan("1m", machine="a100", nonsense=3)
    with pytest.raises(ConfigError, match="tokens is 'x'"):
        mlxlm.plan("1m", machine="a100", tokens="x")
    with pytest.raises(ConfigError, match="there is no model 'nothing here'"):
        mlxlm.plan("nothing here", machine="a100")


def test_package_is_callable():
    planned = mlxlm.plan("1m", machine="a100", batch_size=4, bits=4)
    assert planned.training.batch_size == 4 and planned.serving.bits == 4
    assert mlxlm.plan.plan("1m", machine="a100", batch_size=4, bits=4) == planned
    assert json.loads(json.dumps(planned.to_dict()))["parameters"]["total"] == planned.parameter_count


def test_duration():
    planned = mlxlm.plan("1m", machine="a100", num_devices=2, mfu=0.5, tokens=1e9)
    assert planned.duration.seconds == pytest.approx(planned.flops.per_token * 1e9 / (2 * 312e12 * 0.5))
    probed = mlxlm.plan("1m", machine="a100", tokens=4096 * 10).with_measurement(2.0, 10**9)
    assert probed.measured_duration.seconds == pytest.approx(20.0) and probed.measured_memory == 10**9
    assert probed.measured_duration.mfu == pytest.approx(probed.flops.computed_per_step / 2.0 / 312e12)
    assert probed.duration.mfu_source == "assumed" and probed.duration.seconds < 1


def test_probe_frees_memory_and_forecasts_the_run():
    from mlxlm.train import TrainSettings
    from mlxlm.train.step_benchmark import Probe, probe

    settings = TrainSettings(steps=10, learning_rate=1.0, batch_size=2, max_seq_length=16)
    before = mx.get_active_memory()
    probe(load_preset("0.3m"), settings)
    assert mx.get_active_memory() - before < 1 << 16
    run = replace(settings, steps=101, eval_every=50, eval_tokens=160)
    found = Probe(compile_seconds=7.0, step=0.5, validation=0.25, memory=123).forecast(run, validation_tokens=10_000)
    # 100 steps after the first; 3 validations of 10 windows, 5 batches.
    assert (found.steps, found.step_seconds, found.memory) == (101, 57.0, 123)
    assert found.seconds == 57.0 + 3 * 5 * 0.25 and found.validations == 3


def test_long_run_logs_a_forecast(tmp_path, text_file, tiny_config):
    from mlxlm.report.log_entries import read_log_entries
    from mlxlm.train import start_run

    settings = {"batch_size": 2, "max_seq_length": 16, "steps": 99}
    short = start_run(tmp_path / "short", [text_file], tiny_config, settings=settings)
    assert list(read_log_entries(short.log_file)) == []
    run = start_run(tmp_path / "run", [short.data], tiny_config, settings={**settings, "steps": 100})
    (forecast,) = read_log_entries(run.log_file)
    assert forecast["event"] == "forecast" and forecast["steps"] == 100
    assert 0 < forecast["step_seconds"] < forecast["seconds"]
    assert forecast["memory"] > 12 * tiny_config.parameter_count()


def test_apple_machines():
    planned = mlxlm.plan("1b", machine="m4-max", memory=36 * 10**9, bits=4, context_length=4096)
    assert planned.duration.machine.bandwidth == 546e9 and planned.fits.memory == 36 * 10**9
    assert mlxlm.plan("1b", machine="m4-max").fits is None  # sold with several sizes
    inference, embedding = planned.inference, planned.parameters["embedding"]
    assert inference.total - inference.bytes_per_step == pytest.approx(
        inference.weights * embedding / planned.parameter_count, abs=1
    )
    apple = {name: machine for name, machine in MACHINES.items() if machine.device_type == "metal"}
    assert len(apple) == 18 and all(machine.bandwidth and machine.memory_options for machine in apple.values())

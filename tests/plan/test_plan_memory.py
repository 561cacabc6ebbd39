"""Memory of training: the planner's parts, real steps beside them, what fits, and what would."""

import json
from dataclasses import replace

import pytest

import mlxlm
from mlxlm.config import ModelConfig
from mlxlm.errors import ConfigError
from mlxlm.plan import Training, cheapest, fits, training_memory
from mlxlm.plan.inference import Serving
from mlxlm.plan.memory import layer_bytes, optimizer_bytes

SMALL = Training(batch_size=2, sequence_length=64)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "adafactor"])
def test_the_optimizer_holds_what_is_planned(optimizer):
    from mlxlm._mlx import mx, tree_flatten
    from mlxlm.model import Decoder
    from mlxlm.train import TrainSettings
    from mlxlm.train.step import TrainStep

    config = ModelConfig.preset("0.3m").with_changes(tie_word_embeddings=False, attention_bias=True, norm="layer")
    step = TrainStep(Decoder(config), TrainSettings(steps=1, learning_rate=1.0, optimizer=optimizer))
    held = {name: array for name, array in step.save_state().items() if array.size > 2}
    mx.eval(held)
    assert sum(array.nbytes for _, array in tree_flatten(held)) == optimizer_bytes(config, optimizer)


def test_activations_of_a_layer_by_hand():
    """Stream and norm twice, queries and result, keys and values, gate, up and product; and of the
    scores, in blocks of 64 rows, 3/4 of 128 x 128."""
    config = ModelConfig(64, 2, 4, 160, 100, num_key_value_heads=2)
    numbers = 4 * 64 + 2 * 64 + 2 * 32 + 3 * 160
    assert layer_bytes(config, Training(sequence_length=128)) == 4 * (numbers + 4 * 128 * 3 // 4)
    fused = Training(sequence_length=128, attention="fused")
    assert layer_bytes(config, fused) == 4 * (numbers + 4)
    assert layer_bytes(config, replace(fused, dtype="bfloat16")) == 2 * numbers + 4 * 4
    plain = config.with_changes(mlp_gated=False, norm_placement="both")
    assert layer_bytes(plain, fused) == 4 * (numbers + 2 * 64 - 160 + 4)


@pytest.mark.parametrize(
    ("batch", "length", "options"),
    [(8, 128, {}), (1, 1024, {}), (4, 128, {"accumulate": 2, "ema": 0.9})],
)
def test_a_real_step_is_near_the_plan(batch, length, options):
    """MLX takes memory ahead of the computing thread, so that its peak depends on how busy the machine is."""
    from mlxlm.train import TrainSettings, probe

    config = ModelConfig.preset("0.3m", max_position_embeddings=length)
    settings = TrainSettings(1, 1.0, batch_size=batch, sequence_length=length, **options)
    planned, found = training_memory(config, Training.of(settings)), probe(config, settings)
    assert planned.total / found.memory == pytest.approx(1, abs=0.25)
    assert found.memory > planned.states and found.step > 0 and found.validation == 0


def test_a_probe_leaves_nothing_and_forecasts_the_run():
    from mlxlm._mlx import mx
    from mlxlm.train import Probe, TrainSettings, probe

    settings = TrainSettings(steps=10, learning_rate=1.0, batch_size=2, sequence_length=16)
    before = mx.get_active_memory()
    probe(ModelConfig.preset("0.3m"), settings)
    assert mx.get_active_memory() - before < 1 << 16
    run = replace(settings, steps=101, eval_every=50, eval_tokens=160)
    found = Probe(compiling=7.0, step=0.5, validation=0.25, memory=123).forecast(run, held_out=10_000)
    # 100 steps after the first; 3 validations of 10 windows, 5 batches.
    assert (found.steps, found.step_seconds, found.memory) == (101, 57.0, 123)
    assert found.seconds == 57.0 + 3 * 5 * 0.25


def test_what_costs_less_memory():
    config = ModelConfig.preset("5m")

    def total(**changes):
        return training_memory(config, replace(Training(batch_size=8, sequence_length=512), **changes)).total

    plain = total(loss_chunk=0)
    assert total() < plain
    assert total(attention="blockwise") < total()
    assert total(recompute=True) < 0.5 * total()
    assert total(batch_size=4, accumulate=2) < total()
    assert total(optimizer="lion") < total()
    assert total(ema=0.99) == total() + 4 * config.parameter_count()


def test_the_largest_that_fits():
    config, memory = ModelConfig.preset("1m"), 1 << 30
    found = fits(config, SMALL, Serving(), memory)
    assert found.training and found.inference
    for name in ("batch_size", "sequence_length"):
        largest = getattr(found, name)
        assert training_memory(config, replace(SMALL, **{name: largest})).total <= 0.9 * memory
        assert training_memory(config, replace(SMALL, **{name: largest + 1})).total > 0.9 * memory
    assert training_memory(ModelConfig.preset(found.preset), SMALL).total <= 0.9 * memory
    assert fits(config, SMALL, Serving(), 10**6).batch_size == 0


def test_the_cheapest_change_that_fits():
    config = ModelConfig.preset("5m")
    training = Training(batch_size=16, sequence_length=512)
    assert cheapest(config, training, 1 << 40) is None
    change = cheapest(config, training, 2 * 10**9)
    assert change.text == "--batch-size 8 --accumulate 2"
    assert change.needed == training_memory(config, change.training).total <= 0.9 * 2 * 10**9
    alone = replace(training, batch_size=1)
    assert cheapest(config, alone, 200 * 10**6).text == "--recompute"
    together = cheapest(config, alone, 140 * 10**6)
    assert together.text == "--recompute --optimizer adafactor"
    assert (together.training.recompute, together.training.optimizer) == (True, "adafactor")
    assert cheapest(config, replace(alone, recompute=True, optimizer="adafactor"), 60 * 10**6).text == "preset 1m"
    assert cheapest(config, alone, 10**6) is None


@pytest.mark.parametrize("memory", [150, 160, 200, 250, 300, 350, 500, 700, 900, 1100])
def test_no_change_is_advised_that_is_not_needed(memory):
    """Each change taken back, or a batch twice as large, is too much."""
    config, there = ModelConfig.preset("5m"), 0.9 * memory * 10**6
    training = Training(batch_size=16, sequence_length=512)
    found = cheapest(config, training, memory * 10**6)
    assert found.needed <= there
    for field in ("attention", "recompute", "optimizer"):
        if getattr(found.training, field) != getattr(training, field):
            less = replace(found.training, **{field: getattr(training, field)})
            assert training_memory(config, less).total > there, field
    if found.training.batch_size < 16:
        larger = replace(found.training, batch_size=2 * found.training.batch_size)
        assert training_memory(config, larger).total > there


def test_a_variable_stands_before_the_command():
    config = ModelConfig.preset("5m")
    training = Training(batch_size=1, sequence_length=768, recompute=True, device="cpu")
    with_kernels = replace(training, attention="blockwise")
    needed = training_memory(config, with_kernels).total
    assert needed < training_memory(config, training).total
    change = cheapest(config, training, round(needed / 0.9) + 1)
    assert change.text == "MLXLM_KERNELS=blockwise mlxlm pretrain ..." and change.training == with_kernels


@pytest.mark.parametrize(
    ("device", "path"), [("cpu", "blockwise"), ("metal", "fused"), ("cuda", "fused")]
)  # fmt: skip
def test_the_path_is_what_training_takes_there(device, path):
    """Long sequences; ALiBi, which MLX's own attention doesn't have; and what is in blocks of the device's size."""
    config, training = ModelConfig.preset("5m"), Training(dtype="bfloat16", device=device)
    long = replace(training, sequence_length=1024)
    assert (training.path(config), long.path(config)) == ("plain", path)
    assert replace(training, sequence_length=512).path(config.with_changes(positions="alibi")) == "blockwise"
    assert replace(training, attention="fused").path(config) == "fused"
    expected = (8 if device == "cpu" else 256) << 20
    assert replace(long, batch_size=1 << 20).loss_rows(4096) == expected // (4 * 4096)


def test_devices_share_the_batch_in_memory_as_well_as_in_time():
    one, four = (mlxlm.plan("5m", machine="a100", devices=n, batch_size=16) for n in (1, 4))
    assert four.memory == mlxlm.plan("5m", machine="a100", batch_size=4).memory
    assert four.memory.states == one.memory.states and four.training.batch_size == 16
    assert four.duration.seconds == pytest.approx(one.duration.seconds / 4)
    parts = mlxlm.plan("5m", machine="a100", devices=4, batch_size=2, accumulate=8)
    assert parts.memory == mlxlm.plan("5m", machine="a100", batch_size=2, accumulate=2).memory


def test_each_core_has_gradients_of_its_own(monkeypatch):
    from mlxlm.plan import training as module

    config, training = ModelConfig.preset("5m"), replace(SMALL, device="cpu")
    found = {}
    for parts in (1, 2):
        monkeypatch.setattr(module, "parts_of", lambda batch_size, parts=parts: parts)
        found[parts] = training_memory(config, training)
    assert found[2].gradients == 2 * found[1].gradients == 8 * config.parameter_count()
    assert found[2].activations == found[1].activations


def test_use_here_is_in_what_the_device_computes_with():
    from mlxlm.plan.inference import usual_serving
    from mlxlm.plan.machines import MACHINES, Machine

    config = ModelConfig.preset("5m")
    here = usual_serving(Machine("here", 1e9, "float32", None, True, "", "cpu"), config)
    assert (here.bits, here.kv_bits, here.context) == (32, 32, 512)
    assert usual_serving(MACHINES["a100"], config).bits == 16


def test_impossible_plans_are_one_error():
    with pytest.raises(ConfigError, match="batch_size is 0, .*optimizer is 'sgd', it must be one of adamw, muon"):
        Training(batch_size=0, optimizer="sgd")
    with pytest.raises(ConfigError, match="bits is 7, it must be one of 32, 16, .*kv_bits is 3"):
        Serving(bits=7, kv_bits=3)
    with pytest.raises(ConfigError, match="no machine 'pdp11' in the table"):
        mlxlm.plan("1m", machine="pdp11")
    with pytest.raises(ConfigError, match="a plan has no nonsense"):
        mlxlm.plan("1m", machine="a100", nonsense=3)
    with pytest.raises(ConfigError, match="tokens is 'x'"):
        mlxlm.plan("1m", machine="a100", tokens="x")
    with pytest.raises(ConfigError, match="there is no model 'nothing here'"):
        mlxlm.plan("nothing here", machine="a100")


def test_the_package_is_the_function():
    planned = mlxlm.plan("1m", machine="a100", batch_size=4, bits=4)
    assert planned.training.batch_size == 4 and planned.serving.bits == 4
    assert mlxlm.plan.plan("1m", machine="a100", batch_size=4, bits=4) == planned
    assert json.loads(json.dumps(planned.to_dict()))["parameters"]["total"] == planned.parameter_count


def test_time_is_work_over_speed():
    planned = mlxlm.plan("1m", machine="a100", devices=2, utilisation=0.5, tokens=1e9)
    assert planned.duration.seconds == pytest.approx(planned.flops.per_token * 1e9 / (2 * 312e12 * 0.5))
    probed = mlxlm.plan("1m", machine="a100", tokens=4096 * 10).probed(2.0, 10**9)
    assert probed.measured_duration.seconds == pytest.approx(20.0) and probed.measured == 10**9
    assert probed.measured_duration.utilisation == pytest.approx(probed.flops.done_per_step / 2.0 / 312e12)
    assert probed.duration.known == "assumed" and probed.duration.seconds < 1


def test_a_text_and_its_passes(text_file):
    from mlxlm.plan.corpus import bytes_per_token

    planned = mlxlm.plan("0.3m", machine="a100", data=[text_file], tokens=1e6)
    assert planned.corpus.tokens == pytest.approx(text_file.stat().st_size / bytes_per_token(512))
    assert planned.epochs == pytest.approx(1e6 / planned.corpus.tokens) and not planned.corpus.counted
    assert planned.disk.shards == 2 * round(planned.corpus.tokens)


def test_a_run_of_many_steps_begins_with_its_forecast(tmp_path, text_file, tiny_config):
    from mlxlm.train import start_run

    settings = {"batch_size": 2, "sequence_length": 16, "steps": 99}
    short = start_run(tmp_path / "short", [text_file], tiny_config, settings=settings)
    assert short.read_log() == []
    run = start_run(tmp_path / "run", [short.data], tiny_config, settings={**settings, "steps": 100})
    (forecast,) = run.read_log()
    assert forecast["event"] == "forecast" and forecast["steps"] == 100
    assert 0 < forecast["step_seconds"] < forecast["seconds"]
    assert forecast["memory"] > 12 * tiny_config.parameter_count()

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
    [(1, 8, {}), (8, 128, {}), (2, 512, {}), (1, 1024, {}), (4, 128, {"accumulate": 2}), (4, 128, {"ema": 0.9})],
)
def test_a_real_step_is_near_the_plan(batch, length, options):
    """MLX takes memory ahead of the computing thread, so that its peak depends on how busy the machine is."""
    from mlxlm.train import TrainSettings, probe

    config = ModelConfig.preset("0.3m", max_position_embeddings=length)
    settings = TrainSettings(1, 1.0, batch_size=batch, sequence_length=length, **options)
    planned, found = training_memory(config, Training.of(settings)), probe(config, settings)
    assert planned.total / found.memory == pytest.approx(1, abs=0.45)
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
    assert together.text == "MLXLM_KERNELS=blockwise, --recompute, --optimizer adafactor"
    assert (together.training.recompute, together.training.optimizer) == (True, "adafactor")
    assert cheapest(config, replace(alone, recompute=True, optimizer="adafactor"), 60 * 10**6).text == "preset 1m"
    assert cheapest(config, alone, 10**6) is None


def test_impossible_plans_are_one_error():
    with pytest.raises(ConfigError, match="batch_size is 0, .*optimizer is 'sgd', it must be one of adamw, muon"):
        Training(batch_size=0, optimizer="sgd")
    with pytest.raises(ConfigError, match="bits is 7, it must be one of 32, 16, .*kv_bits is 3"):
        Serving(bits=7, kv_bits=3)
    with pytest.raises(ConfigError, match="no machine 'pdp11' in the table"):
        mlxlm.plan("1m", machine="pdp11")
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
    assert probed.duration.seconds == pytest.approx(20.0) and probed.measured == 10**9
    assert probed.duration.utilisation == pytest.approx(probed.flops.per_step / 2.0 / 312e12)


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

"""Memory of training: the planner's parts, real steps beside them, what fits, and what would."""

import gzip
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

import mlxlm
from mlxlm.backend import device, mlx, platform
from mlxlm.backend.mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.families import load_preset
from mlxlm.plan import Training, count_training_flops, find_limits, suggest_change, training_memory
from mlxlm.plan.corpus import count_corpus
from mlxlm.plan.inference import Serving
from mlxlm.plan.machines import this_machine
from mlxlm.plan.memory import layer_bytes, optimizer_bytes
from mlxlm.utils.errors import ConfigError, DataError

SMALL = Training(batch_size=2, max_seq_length=64)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lion", "adafactor"])
def test_the_optimizer_holds_what_is_planned(optimizer):
    from mlxlm.backend.mlx import mx, tree_flatten
    from mlxlm.model import Decoder
    from mlxlm.train import TrainSettings
    from mlxlm.train.step import TrainStep

    config = load_preset("0.3m").with_changes(tie_word_embeddings=False, attention_bias=True, norm="layer")
    step = TrainStep(Decoder(config), TrainSettings(steps=1, learning_rate=1.0, optimizer=optimizer))
    held = {name: array for name, array in step.save_state().items() if array.size > 2}
    mx.eval(held)
    assert sum(array.nbytes for _, array in tree_flatten(held)) == optimizer_bytes(config, optimizer)


def test_activations_of_a_layer_by_hand():
    """Stream and norm twice, queries and result, keys and values, gate, up and product; and of the
    scores, in blocks of 64 rows, 3/4 of 128 x 128."""
    config = ModelConfig(64, 2, 4, 160, 100, num_key_value_heads=2)
    numbers = 4 * 64 + 2 * 64 + 2 * 32 + 3 * 160
    assert layer_bytes(config, Training(max_seq_length=128)) == 4 * (numbers + 4 * 128 * 3 // 4)
    fused = Training(max_seq_length=128, attention="fused")
    assert layer_bytes(config, fused) == 4 * (numbers + 4)
    assert layer_bytes(config, replace(fused, dtype="bfloat16")) == 2 * numbers + 4 * 4
    plain = config.with_changes(mlp_gated=False, norm_placement="both")
    assert layer_bytes(plain, fused) == 4 * (numbers + 2 * 64 - 160 + 4)


@pytest.mark.parametrize(
    ("batch", "length", "options"),
    [
        (8, 128, {}),
        (1, 1024, {}),
        (4, 128, {"grad_accumulation_steps": 2, "ema_decay": 0.9}),
        (2, 16, {"grad_accumulation_steps": 3}),
    ],
)
def test_a_real_step_is_near_the_plan(batch, length, options):
    """MLX takes memory ahead of the computing thread, so that its peak depends on how busy the machine is."""
    from mlxlm.train import TrainSettings, probe

    config = load_preset("0.3m", max_position_embeddings=length)
    settings = TrainSettings(1, 1.0, batch_size=batch, max_seq_length=length, **options)
    planned = training_memory(config, Training.from_settings(settings))
    found = max((probe(config, settings) for _ in range(2)), key=lambda found: found.memory)
    assert planned.total / found.memory == pytest.approx(1, abs=0.25)
    assert found.memory > planned.states and found.step > 0 and found.validation == 0


def test_a_probe_leaves_nothing_and_forecasts_the_run():
    from mlxlm.backend.mlx import mx
    from mlxlm.train import Probe, TrainSettings, probe

    settings = TrainSettings(steps=10, learning_rate=1.0, batch_size=2, max_seq_length=16)
    before = mx.get_active_memory()
    probe(load_preset("0.3m"), settings)
    assert mx.get_active_memory() - before < 1 << 16
    run = replace(settings, steps=101, eval_every=50, eval_tokens=160)
    found = Probe(compile_seconds=7.0, step=0.5, validation=0.25, memory=123).forecast(run, validation_tokens=10_000)
    # 100 steps after the first; 3 validations of 10 windows, 5 batches.
    assert (found.steps, found.step_seconds, found.memory) == (101, 57.0, 123)
    assert found.seconds == 57.0 + 3 * 5 * 0.25 and found.validations == 3


def test_what_costs_less_memory():
    config = load_preset("5m")

    def total(**changes):
        return training_memory(config, replace(Training(batch_size=8, max_seq_length=512), **changes)).total

    plain = total(loss_chunk_size=0)
    assert total() < plain
    assert total(attention="blockwise") < total()
    assert total(grad_checkpoint=True) < 0.5 * total()
    assert total(batch_size=4, grad_accumulation_steps=2) < total()
    assert total(optimizer="lion") < total()
    assert total(ema_decay=0.99) == total() + 4 * config.parameter_count()


def test_the_largest_that_fits():
    config, memory = load_preset("1m"), 1 << 30
    found = find_limits(config, SMALL, Serving(), memory)
    assert found.training and found.inference
    for name in ("batch_size", "max_seq_length"):
        largest = getattr(found, name)
        assert training_memory(config, replace(SMALL, **{name: largest})).total <= 0.9 * memory
        assert training_memory(config, replace(SMALL, **{name: largest + 1})).total > 0.9 * memory
    assert training_memory(load_preset(found.preset), SMALL).total <= 0.9 * memory
    assert find_limits(config, SMALL, Serving(), 10**6).batch_size == 0


def test_the_cheapest_change_that_fits():
    config = load_preset("5m")
    training = Training(batch_size=16, max_seq_length=512)
    assert suggest_change(config, training, 1 << 40) is None
    change = suggest_change(config, training, 2 * 10**9)
    assert change.text == "--batch-size 8 --grad-accumulation-steps 2"
    assert change.peak_memory == training_memory(config, change.training).total <= 0.9 * 2 * 10**9
    alone = replace(training, batch_size=1)
    assert suggest_change(config, alone, 200 * 10**6).text == "--grad-checkpoint"
    together = suggest_change(config, alone, 140 * 10**6)
    assert together.text == "--grad-checkpoint --optimizer adafactor"
    assert (together.training.grad_checkpoint, together.training.optimizer) == (True, "adafactor")
    assert (
        suggest_change(config, replace(alone, grad_checkpoint=True, optimizer="adafactor"), 60 * 10**6).text
        == "preset 1m"
    )
    assert suggest_change(config, alone, 10**6) is None


def test_a_preset_is_advised_as_it_is_asked_for(monkeypatch):
    from mlxlm.train import TrainSettings
    from mlxlm.train.memory_limits import check_memory

    config = load_preset("5m")
    small = {"batch_size": 1, "max_seq_length": 512, "grad_checkpoint": True, "optimizer": "adafactor"}
    settings = TrainSettings(steps=1, learning_rate=1.0, **small)
    monkeypatch.setattr(device, "device_memory", lambda: 60 * 10**6)
    with pytest.raises(ConfigError, match="try: --preset 1m, which takes"):
        check_memory(config, settings)
    with pytest.raises(ConfigError, match="try: a smaller model"):
        check_memory(config, settings, preset="")


@pytest.mark.parametrize("info", ["max_recommended_working_set_size", "total_memory"])
def test_what_fits_is_judged_by_the_devices_memory(info, monkeypatch):
    """By a plan and by training; where nobody knows how much it is, by neither."""
    from mlxlm.train import TrainSettings
    from mlxlm.train.auto_size import auto_size
    from mlxlm.train.memory_limits import check_memory

    config, settings = load_preset("1m"), TrainSettings(steps=1, learning_rate=1.0)
    memory = round(training_memory(config, Training.from_settings(settings)).total / 0.9)
    found = {info: memory + 9}
    monkeypatch.setattr(mlx, "ON_CPU", False)
    monkeypatch.setattr(device, "ON_CPU", False)
    monkeypatch.setattr(mx, "device_info", lambda: found)
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


@pytest.mark.parametrize("memory", [150, 160, 200, 250, 300, 350, 500, 700, 900, 1100])
def test_no_change_is_advised_that_is_not_needed(memory):
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


def test_a_variable_is_told_from_an_option():
    config = load_preset("5m")
    training = Training(batch_size=1, max_seq_length=768, grad_checkpoint=True, device="cpu")
    with_kernels = replace(training, attention="blockwise")
    needed = training_memory(config, with_kernels).total
    assert needed < training_memory(config, training).total
    change = suggest_change(config, training, round(needed / 0.9) + 1)
    assert change.text == "MLXLM_KERNELS=blockwise in the environment" and change.training == with_kernels


@pytest.mark.parametrize(
    ("device", "path"), [("cpu", "blockwise"), ("metal", "fused"), ("cuda", "fused")]
)  # fmt: skip
def test_the_path_is_what_training_takes_there(device, path):
    """Long sequences; ALiBi, which MLX's own attention doesn't have; and what is in blocks of the device's size."""
    config, training = load_preset("5m"), Training(dtype="bfloat16", device=device)
    long = replace(training, max_seq_length=1024)
    assert (training.attention_path(config), long.attention_path(config)) == ("plain", path)
    assert replace(training, max_seq_length=512).attention_path(config.with_changes(positions="alibi")) == "blockwise"
    assert replace(training, attention="fused").attention_path(config) == "fused"
    expected = (8 if device == "cpu" else 256) << 20
    assert replace(long, batch_size=1 << 20).loss_rows(4096) == expected // (4 * 4096)


def test_each_device_has_a_batch_of_its_own():
    one, three = (
        mlxlm.plan("5m", machine="a100", num_devices=n, batch_size=16, grad_accumulation_steps=2) for n in (1, 3)
    )
    assert (three.memory, three.fits) == (one.memory, one.fits)
    assert three.flops.tokens_per_step == 3 * one.flops.tokens_per_step == 3 * 16 * 2 * 256
    assert three.duration.seconds == pytest.approx(one.duration.seconds / 3)
    assert three.duration.seconds_per_step == pytest.approx(one.duration.seconds_per_step)


def test_keys_of_a_window_that_are_computed():
    """On a CPU those that any row of a block sees, on a GPU the whole square; as many where there is no window."""
    config = load_preset("1m").with_changes(sliding_window=64)
    training = Training(max_seq_length=512, device="cpu", attention="plain")
    assert training.keys_computed(config) == (128 + 3 * (128 + 64 - 1)) / 4
    assert training.keys_computed(config.with_changes(sliding_window=None)) == (128 + 256 + 384 + 512) / 4
    square = replace(training, device="cuda")
    assert square.keys_computed(config) == 512 and count_training_flops(config, square).computed_fraction == 8
    assert replace(training, attention="fused").keys_computed(config) == 64
    assert replace(training, attention="blockwise").keys_computed(config) == (64 + 7 * (64 + 64 - 1)) / 8


def test_blocks_of_a_window_are_those_that_are_kept(monkeypatch):
    """Beside the masks that attention makes."""
    from mlxlm.backend.mlx import mx
    from mlxlm.kernels import mlx_attention as module

    kept = []
    monkeypatch.setattr(module, "ON_CPU", True)
    monkeypatch.setattr(module, "_attend", lambda rows, keys, values, mask: (kept.append(mask.size), [rows])[1])
    heads = mx.zeros((1, 4, 300, 8))
    module.mlx_attention(heads, heads, heads, 1.0, window=20)
    config = ModelConfig(32, 1, 4, 8, 8, sliding_window=20)
    training = Training(max_seq_length=300, device="cpu", attention="plain")
    assert sum(kept) == round(300 * training.keys_computed(config))


def test_each_core_has_gradients_of_its_own(monkeypatch):
    from mlxlm.plan import training as module

    config, training = load_preset("5m"), replace(SMALL, device="cpu")
    found = {}
    for parts in (1, 2):
        monkeypatch.setattr(module, "num_batch_shards", lambda batch_size, parts=parts: parts)
        found[parts] = training_memory(config, training)
    assert found[2].gradients == 2 * found[1].gradients == 8 * config.parameter_count()
    assert found[2].activations == found[1].activations


def test_use_here_is_in_what_the_device_computes_with():
    from mlxlm.plan.inference import default_serving
    from mlxlm.plan.machines import MACHINES, Machine

    config = load_preset("5m")
    cpu = Machine("here", 1e9, "float32", None, True, "", "cpu")
    this_machine = default_serving(cpu, config)
    assert (this_machine.bits, this_machine.kv_bits, this_machine.context_length) == (32, 32, 512)
    assert default_serving(MACHINES["a100"], config).bits == 16
    for machine, dtype in ((cpu, "float32"), (MACHINES["a100"], "bfloat16"), (MACHINES["m1"], "bfloat16")):
        assert mlxlm.plan(config, machine=machine).training.dtype == dtype
    assert mlxlm.plan(config, machine="a100", dtype="float32").training.dtype == "float32"


def test_a_cpu_keeps_quantized_weights_only_where_others_do_not_fit():
    from mlxlm.plan.machines import Machine

    config = load_preset("5m")
    count = config.parameter_count()
    for memory, bits in ((6 * count, 32), (5 * count, 4)):  # bytes
        planned = mlxlm.plan(config, machine=Machine("here", 1e9, "float32", memory, True, "", "cpu"), bits=4)
        assert planned.serving.bits == bits
    gpu = mlxlm.plan(config, machine="a100", bits=4)
    assert gpu.serving.bits == 4 and gpu.inference.weights < planned.inference.weights  # scales of 16 and of 32 bits


@pytest.mark.parametrize(
    "quantization",
    [
        {"bits": 4, "group_size": 32},
        {"bits": 8, "group_size": 32, "mode": "mxfp8"},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
        {"bits": 4, "group_size": 64, "model.layers.1.mlp.down_proj": {"bits": 6, "group_size": 32}},
        {"bits": 2, "group_size": 64, "model.embed_tokens": False, "lm_head": {"mode": "mxfp8"}},
    ],
)
def test_a_quantized_model_is_planned_with_its_own_formats(quantization):
    """Beside the arrays of MLX's own quantization."""
    from mlxlm.backend.mlx import mx, nn, tree_flatten
    from mlxlm.config.quantization import module_quantization
    from mlxlm.model import Decoder

    config = load_preset("0.3m", tie_word_embeddings=False, hidden_size=192, quantization=quantization)
    model = Decoder(config)
    model.apply(lambda x: x.astype(mx.bfloat16))
    nn.quantize(
        model, class_predicate=lambda name, m: hasattr(m, "to_quantized") and module_quantization(quantization, name)
    )
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    planned = mlxlm.plan(config, machine="a100")
    assert (planned.serving.bits, planned.serving.group_size) == (quantization["bits"], None)
    assert planned.serving.kv_bits == 16 and planned.inference.weights == held
    other = mlxlm.plan(config, machine="a100", bits=5)
    assert 5 < other.inference.bits_per_weight < 6.1


def test_what_a_group_does_not_divide_stays_as_it_is():
    """As mlx_lm leaves it, which says so only by the files having no scales."""
    config = load_preset("0.3m")
    own = mlxlm.plan(config.with_changes(quantization={"group_size": 64, "bits": 4}), machine="a100").inference
    down = 3 * 96 * 256  # of 256 in a row; all others have 96
    assert own.weights == 2 * (config.parameter_count() - down) + down // 2 + down // 64 * 4
    assert mlxlm.plan(config, machine="a100", bits=4).inference.weights < own.weights  # in groups of 32


def test_a_table_of_positions_is_quantized_too():
    rope = load_preset("0.3m")
    table = 96 * rope.max_position_embeddings
    plans = [mlxlm.plan(c, machine="a100", bits=8) for c in (rope, rope.with_changes(positions="learned"))]
    assert plans[1].inference.weights - plans[0].inference.weights == table + table // 32 * 4


def test_a_cpu_that_is_too_small_for_float32_keeps_16_bits():
    from mlxlm.plan.machines import Machine

    config = load_preset("5m")
    count = config.parameter_count()
    for memory, bits in ((6 * count, 32), (5 * count, 16)):
        machine = Machine("here", 1e9, "float32", memory, True, "", "cpu")
        planned = mlxlm.plan(config, machine=machine)
        assert (planned.serving.bits, planned.serving.kv_bits) == (bits, bits)
        assert planned.inference.weights == count * bits // 8
    assert mlxlm.plan(config, machine=machine, bits=4).serving.kv_bits == 32  # its scales have 32 there


def test_a_larger_batch_can_fit_where_cores_do_not_share_it(monkeypatch):
    from mlxlm.backend import cpu_cores

    monkeypatch.setattr(cpu_cores, "ON_CPU", True)
    monkeypatch.setattr(cpu_cores, "load_blas", lambda: SimpleNamespace(sets_threads=True))
    monkeypatch.setattr(platform, "cpu_cores", lambda: 16)
    config, training = load_preset("5m"), replace(SMALL, batch_size=16, device="cpu")
    whole = replace(training, batch_size=24)
    assert (training.num_workers, whole.num_workers) == (16, 1)
    memory = round(training_memory(config, whole).total / 0.9) + 1
    found = find_limits(config, training, Serving(), memory)
    assert not found.training and found.batch_size == 24
    assert find_limits(config, training, Serving(), 1 << 40).batch_size > 10**4


def test_impossible_plans_are_one_error():
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


def test_the_package_is_the_function():
    planned = mlxlm.plan("1m", machine="a100", batch_size=4, bits=4)
    assert planned.training.batch_size == 4 and planned.serving.bits == 4
    assert mlxlm.plan.plan("1m", machine="a100", batch_size=4, bits=4) == planned
    assert json.loads(json.dumps(planned.to_dict()))["parameters"]["total"] == planned.parameter_count


def test_time_is_work_over_speed():
    planned = mlxlm.plan("1m", machine="a100", num_devices=2, mfu=0.5, tokens=1e9)
    assert planned.duration.seconds == pytest.approx(planned.flops.per_token * 1e9 / (2 * 312e12 * 0.5))
    probed = mlxlm.plan("1m", machine="a100", tokens=4096 * 10).with_measurement(2.0, 10**9)
    assert probed.measured_duration.seconds == pytest.approx(20.0) and probed.measured_memory == 10**9
    assert probed.measured_duration.mfu == pytest.approx(probed.flops.computed_per_step / 2.0 / 312e12)
    assert probed.duration.mfu_source == "assumed" and probed.duration.seconds < 1


def test_a_text_and_its_passes(text_file):
    from mlxlm.plan.corpus import bytes_per_token

    planned = mlxlm.plan("0.3m", machine="a100", data=[text_file], tokens=1e6)
    assert planned.corpus.tokens == pytest.approx(text_file.stat().st_size / bytes_per_token(512))
    assert planned.epochs == pytest.approx(1e6 / planned.corpus.tokens) and not planned.corpus.counted
    assert planned.disk.shards == 2 * round(planned.corpus.tokens)
    weighted = mlxlm.plan("0.3m", machine="a100", data=[f"{text_file}=3"])
    assert weighted.corpus == planned.corpus


def test_tokens_of_a_compressed_text_are_those_of_the_text(tmp_path, make_text, monkeypatch):
    from mlxlm.plan import corpus

    text = make_text(20_000)
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_bytes(gzip.compress(json.dumps({"story": text}).encode()))
    whole = corpus.count_corpus([rows], 512, "story")
    assert whole.bytes == len(text) > 3 * rows.stat().st_size
    monkeypatch.setattr(corpus, "_SAMPLE_BYTES", 1 << 18)
    (tmp_path / "text").write_text(10 * text)
    assert corpus.count_corpus([tmp_path / "text"], 512).bytes == pytest.approx(10 * len(text), rel=0.3)  # by a part
    with pytest.raises(DataError, match="--text-column NAME"):
        corpus.count_corpus([rows], 512)


def test_tokens_of_a_table_in_one_piece_are_those_of_the_table(tmp_path, make_text, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install 'mlxlm[data]')")
    from mlxlm.plan import corpus

    table = pa.table({"text": [make_text(20)] * 2000})
    monkeypatch.setattr(corpus, "_SAMPLE_BYTES", 1 << 14)
    for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        path = tmp_path / f"{name}.arrow"
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table)
        assert corpus.count_corpus([path], 512).bytes == pytest.approx(2000 * len(make_text(20)), rel=0.1)


def test_prepared_data_without_tokens_is_refused(tmp_path, text_file):
    from mlxlm.data import DataOptions, prepare
    from mlxlm.tokenizer import train

    prepare(DataOptions([text_file]), train([text_file.read_text()], 270), tmp_path / "data")
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    manifest["parts"][0]["train"] |= {"tokens": 0, "shards": []}
    (tmp_path / "data/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="has no tokens to train on"):
        count_corpus([tmp_path / "data"], 512)


def test_a_text_without_a_size_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "rows.jsonl").write_text('{"text": null}')
    for name, problem in (("pipe", "has no size"), ("-", "has no size"), ("rows.jsonl", "has no text")):
        with pytest.raises(DataError, match=problem):
            count_corpus([name if name == "-" else tmp_path / name], 512)


def test_a_run_of_many_steps_begins_with_its_forecast(tmp_path, text_file, tiny_config):
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

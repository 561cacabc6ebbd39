"""Batch size, sequence length and validation by the available time, on a machine of known speed."""

import itertools
import re
from types import SimpleNamespace

import pytest

from mlxlm.cli.main import _run
from mlxlm.families import load_preset, preset_names
from mlxlm.plan.model_sizes import model_family
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, ScalingLaw
from mlxlm.train import Budget, Run, TrainSettings, budget, start_run
from mlxlm.train.budget import batch_settings, seconds_per_token, time_limit_settings
from mlxlm.train.step_benchmark import Probe
from mlxlm.utils.errors import ConfigError
from tests.train.training_runs import read_log

GFLOPS = 60.0


@pytest.fixture
def machine(monkeypatch):
    """A machine that multiplies at 60 GFLOP/s and trains at half of that. The settings of its probes."""
    probes = []

    def probe(config, settings):
        probes.append(settings)
        tokens = settings.tokens_per_step
        return SimpleNamespace(step=tokens * config.flops_per_token(128, training=True) / (GFLOPS / 2 * 1e9))

    monkeypatch.setattr(budget, "probe", probe)
    monkeypatch.setattr(budget, "measure_matmul", lambda seconds, dtype: GFLOPS)
    return probes


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("minutes", [1, 10, 600])
def test_presets_make_a_thousand_steps_or_are_too_slow(machine, preset, minutes):
    config, seconds = load_preset(preset), 60.0 * minutes
    token_seconds = config.flops_per_token(128, training=True) / (GFLOPS / 2 * 1e9)
    if seconds / token_seconds < 25_600:
        with pytest.raises(ConfigError, match="parameters would see about .* tokens here, too few to learn from"):
            seconds_per_token(config, seconds, {})
        return
    assert seconds_per_token(config, seconds, {}) == pytest.approx(token_seconds)
    tokens = 0.9 * seconds / token_seconds
    form = batch_settings(config, tokens, {})
    length, rows = form["max_seq_length"], form["batch_size"]
    is_short = preset == "0.3m" or (preset == "1m" and tokens < 4000 * 8 * 512)
    assert length in ((128,) if is_short else (256, 512)) and length <= config.max_position_embeddings
    steps = tokens / (rows * length)
    assert steps >= 1000 or (rows, length) == (1, 256)
    assert steps <= 6000 or rows * length >= 32 * 256


def test_small_models_have_short_sequences():
    tiny = load_preset("0.3m", hidden_size=32, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2)
    assert batch_settings(tiny, 1e6, {}) == {"max_seq_length": 64, "batch_size": 4}
    assert batch_settings(tiny, 1e6, {"optimizer": "muon"})["batch_size"] == 8
    assert batch_settings(tiny, 1e9, {}) == {"max_seq_length": 64, "batch_size": 128}
    lengths = [batch_settings(load_preset("1m"), tokens, {})["max_seq_length"] for tokens in (1e6, 1e7, 1e8)]
    assert lengths == [128, 128, 512]
    assert batch_settings(load_preset("5m"), 1e6, {})["max_seq_length"] == 256


def test_explicit_settings_are_kept(machine):
    given = {"max_seq_length": 64, "batch_size": 3, "grad_accumulation_steps": 2, "warmup_steps": 10}
    assert batch_settings(load_preset("1m"), 1e6, given) == given
    seconds_per_token(load_preset("1m"), 600.0, given)
    assert machine[0].tokens_per_step == 2 * 64  # not three times two rows


def test_hint_has_a_preset_and_minutes_that_work(machine):
    with pytest.raises(ConfigError, match=r"in 2m00s a model of 1\.1B parameters") as refused:
        seconds_per_token(load_preset("1b"), 120.0, {})
    assert not machine  # the speed of large products says enough: no step of it is tried
    preset, minutes = re.findall(r"=(\S+)`", refused.value.hint)
    seconds_per_token(load_preset(preset), 120.0, {})
    seconds_per_token(load_preset("1b"), 60.0 * int(minutes), {})


def test_steps_that_are_too_long_for_the_time(machine):
    config = load_preset("1m")
    with pytest.raises(
        ConfigError, match=r"of 262,144 tokens here.*try: a smaller `batch_size`, or a smaller `max_seq"
    ):
        seconds_per_token(config, 60.0, {"batch_size": 512, "max_seq_length": 512})
    for given, tokens in (({"max_seq_length": 16384}, "16,384"), ({"grad_accumulation_steps": 64}, "16,384")):
        [name] = given
        with pytest.raises(ConfigError, match=f"steps of {tokens} tokens here.*try: a smaller `{name}`, or `minutes"):
            seconds_per_token(config, 15.0, given)
    with pytest.raises(ConfigError, match="steps of 512 tokens here"):
        seconds_per_token(load_preset("1b"), 60.0, {"max_seq_length": 512}, finetuning=True)
    seconds_per_token(config, 3.0, {"max_seq_length": 512}, finetuning=True)  # little to learn may be enough


def test_benchmark_uses_the_vocabulary_of_the_tokenizer(machine, tmp_path, text_file, tokenizer_folder):
    measured = []
    config = load_preset("0.3m", vocab_size=9999, bos_token_id=9998, eos_token_id=9998)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mlxlm.train.start.seconds_per_token", lambda config, *_rest: measured.append(config.vocab_size) or 1e-6
        )
        patch.setattr("mlxlm.train.start.fits_memory", lambda config, settings: settings.batch_size <= 2)
        run = start_run(tmp_path / "run", [text_file], config, tokenizer=tokenizer_folder, minutes=1)
    assert measured == [run.config.vocab_size] and run.config.vocab_size < 1000 and run.settings.batch_size == 2


@pytest.mark.parametrize("seconds, rows", [({1: 1.0, 4: 1.2}, 4), ({1: 1.0, 4: 1.5}, 1)])
def test_min_rows(monkeypatch, seconds, rows):
    monkeypatch.setattr(budget, "num_batch_shards", lambda rows: rows)
    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: 4)
    monkeypatch.setattr(budget, "probe", lambda config, settings: SimpleNamespace(step=seconds[settings.batch_size]))
    assert budget.min_rows(load_preset("1m"), {"max_seq_length": 64}) == rows
    monkeypatch.setattr(budget, "num_batch_shards", lambda rows: 1)  # a GPU
    assert budget.min_rows(load_preset("1m"), {"max_seq_length": 64}) == 1


def test_time_limit_settings(monkeypatch):
    """Each validation takes a fortieth of the time, unless `eval_tokens` or a single batch says otherwise."""
    monkeypatch.setattr(Budget, "seconds_left", lambda budget: 100.0)
    values = {"batch_size": 2, "max_seq_length": 100}

    def settings(validation, **more):
        benchmark = Probe(compile_seconds=0.0, step=1.0, validation=validation, memory=1)
        return time_limit_settings(benchmark, Budget(minutes=2), {**values, **more}, 10**9)

    expected = {**values, "time_limit": 100.0, "eval_every": None, "save_every": 0, "eval_tokens": 1000}
    found = settings(0.5)
    assert found == {**expected, "steps": found["steps"]} and 90 <= found["steps"] <= 100
    more = {"eval_tokens": 7, "eval_every": 9, "save_every": 11}
    assert settings(0.5, **more).items() >= more.items()
    assert settings(50.0)["eval_tokens"] == 200 and settings(1e-6)["eval_tokens"] == TrainSettings.eval_tokens


def test_no_time_is_left_for_training(tmp_path, text_file, tokenizer_folder):
    with pytest.raises(ConfigError, match="preparing the training took .* of 0s .try: `minutes=1`"):
        start_run(tmp_path / "run", [text_file], load_preset("0.3m"), tokenizer=tokenizer_folder, minutes=1e-9)
    assert not (tmp_path / "run").exists()


def test_start_with_a_preset_and_minutes(machine, tmp_path, text_file, tokenizer_folder):
    config = load_preset("0.3m")
    run = start_run(tmp_path / "run", [text_file], config, tokenizer=tokenizer_folder, minutes=1)
    settings = run.settings
    assert settings.max_seq_length == 128 and settings.batch_size < 16 and settings.eval_every is None
    assert settings.warmup_steps is None and 0 < settings.time_limit < 60
    assert settings.optimizer == "adamw"


@pytest.fixture
def steady(monkeypatch):
    """A machine that does 60 GFLOP/s in every model."""
    monkeypatch.setattr(budget, "fit_token_seconds", lambda *_arguments: lambda c: c.parameter_count() / 1e10)


def test_model_is_compute_optimal(steady):
    config, settings, chosen = budget.auto_size(3600.0, 10**12, 1024, {})
    count = config.parameter_count()
    assert chosen.parameters == count and chosen.tokens == pytest.approx(0.9 * 3600 * 1e10 / count)
    compute_optimal = CHINCHILLA_LAW.compute_optimal(6 * 0.9 * 3600 * 1e10)
    # The sizes of the family are discrete, and the smaller of two equals is taken.
    assert compute_optimal[0] / 2.3 < count < 1.5 * compute_optimal[0]
    assert CHINCHILLA_LAW.loss(count, chosen.tokens) < 1.006 * CHINCHILLA_LAW.loss(*compute_optimal)
    assert settings["max_seq_length"] == 512 and settings["batch_size"] >= 8


def test_short_text_in_minutes_gets_a_small_model(steady):
    config, settings, _ = budget.auto_size(180.0, 430_000, 1024, {})
    assert 6e5 < config.parameter_count() < 8e5  # 0.53M parameters: 2.126 bits per byte, 0.32M 2.148, 0.84M 2.154
    assert settings["batch_size"] * settings["max_seq_length"] <= 2048


def test_speed_is_the_median_of_several_benchmarks(monkeypatch):
    times = itertools.cycle([5.0, 1.0, 1.0])
    clock = itertools.count()
    monkeypatch.setattr(budget, "measure_matmul", lambda seconds: 50.0)
    monkeypatch.setattr(budget, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(budget, "probe", lambda config, settings: SimpleNamespace(step=next(times)))
    one = TrainSettings(steps=1, learning_rate=1.0, batch_size=1, max_seq_length=100)
    token_seconds = budget.fit_token_seconds(model_family(512)[:1], 300.0, lambda config: one)
    assert token_seconds(model_family(512)[0]) == pytest.approx(0.01)


def test_a_large_model_of_a_short_text_has_dropout(steady):
    few, short = (budget.auto_size(seconds, tokens, 1024, {}) for seconds, tokens in ((60.0, 10**6), (600.0, 400_000)))
    assert short[2].epochs > 5 and short[2].parameters > 800_000 and short[1]["dropout"] == 0.1
    assert few[2].parameters < 2 * 10**6 and "dropout" not in few[1]
    assert budget.auto_size(600.0, 400_000, 1024, {"dropout": 0.0})[1]["dropout"] == 0


def test_less_text_gives_a_smaller_model(steady):
    sizes = [budget.auto_size(36_000.0, tokens, 1024, {})[2].parameters for tokens in (10**6, 10**5, 10**4, 10**3)]
    assert sizes[0] > sizes[1] > sizes[2] > sizes[3]


def test_more_processes_train_on_more_tokens(steady):
    one, four = (
        budget.auto_size(3600.0, 10**12, 1024, {"grad_accumulation_steps": n}, num_processes=n)[2] for n in (1, 4)
    )
    compute_optimal = CHINCHILLA_LAW.compute_optimal(4 * 6 * one.tokens * one.parameters)
    assert compute_optimal[0] / 2.3 < four.parameters < 1.5 * compute_optimal[0]
    assert four.parameters > 1.3 * one.parameters


def test_scaling_law_determines_the_size(steady):
    hungry, easy = ScalingLaw(1.0, 1.0, 0.5, 1e4, 0.5), ScalingLaw(1.0, 1e4, 0.5, 1.0, 0.5)
    small, large = (budget.auto_size(60.0, 10**12, 1024, {}, law)[2].parameters for law in (hungry, easy))
    assert large > 100 * small


def test_explicit_settings_are_kept_with_a_chosen_model(steady):
    values = {"batch_size": 3, "max_seq_length": 64, "eval_every": 7}
    _, settings, _ = budget.auto_size(60.0, 10**6, 1024, values)
    assert values.items() <= settings.items()


def test_pretrain_hours_chooses_a_model(tmp_path, text_file, tokenizer_folder, capfd, monkeypatch):
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 1.0)  # however slow the machine is
    out, options = tmp_path / "run", ["--eval-tokens", "200", "--max-seq-length", "32"]
    assert _run(["pretrain", str(text_file), "--out", str(out), "--hours", "0.0008", "--tokenizer",
                 str(tokenizer_folder), *options]) == 0  # fmt: skip
    run = Run.open(out)
    entries = read_log(run)
    assert [e["event"] for e in entries[:2]] == ["model_size_chosen", "forecast"]
    assert entries[0]["parameters"] == run.config.parameter_count() and 0 < run.settings.time_limit < 2.88
    assert run.settings.optimizer == "muon"
    assert "model size chosen by the scaling law of Hoffmann et al." in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "nan"], "hours is nan, it must be a positive number"),
        (["--hours", "1", "--minutes", "2"], "--hours would have no effect: --minutes says how long"),
        (["--steps", "3", "--scaling-law", "x"], "--scaling-law would have no effect: the model size is picked only"),
        (["--hours", "1", "--set", "positions=alibi"], "--set would have no effect: the model size is picked"),
    ],
)
def test_pretrain_rejects_unused_options(tmp_path, text_file, capsys, options, message):
    assert _run(["pretrain", str(text_file), "--out", str(tmp_path / "x"), *options]) in (1, 2)
    assert message in capsys.readouterr().err

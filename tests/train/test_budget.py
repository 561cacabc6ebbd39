"""Batch, length and validation by the time there is, with a machine of a given speed."""

from types import SimpleNamespace

import pytest

from mlxlm.families import load_preset, preset_names
from mlxlm.train import Probe, TrainSettings, budget, start_run
from mlxlm.train.budget import batch_settings, seconds_per_token, validation_settings
from mlxlm.utils.errors import ConfigError

GFLOPS = 60.0


@pytest.fixture
def machine(monkeypatch):
    """It multiplies at 60 GFLOP/s, and trains every model at half of that; the probes that were made."""
    probes = []

    def probe(config, settings):
        probes.append(settings)
        tokens = settings.tokens_per_step
        return SimpleNamespace(step=tokens * config.flops_per_token(128, training=True) / (GFLOPS / 2 * 1e9))

    monkeypatch.setattr(budget, "probe", probe)
    monkeypatch.setattr(budget, "measure_matmul", lambda seconds, dtype: GFLOPS)
    return probes


@pytest.mark.parametrize("preset", preset_names())
@pytest.mark.parametrize("minutes", [1, 3, 10, 60, 600])
def test_a_preset_makes_a_thousand_steps_where_it_can_or_is_refused(machine, preset, minutes):
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
    assert length in (256, 512) and length <= config.max_position_embeddings
    steps = tokens / (rows * length)
    assert steps >= 1000 or (rows, length) == (1, 256)
    assert steps <= 6000 or rows == 32


def test_what_is_given_stays(machine):
    given = {"max_seq_length": 64, "batch_size": 3, "grad_accumulation_steps": 2, "warmup_steps": 10}
    assert batch_settings(load_preset("1m"), 1e6, given) == given
    seconds_per_token(load_preset("1m"), 600.0, given)
    assert machine[0].tokens_per_step == 2 * 64  # not three times two rows


def test_the_refusal_names_a_preset_and_a_time_that_work(machine):
    with pytest.raises(ConfigError, match=r"in 2m00s a model of 1\.1B parameters") as refused:
        seconds_per_token(load_preset("1b"), 120.0, {})
    assert not machine  # the speed of large products says enough: no step of it is tried
    preset, minutes = refused.value.hint.removeprefix("--preset ").split(", or --minutes ")
    seconds_per_token(load_preset(preset), 120.0, {})
    seconds_per_token(load_preset("1b"), 60.0 * int(minutes.replace(",", "")), {})


def test_a_batch_whose_steps_are_too_long_for_the_time_is_refused(machine):
    config = load_preset("1m")
    with pytest.raises(
        ConfigError, match=r"of 262,144 tokens here.*try: a smaller --batch-size, or a smaller --max-seq"
    ):
        seconds_per_token(config, 60.0, {"batch_size": 512, "max_seq_length": 512})
    for given, tokens in (({"max_seq_length": 16384}, "16,384"), ({"grad_accumulation_steps": 64}, "16,384")):
        [name] = given
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(ConfigError, match=f"steps of {tokens} tokens here.*try: a smaller {flag}, or --minutes"):
            seconds_per_token(config, 15.0, given)
    with pytest.raises(ConfigError, match="steps of 512 tokens here"):
        seconds_per_token(load_preset("1b"), 60.0, {"max_seq_length": 512}, finetuning=True)
    seconds_per_token(config, 3.0, {"max_seq_length": 512}, finetuning=True)  # little to learn may be enough


def test_a_given_tokenizer_says_what_is_measured_and_what_fits(machine, tmp_path, text_file, tokenizer_folder):
    """Not the preset's vocabulary."""
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
def test_a_step_has_a_row_for_each_core_where_that_costs_little(monkeypatch, seconds, rows):
    monkeypatch.setattr(budget, "num_batch_shards", lambda rows: rows)
    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: 4)
    monkeypatch.setattr(budget, "probe", lambda config, settings: SimpleNamespace(step=seconds[settings.batch_size]))
    assert budget.min_rows(load_preset("1m"), {"max_seq_length": 64}) == rows
    monkeypatch.setattr(budget, "num_batch_shards", lambda rows: 1)  # a GPU
    assert budget.min_rows(load_preset("1m"), {"max_seq_length": 64}) == 1


def test_validation_has_a_fortieth_of_the_time_each():
    found = Probe(compile_seconds=0.0, step=1.0, validation=0.5, memory=1)
    values = {"batch_size": 2, "max_seq_length": 100, "time_limit": 100.0}
    form = validation_settings(found, 100.0, values)
    assert form["eval_tokens"] == 1000 and form["eval_every"] is None and form["save_every"] == 0
    given = {**values, "eval_tokens": 7, "eval_every": 9, "save_every": 11}
    assert validation_settings(found, 100.0, given) == given
    slow = Probe(compile_seconds=0.0, step=1.0, validation=50.0, memory=1)
    assert validation_settings(slow, 100.0, values)["eval_tokens"] == 200  # a batch at least
    fast = Probe(compile_seconds=0.0, step=1.0, validation=1e-6, memory=1)
    assert validation_settings(fast, 100.0, values)["eval_tokens"] == TrainSettings.eval_tokens


def test_time_that_is_over_before_training_is_refused(tmp_path, text_file, tokenizer_folder):
    with pytest.raises(ConfigError, match="preparing the training took .* of 0s .try: --minutes 1"):
        start_run(tmp_path / "run", [text_file], load_preset("0.3m"), tokenizer=tokenizer_folder, minutes=1e-9)
    assert not (tmp_path / "run").exists()


def test_a_preset_and_minutes_are_all_it_needs(machine, tmp_path, text_file, tokenizer_folder):
    config = load_preset("0.3m")
    run = start_run(tmp_path / "run", [text_file], config, tokenizer=tokenizer_folder, minutes=1)
    settings = run.settings
    assert settings.max_seq_length == 256 and settings.batch_size < 16 and settings.eval_every is None
    assert settings.warmup_steps is None and 0 < settings.time_limit < 60

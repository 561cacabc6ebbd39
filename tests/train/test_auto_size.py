"""The model size chosen for a time."""

import itertools
from types import SimpleNamespace

import pytest

from mlxlm.cli.main import _run
from mlxlm.plan.model_sizes import model_family
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, ScalingLaw
from mlxlm.train import Run, TrainSettings, budget
from tests.train.training_runs import read_log


@pytest.fixture
def steady(monkeypatch):
    """A machine that does 60 GFLOP/s in every model."""
    monkeypatch.setattr(
        budget, "fit_token_seconds", lambda members, seconds, settings: lambda c: c.parameter_count() / 1e10
    )


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
    assert 2.5e5 < config.parameter_count() < 6e5  # 2.16 bits per byte; 0.03M parameters end at 2.65
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


def test_less_text_gives_a_smaller_model(steady):
    sizes = [budget.auto_size(3600.0, tokens, 1024, {})[2].parameters for tokens in (10**9, 10**5, 10**4)]
    assert sizes[0] > sizes[1] > sizes[2]


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


def test_explicit_settings_are_kept(steady):
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

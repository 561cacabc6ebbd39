"""Grids of runs, and models chosen for the time there is."""

import itertools
import json
import math
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest

from mlxlm.cli.main import _run
from mlxlm.experiments.scaling_grid import Grid, start_grid
from mlxlm.experiments.scaling_runs import GridOptions, fit_to_time
from mlxlm.experiments.sweep import is_finished
from mlxlm.plan.model_sizes import model_family
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, ScalingLaw
from mlxlm.train import Run, TrainSettings, auto_size
from mlxlm.utils.errors import ConfigError, DataError
from tests.train.training_runs import finish, read_log

TINY = {"max_seq_length": 16, "batch_size": 4, "eval_tokens": 500}


@pytest.fixture
def start(tmp_path, text_file, tokenizer_folder, monkeypatch):
    monkeypatch.setattr(auto_size, "_BENCHMARK_FRACTION", 0.0)

    def make(**changes):
        settings = changes.pop("settings", TINY)
        options = GridOptions(**{"sizes": [2e4, 1e5], "tokens": [128, 256], **changes})
        return start_grid(tmp_path / "grid", [text_file], options, tokenizer=tokenizer_folder, settings=settings)

    return make


def test_a_grid_is_made_trained_and_gone_on_with(start, text_file):
    grid = start()
    assert [(c.hidden_size, c.tokens, c.steps) for c in grid.runs] == [(32, 128, 2), (32, 256, 4), (64, 128, 2),
                                                                    (64, 256, 4)]  # fmt: skip
    assert grid.points() == [] and grid.seconds_left(0) == pytest.approx(sum(c.seconds for c in grid.runs))
    with pytest.raises(ConfigError, match="no run of .* is finished"):
        grid.flops_per_second()
    finish(grid.open_run(grid.runs[0]))
    finish(grid.open_run(grid.runs[1]), stop_at=2)
    again = start()  # the same arguments: the same grid
    assert again.runs == grid.runs and len(again.points()) == 1
    for cell in again.runs:
        run = again.open_run(cell)
        if not is_finished(run):
            finish(run, resume=True)
    points = again.points()
    assert [(p.parameters, p.tokens) for p in points] == [(c.parameters, c.tokens) for c in again.runs]
    last = [e for e in read_log(Run.open(again.path / again.runs[-1].name)) if e["event"] == "validation"][-1]
    assert points[-1].loss == last["loss"] and again.seconds_left(4) == 0
    assert again.flops_per_second() > 0
    with pytest.raises(ConfigError, match="grid of runs with other tokens"):
        start(tokens=[128])
    assert not again.by_ratio


def test_ratios_multiply_parameters(start):
    grid = start(tokens=[], tokens_per_parameter=[0.01, 0.02])
    assert grid.by_ratio
    for cell in grid.runs:
        assert min(abs(cell.tokens - r * cell.parameters) for r in (0.01, 0.02)) <= 32  # half a step


def test_a_grid_says_how_long_once(start):
    with pytest.raises(ConfigError, match="only one of them"):
        start(tokens_per_parameter=[5])


@pytest.mark.parametrize("seconds", [10.0, 1e4, 1e5])
def test_the_default_grid_fills_the_time_and_keeps_to_the_text(seconds):
    members = model_family(512)

    def token_seconds(config):
        return 6 * config.parameter_count() / 1e10

    found = fit_to_time(members, token_seconds, seconds, 1e7, GridOptions())
    assert len(found) == 16 and len({c.hidden_size for c, _ in found}) == 4 and len({n for _, n in found}) == 4
    assert max(n for _, n in found) <= 1e7
    total = sum(token_seconds(c) * n for c, n in found)
    assert total <= seconds
    if seconds > 100:
        assert total > 0.3 * seconds


def test_lengths_that_are_asked_for_fit_the_time_or_are_refused():
    members = model_family(512)

    def token_seconds(config):
        return 6 * config.parameter_count() / 1e10

    most = 2 * members[3].parameter_count()
    found = fit_to_time(members, token_seconds, 1e4, most, GridOptions(tokens_per_parameter=[1, 5, 10]))
    assert len({(c.hidden_size, n) for c, n in found}) == len(found) and max(n for _, n in found) == most
    with pytest.raises(ConfigError, match="even the smallest models take longer"):
        fit_to_time(members, token_seconds, 10.0, 1e12, GridOptions(tokens=[1e9, 2e9]))


def test_what_cant_be_trained_is_refused_before_anything_is(start, tmp_path):
    with pytest.raises(ConfigError, match="of memory"):
        start(sizes=[2e4, 3e12])
    assert not (tmp_path / "grid").exists()


def test_prepared_data_needs_no_sizes_and_no_other_tokenizer(start, tmp_path, text_file, tokenizer_folder):
    from mlxlm.data import DataOptions, prepare
    from mlxlm.tokenizer import load, train

    prepare(DataOptions([text_file]), load(tokenizer_folder), tmp_path / "data")
    grid = start_grid(tmp_path / "other", [tmp_path / "data"], GridOptions(minutes=1e-3), settings=TINY)
    assert grid.vocab_size == load(tokenizer_folder).vocab_size
    train([text_file.read_text()], 270).save(tmp_path / "words")
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        start_grid(tmp_path / "x", [tmp_path / "data"], GridOptions([2e4]), tokenizer=tmp_path / "words", settings=TINY)


def test_weight_decay_follows_the_passes_of_each_run_as_in_pretraining(start):
    grid = start(sizes=[2e4], tokens_per_parameter=[], tokens=[128, 10**6])
    decays = [grid.open_run(cell).settings.weight_decay for cell in grid.runs]
    assert [cell.tokens / grid.unique_tokens > 16 for cell in grid.runs] == [False, True] and decays == [0.1, 1.0]


def test_the_time_left_is_of_what_is_not_finished(start):
    grid = start(sizes=[2e4], tokens=[128, 256])
    finish(grid.open_run(grid.runs[1]))
    spent = read_log(Run.open(grid.path / grid.runs[1].name))
    seconds = next(e["seconds"] for e in reversed(spent) if e["event"] == "step")
    assert grid.seconds_left(0) == pytest.approx(seconds * grid.runs[0].seconds / grid.runs[1].seconds)


def test_a_warmup_needs_no_steps(start):
    assert start(settings={**TINY, "warmup_steps": 1}).settings["warmup_steps"] == 1


@pytest.fixture
def steady(monkeypatch):
    """A machine that does 60 GFLOP/s in every model."""
    monkeypatch.setattr(
        auto_size, "fit_token_seconds", lambda members, seconds, settings: lambda c: c.parameter_count() / 1e10
    )


def test_the_choice_is_the_best_by_the_law_of_hoffmann(steady):
    chosen = auto_size.auto_size(3600.0, 10**12, 1024, {})
    count = chosen.config.parameter_count()
    assert chosen.tokens == pytest.approx(0.9 * 3600 * 1e10 / count)
    compute_optimal = CHINCHILLA_LAW.compute_optimal(6 * 0.9 * 3600 * 1e10)
    assert (
        compute_optimal[0] / 2.3 < count < 1.5 * compute_optimal[0]
    )  # the family has steps, and the smaller of equals is taken
    assert CHINCHILLA_LAW.loss(count, chosen.tokens) < 1.006 * CHINCHILLA_LAW.loss(*compute_optimal)
    assert chosen.settings["max_seq_length"] == 512 and chosen.settings["batch_size"] >= 8


def test_minutes_on_a_megabyte_are_a_model_like_the_smallest_preset(steady):
    chosen = auto_size.auto_size(180.0, 430_000, 1024, {})
    assert 2.5e5 < chosen.config.parameter_count() < 6e5  # 2.16 bits per byte; 0.03M parameters end at 2.65
    assert chosen.settings["batch_size"] * chosen.settings["max_seq_length"] <= 2048


def test_the_speed_is_the_median_of_several_probes(monkeypatch):
    times = itertools.cycle([5.0, 1.0, 1.0])
    clock = itertools.count()
    monkeypatch.setattr(auto_size, "measure_matmul", lambda seconds: 50.0)
    monkeypatch.setattr(auto_size, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(auto_size, "probe", lambda config, settings: SimpleNamespace(step=next(times)))
    one = TrainSettings(steps=1, learning_rate=1.0, batch_size=1, max_seq_length=100)
    token_seconds = auto_size.fit_token_seconds(model_family(512)[:1], 300.0, lambda config: one)
    assert token_seconds(model_family(512)[0]) == pytest.approx(0.01)


def test_little_text_makes_the_model_smaller(steady):
    sizes = [
        auto_size.auto_size(3600.0, unique_tokens, 1024, {}).config.parameter_count()
        for unique_tokens in (10**9, 10**5, 10**4)
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_more_processes_are_more_tokens(steady):
    one, four = (
        auto_size.auto_size(3600.0, 10**12, 1024, {"grad_accumulation_steps": n}, num_processes=n) for n in (1, 4)
    )
    compute_optimal = CHINCHILLA_LAW.compute_optimal(4 * 6 * one.tokens * one.config.parameter_count())
    assert compute_optimal[0] / 2.3 < four.config.parameter_count() < 1.5 * compute_optimal[0]
    assert four.config.parameter_count() > 1.3 * one.config.parameter_count()


def test_a_law_decides(steady):
    hungry, easy = ScalingLaw(1.0, 1.0, 0.5, 1e4, 0.5), ScalingLaw(1.0, 1e4, 0.5, 1.0, 0.5)
    small, large = (auto_size.auto_size(60.0, 10**12, 1024, {}, law).config.parameter_count() for law in (hungry, easy))
    assert large > 100 * small


def test_given_settings_are_kept(steady):
    values = {"batch_size": 3, "max_seq_length": 64, "eval_every": 7}
    chosen = auto_size.auto_size(60.0, 10**6, 1024, values)
    assert values.items() <= chosen.settings.items()


def test_pretrain_by_the_clock_chooses_a_model(tmp_path, text_file, tokenizer_folder, capfd, monkeypatch):
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 1.0)  # however slow the machine is
    out, options = tmp_path / "run", ["--eval-tokens", "200", "--max-seq-length", "32"]
    assert _run(["pretrain", str(text_file), "--out", str(out), "--hours", "0.0008", "--tokenizer",
                 str(tokenizer_folder), *options]) == 0  # fmt: skip
    run = Run.open(out)
    entries = read_log(run)
    assert [e["event"] for e in entries[:2]] == ["model_size_chosen", "forecast"]
    assert entries[0]["parameters"] == run.config.parameter_count() and 0 < run.settings.time_limit < 2.88
    assert "model size chosen by the scaling law of Hoffmann et al." in capfd.readouterr().err


def test_a_spoilt_grid_is_named_and_nothing_predicted_from_none(start, capfd):
    grid = start()
    path = grid.path / "grid.json"
    text = path.read_text()
    cell = json.loads(text)["runs"][0]
    for spoilt in (
        {"runs": []},
        {"unique_tokens": 0},
        {"runs": [[1]]},
        {"settings": 3},
        {"saved_args": None},
        {"vocab_size": "x"},
        {"runs": [{**cell, "seconds": math.nan}]},
        {"runs": [{**cell, "seconds": None}]},
    ):
        path.write_text(json.dumps({**json.loads(text), **spoilt}))
        with pytest.raises(ConfigError, match=r"grid.json is damaged"):
            Grid.open(grid.path)
    path.write_text(text)
    command = ["scaling", "--out", str(grid.path), "--fit-only", "--json"]
    assert _run([*command, "--predict", "1m", "--compute-budget", "1e12"]) == 0
    assert "without a joint fit nothing can be predicted" in json.loads(capfd.readouterr().out)["notes"]


@pytest.mark.parametrize("text", ["1m:", "1m:nan", "1m:-5", "1m:1,2", "1m:x"])
def test_a_prediction_of_no_tokens_is_refused_before_training(tmp_path, text_file, capsys, text):
    assert _run(["scaling", str(text_file), "--out", str(tmp_path / "x"), "--predict", text]) == 2
    assert "is not SIZE or SIZE:TOKENS" in capsys.readouterr().err and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "nan"], "hours is nan, it must be a positive number"),
        (["--hours", "1", "--minutes", "2"], "--hours would have no effect: --minutes says how long"),
        (["--steps", "3", "--scaling-law", "x"], "--scaling-law would have no effect: the model size is picked only"),
        (["--hours", "1", "--set", "positions=alibi"], "--set would have no effect: the model size is picked"),
    ],
)
def test_idle_options_are_refused(tmp_path, text_file, capsys, options, message):
    assert _run(["pretrain", str(text_file), "--out", str(tmp_path / "x"), *options]) in (1, 2)
    assert message in capsys.readouterr().err


def test_the_command_fits_what_is_finished(start, capfd):
    law, grid = ScalingLaw(1.0, 20.0, 0.4, 20.0, 0.4), start(sizes=[2e4, 1e5, 2e5], tokens=[64, 256, 512])
    for cell in grid.runs:  # runs as if they had been trained
        run = grid.open_run(cell)
        (run.path / "checkpoints" / f"step-{cell.steps}").mkdir(parents=True)
        entry = {"step": cell.steps, "loss": 1.0, "seconds": 2.0, "event": "step"}
        checked = {"event": "validation", "step": cell.steps, "loss": law.loss(cell.parameters, cell.tokens)}
        run.log_file.write_text(json.dumps(entry) + "\n" + json.dumps(checked) + "\n")
    command = ["scaling", "--out", str(grid.path), "--fit-only"]
    if not is_finished(grid.open_run(grid.runs[0])):
        pytest.fail("a finished run is known by its last checkpoint")
    assert _run([*command, "--json", "--predict", "1m:1e4", "--compute-budget", "2h"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["joint"]["alpha"] == pytest.approx(0.4, abs=0.02)
    assert said["held_out"]["predicted"] == pytest.approx(said["held_out"]["run"]["loss"], rel=1e-3)
    assert said["predicted"]["tokens"] == 1e4 and said["predicted"]["is_extrapolation"]
    assert said["best"]["parameters_interval"][0] <= said["best"]["parameters"]
    assert any(": a guess" in note for note in said["notes"])
    picture = matplotlib.image.imread(grid.path / "scaling.png")
    assert picture.shape[1] > 1000 and np.std(picture) > 0.05
    assert _run([*command, "--sizes", "1m"]) == 2 and _run([*command, "--compute-budget", "soon"]) == 2
    assert Grid.open(grid.path) == grid

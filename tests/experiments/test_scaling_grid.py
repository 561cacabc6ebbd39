"""Grids of runs, and `mlxlm scaling`."""

import json
import math

import matplotlib.image
import numpy as np
import pytest

from mlxlm.cli.main import _run
from mlxlm.experiments.run_group import is_finished
from mlxlm.experiments.scaling_grid import TRAINING_FRACTION, Grid, GridOptions, fit_to_time, start_grid
from mlxlm.plan.model_sizes import model_family
from mlxlm.plan.scaling_law import ScalingLaw
from mlxlm.train import Run
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.train.training_runs import finish, read_log

TINY = {"max_seq_length": 16, "batch_size": 4, "eval_tokens": 500}


def token_seconds(config):
    return 6 * config.parameter_count() / 1e10


@pytest.fixture
def start(tmp_path, text_file, tokenizer_folder, monkeypatch):
    monkeypatch.setattr("mlxlm.experiments.scaling_grid.fit_token_seconds", lambda *arguments: token_seconds)

    def make(**changes):
        settings = changes.pop("settings", TINY)
        options = GridOptions(**{"sizes": [2e4, 1e5], "tokens": [128, 256], **changes})
        return start_grid(tmp_path / "grid", [text_file], options, tokenizer=tokenizer_folder, settings=settings)

    return make


def test_start_train_and_continue(start, text_file):
    grid = start()
    assert [(c.hidden_size, c.tokens, c.steps) for c in grid.runs] == [(32, 128, 2), (32, 256, 4), (64, 128, 2),
                                                                    (64, 256, 4)]  # fmt: skip
    assert grid.points() == [] and grid.seconds_left(0) == pytest.approx(sum(c.seconds for c in grid.runs))
    with pytest.raises(ConfigError, match="no run of .* is finished"):
        grid.flops_per_second()
    finish(grid.open_run(grid.runs[0]))
    finish(grid.open_run(grid.runs[1]), stop_at=2)
    again = Grid.open(grid.path)
    assert again.runs == grid.runs and len(again.points()) == 1
    for planned in again.runs:
        run = again.open_run(planned)
        if not is_finished(run):
            finish(run, resume=True)
    points = again.points()
    assert [(p.parameters, p.tokens) for p in points] == [(c.parameters, c.tokens) for c in again.runs]
    last = [e for e in read_log(Run.open(again.path / again.runs[-1].name)) if e["event"] == "validation"][-1]
    assert points[-1].loss == last["loss"] and again.seconds_left(4) == 0
    assert again.flops_per_second() > 0
    with pytest.raises(CheckpointError, match="already exists"):
        start(tokens=[128])
    assert not again.by_ratio


def test_tokens_per_parameter(start):
    grid = start(tokens=[], tokens_per_parameter=[0.01, 0.02])
    assert grid.by_ratio
    for planned in grid.runs:
        assert min(abs(planned.tokens - r * planned.parameters) for r in (0.01, 0.02)) <= 32  # half a step


def test_too_large_models_are_rejected_early(start, tmp_path):
    with pytest.raises(ConfigError, match="only one of them"):
        start(tokens_per_parameter=[5])
    with pytest.raises(ConfigError, match="must be positive numbers"):
        start(minutes=0)
    with pytest.raises(ConfigError, match="of memory"):
        start(sizes=[2e4, 3e12])
    assert not (tmp_path / "grid").exists()


def test_prepared_data(tmp_path, text_file, tokenizer_folder, monkeypatch):
    monkeypatch.setattr("mlxlm.train.budget._BENCHMARK_FRACTION", 0.0)
    from mlxlm.data import DataOptions, prepare
    from mlxlm.tokenizer import load, train

    prepare(DataOptions([text_file]), load(tokenizer_folder), tmp_path / "data")
    grid = start_grid(tmp_path / "other", [tmp_path / "data"], GridOptions(minutes=1e-3), settings=TINY)
    assert grid.vocab_size == load(tokenizer_folder).vocab_size
    train([text_file.read_text()], 270).save(tmp_path / "other-tokenizer")
    options = {"tokenizer": tmp_path / "other-tokenizer", "settings": TINY}
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        start_grid(tmp_path / "x", [tmp_path / "data"], GridOptions([2e4]), **options)


def test_seconds_left_of_unfinished_runs(start):
    grid = start(sizes=[2e4], tokens=[128, 256])
    finish(grid.open_run(grid.runs[1]))
    log = read_log(Run.open(grid.path / grid.runs[1].name))
    seconds = next(e["seconds"] for e in reversed(log) if e["event"] == "step")
    assert grid.seconds_left(0) == pytest.approx(seconds * grid.runs[0].seconds / grid.runs[1].seconds)


def test_damaged_grid_file(start, capfd):
    grid = start()
    path = grid.path / "grid.json"
    text = path.read_text()
    planned = json.loads(text)["runs"][0]
    for damage in (
        {"runs": []},
        {"unique_tokens": 0},
        {"runs": [[1]]},
        {"settings": 3},
        {"vocab_size": "x"},
        {"runs": [{**planned, "seconds": math.nan}]},
        {"runs": [{**planned, "seconds": None}]},
    ):
        path.write_text(json.dumps({**json.loads(text), **damage}))
        with pytest.raises(ConfigError, match=r"grid.json is damaged"):
            Grid.open(grid.path)
    path.write_text(text)
    command = ["scaling", "--resume", str(grid.path), "--fit-only", "--json"]
    assert _run([*command, "--predict", "1m", "--compute-budget", "1e12"]) == 0
    assert "without a joint fit nothing can be predicted" in json.loads(capfd.readouterr().out)["notes"]


@pytest.mark.parametrize("text", ["1m:", "1m:nan", "1m:-5", "1m:1,2", "1m:x"])
def test_invalid_prediction_is_rejected_before_training(tmp_path, text_file, capsys, text):
    assert _run(["scaling", str(text_file), "--out", str(tmp_path / "x"), "--predict", text]) == 2
    assert "is not SIZE or SIZE:TOKENS" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_command_fits_the_finished_runs(start, capfd):
    law, grid = ScalingLaw(1.0, 20.0, 0.4, 20.0, 0.4), start(sizes=[2e4, 1e5, 2e5], tokens=[64, 256, 512])
    for planned in grid.runs:  # runs as if they had been trained
        run = grid.open_run(planned)
        (run.path / "checkpoints" / f"step-{planned.steps}").mkdir(parents=True)
        entry = {"step": planned.steps, "loss": 1.0, "seconds": 2.0, "event": "step"}
        checked = {"event": "validation", "step": planned.steps, "loss": law.loss(planned.parameters, planned.tokens)}
        run.log_file.write_text(json.dumps(entry) + "\n" + json.dumps(checked) + "\n")
    command = ["scaling", "--resume", str(grid.path), "--fit-only"]
    assert is_finished(grid.open_run(grid.runs[0]))
    assert _run([*command, "--json", "--predict", "1m:1e4", "--compute-budget", "2h"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["joint"]["alpha"] == pytest.approx(0.4, abs=0.02)
    assert result["held_out"]["predicted"] == pytest.approx(result["held_out"]["run"]["loss"], rel=1e-3)
    assert result["predicted"]["tokens"] == 1e4 and result["predicted"]["is_extrapolation"]
    assert result["best"]["parameters_interval"][0] <= result["best"]["parameters"]
    assert any(": a guess" in note for note in result["notes"])
    picture = matplotlib.image.imread(grid.path / "scaling.png")
    assert picture.shape[1] > 1000 and np.std(picture) > 0.05
    assert _run([*command, "--sizes", "1m"]) == 2 and _run([*command, "--compute-budget", "soon"]) == 2
    assert Grid.open(grid.path) == grid


@pytest.mark.parametrize("seconds", [10.0, 1e4, 1e5])
def test_default_grid_fills_the_time_and_repeats_little_text(seconds):
    members = model_family(512)
    lengths = fit_to_time(members, token_seconds, 1e7, GridOptions(minutes=seconds / 60 / TRAINING_FRACTION))
    assert len(lengths) == 16 and len({c.hidden_size for c, _ in lengths}) == 4 and len({n for _, n in lengths}) == 4
    assert max(n for _, n in lengths) <= 1e7
    total = sum(token_seconds(c) * n for c, n in lengths)
    assert total <= seconds
    if seconds > 100:
        assert total > 0.3 * seconds


def test_explicit_lengths_must_fit_the_time():
    members = model_family(512)
    max_tokens = 2 * members[3].parameter_count()
    options = GridOptions(tokens_per_parameter=[1, 5, 10], minutes=200)
    lengths = fit_to_time(members, token_seconds, max_tokens, options)
    assert len({(c.hidden_size, n) for c, n in lengths}) == len(lengths) and max(n for _, n in lengths) == max_tokens
    with pytest.raises(ConfigError, match="even the smallest models take longer"):
        fit_to_time(members, token_seconds, 1e12, GridOptions(tokens=[1e9, 2e9], minutes=0.2))

"""The metrics of a training run, in terminals of any width; several runs one after another."""

from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from mlxlm.cli import training
from mlxlm.cli.main import _run
from mlxlm.cli.training_metrics import TrainingMetrics
from mlxlm.report import REPORT_FILE
from mlxlm.train import (
    CheckpointNotSaved,
    CheckpointSaved,
    Finished,
    Paused,
    Resumed,
    Started,
    Step,
    Throttled,
    Validation,
)


def started(steps=1000):
    return Started(
        step=0,
        steps=steps,
        parameters=1000,
        tokens_per_step=4096,
        epochs=1.0,
        flops_per_token=10**7,
        epochs_by_source={},
        dropped_fraction=0.0,
        padding=0.0,
        micro_batches=1,
    )


def step(n, loss=3.0, speed=50_000.0):
    return Step(n, 1000, n * 4096, loss, 3e-4, 0.83, speed, n * 0.1, 754.0, 312 * 10**6)


def shown(*events, peak=1e12):
    now = [0.0]
    metrics = TrainingMetrics(peak, now=lambda: now[0])
    for event in events:
        metrics.update(event)
    now[0] = 130.0
    return metrics


def test_the_metrics_and_their_order():
    metrics = shown(started(), step(1, 5.0, 0.0), Validation(1, 1, 2.0, 7.4, 1.25, True), step(2, 3.0))
    loss = float(metrics.metrics()[0].removeprefix("loss "))
    assert 3.0 < loss < 5.0
    assert metrics.metrics()[1:] == [
        "12m34s left",
        "50,000 tokens/s",
        "best 1.250 bits/byte",
        "312 MB",
        "500 GFLOP/s (50%)",
        "lr 0.0003",
        "grad norm 0.83",
    ]
    assert "500 GFLOP/s" in shown(started(), step(2), peak=None).metrics()


def test_a_worse_validation_is_not_the_best():
    worse = Validation(2, 2, 3.0, 20.0, 1.5, False)
    assert "best 1.250 bits/byte" in shown(started(), Validation(1, 1, 2.0, 7.4, 1.25, True), worse, step(2)).metrics()


@pytest.mark.parametrize("width", [200, *range(5, 90)])
def test_no_line_is_wider_than_the_terminal(width):
    full = (
        started(),
        step(500),
        Validation(1, 1, 2.0, 7.4, 1.25, True),
        CheckpointNotSaved(3, "full", "free 3 GB"),
        Paused(500, "the machine runs on battery"),
    )
    lines = shown(*full).lines(width)
    assert lines and all(len(line) <= width for line in lines) and len(lines) <= 9
    if width >= 40:
        assert lines[0].startswith("step 500/1000 ━") and lines[0].endswith("┄ 50%")
        text = " ".join(lines)
        assert "paused: the machine runs on battery" in text and "for 2m10s" in text and "disk is full" in text
    if width == 80:
        assert len(lines) == 5


def test_pauses_and_unsaved_checkpoints_end():
    path = Path("x")
    metrics = shown(
        started(),
        step(5),
        Paused(5, "hot"),
        Resumed(5, "hot", 3.0),
        CheckpointNotSaved(5, "f", "h"),
        CheckpointSaved(6, path),
    )
    assert len(metrics.lines(200)) == 2
    slowed = shown(started(), step(5), Throttled(5, "the machine is hot", 50.0))
    assert "training 50% of the time: the machine is hot" in " ".join(slowed.lines(200))
    assert shown(started()).lines(80)[1:] == ["compiling the first step"] and shown().lines(80) == []


def test_runtime_options_with_resume(tmp_path, text_file, capsys):
    run = tmp_path / "run"
    quick = ["--preset", "0.3m", "--batch-size", "2", "--max-seq-length", "16", "--vocab-size", "300", "--steps", "1"]
    assert _run(["pretrain", str(text_file), "--out", str(run), *quick, "--duty-cycle", "90"]) == 0
    said = capsys.readouterr().err  # a run of one step has a result, if no speed
    assert "best validation" in said and "nothing was left to do" not in said and "0 tokens/s" not in said
    assert (
        _run(["pretrain", "--resume", str(run), "--duty-cycle", "50", "--on-battery", "slow", "--on-heat", "pause"])
        == 0
    )
    said = capsys.readouterr().err.splitlines()
    assert "nothing was left to do" in said[-1] and not any("steps 3 to 2" in line for line in said)
    assert (run / "report.html").exists()
    assert _run(["pretrain", "--resume", str(run), "--duty-cycle", "0"]) == 2
    assert _run(["pretrain", "--resume", str(run), "--on-heat", "sweat"]) == 2


def test_a_stop_in_the_last_step_of_a_run_ends_the_sweep(monkeypatch, capsys):
    """The run is finished, and the next ones are not started."""
    made = []

    def stops_in_its_last_step(run, *, stop, **_options):
        stop.requested = True
        return Finished(1, 1.0, 1.0, 1.0, 1.0, 1, run)

    monkeypatch.setattr(training, "run_training", stops_in_its_last_step)
    monkeypatch.setattr("mlxlm.experiments.run_group.is_finished", lambda run: False)
    runs = [(name, lambda name=name: made.append(name) or name) for name in ("one", "two")]
    sweep = SimpleNamespace(COMMAND="mlxlm scaling", path=Path("my grid"))
    with click.Context(click.Command("scaling")):
        assert training.train_sweep(sweep, runs, len(runs)) == ([], 143) and made == ["one"]
    assert capsys.readouterr().err.splitlines()[-2:] == ["Continue with:", "mlxlm scaling --resume 'my grid'"]


@pytest.mark.parametrize("has_report", [True, False])
def test_a_finished_run_gets_its_report(monkeypatch, tmp_path, has_report):
    """A sweep that was killed before the report of a run writes it when it continues."""
    if has_report:
        (tmp_path / REPORT_FILE).write_text("")
    trained = []
    monkeypatch.setattr(training, "run_training", lambda run, **_: trained.append(run) or Finished(*[1] * 6, run.path))
    monkeypatch.setattr("mlxlm.experiments.run_group.is_finished", lambda run: True)
    run = SimpleNamespace(path=tmp_path)
    sweep = SimpleNamespace(COMMAND="mlxlm scaling", path=tmp_path)
    with click.Context(click.Command("scaling")):
        assert training.train_sweep(sweep, [("one", lambda: run)], 1) == ([], 0)
    assert trained == ([] if has_report else [run])

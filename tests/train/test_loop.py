"""Training runs: bit-equal resume, stopping, samples, validation, errors."""

import itertools
import json
import math
import threading
from contextlib import closing

import numpy as np
import pytest

from mlxlm import generate
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.data import DataOptions, Manifest, TrainBatches
from mlxlm.evaluate import Evaluation
from mlxlm.report import read_run
from mlxlm.tokenizer import load
from mlxlm.train import Finished, Run, Sample, Step, Stopped, TrainingWarning, Validation, train
from mlxlm.train.events import Failed
from mlxlm.train.loop import SpikeDetector
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import CheckpointError, DataError, DeviceError, TrainingError
from tests.train.training_runs import GPT2, contents, finish, read_log


def logged(run: Run, event: str, *fields: str) -> list[tuple]:
    return [tuple(e[name] for name in ("step", *fields)) for e in read_log(run) if e["event"] == event]


@pytest.mark.parametrize(
    ("weights", "changes"),
    [
        (None, {"dropout": 0.1, "grad_accumulation_steps": 2, "grad_checkpoint": True}),
        (None, {"lr_schedule": "wsd", "save_every": 7, "optimizer": "muon", "ema_decay": 0.9}),
        ([3, 1], {"packing": "best-fit", "document_mask": True}),
        ([1, 1], {"document_mask": True, "grad_accumulation_steps": 2, "config": GPT2}),
    ],
)
def test_resume_is_bit_equal(new_run, two_sources, weights, changes):
    """20 steps are 10, a resume and 10. The resumed run first does the validation that was due when it was stopped."""
    data = weights and DataOptions(two_sources, weights)
    whole, parts = new_run("whole", data, **changes), new_run("parts", data, **changes)
    assert isinstance(finish(whole)[-1], Finished)
    events = finish(parts, stop_at=10)
    assert events[-1] == Stopped(10, parts.path) and not [e for e in events if isinstance(e, Validation)]
    with parts.log_file.open("a") as file:
        file.write('{"event": "step", "step": 11, "tokens": 1, "loss": 9.0}\n{"event": "st')  # of a power cut
    assert isinstance(finish(Run.open(parts.path), resume=True)[-1], Finished)
    assert contents(whole.path / "checkpoints/step-20") == contents(parts.path / "checkpoints/step-20")
    for event in ("step", "validation"):
        assert logged(whole, event, "loss") == logged(parts, event, "loss")
    assert best_checkpoint(whole.path).name == best_checkpoint(parts.path).name


def test_epochs_of_weighted_sources_and_of_padded_rows(new_run, two_sources):
    def started(name, weights, **settings):
        run = new_run(name, DataOptions(two_sources, weights), steps=12, **settings)
        return run, next(train(run, load(run.path)))

    _, mixed = started("mixed", [3, 1], packing="best-fit", document_mask=True)
    assert set(mixed.epochs_by_source) == {"a.jsonl", "b.jsonl"} and mixed.dropped_fraction == 0 < mixed.padding < 0.1
    assert mixed.epochs_by_source["a.jsonl"] > 2 * mixed.epochs_by_source["b.jsonl"]  # they have as many documents
    run, whole = started("whole", None, document_mask=True, grad_accumulation_steps=2)
    assert whole.epochs_by_source == {"train": whole.epochs} and whole.padding == 0 < whole.dropped_fraction < 0.02
    assert whole.epochs == pytest.approx(12 * 4 * 2 * 32 / Manifest.read(run.data).train.tokens, rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.9, "dropout": 0.1}])
def test_on_step_sees_the_model_of_each_step_and_changes_nothing(new_run, changes):
    """The model is in evaluation mode, has the weights that a checkpoint would have, and can generate."""
    silent, watched = new_run("silent", steps=4, **changes), new_run("watched", steps=4, **changes)
    seen, tokens = [], mx.array([[1, 2, 3]])

    def on_step(step, lm):
        generate(lm, [1, 2, 3], max_tokens=2)
        assert not any(module.training for module in lm.model.modules())
        seen.append((step.step, lm.model(tokens)))
        mx.eval(seen[-1][1])

    finish(silent)
    finish(watched, on_step=on_step)
    assert [number for number, _ in seen] == [1, 2, 3, 4]
    assert contents(silent.path / "checkpoints/step-4") == contents(watched.path / "checkpoints/step-4")
    assert mx.array_equal(load_model(watched.path)[0](tokens), seen[-1][1])


def test_training_lowers_the_loss_and_writes_a_model(new_run):
    run = new_run("run", steps=30, eval_every=10)
    validations = [e for e in finish(run) if isinstance(e, Validation)]
    assert validations[-1].loss < validations[0].loss < np.log(300) + 0.1
    assert validations[-1].perplexity == pytest.approx(np.exp(validations[-1].loss))
    manifest = json.loads((run.data / "manifest.json").read_text())["validation"]
    ratio = manifest["tokens"] / manifest["bytes"]
    assert validations[-1].bits_per_byte == pytest.approx(validations[-1].loss / np.log(2) * ratio)
    model, config = load_model(run.path)
    assert config.vocab_size == 300 and model(mx.array([[1, 2, 3]])).shape == (1, 3, 300)
    assert {e["event"] for e in read_log(run)} == {"started", "step", "validation", "checkpoint_saved", "finished"}


# Losses that are too high or not finite


def change_losses(monkeypatch, loss_of):
    """Replace the loss of step n by `loss_of(n, loss)`."""
    real, steps = TrainStep.__call__, itertools.count(1)

    def changed(self, batches, rate):
        loss, *others = real(self, batches, rate)
        return loss_of(next(steps), loss), *others

    monkeypatch.setattr(TrainStep, "__call__", changed)


def test_nan_loss_stops_before_saving(new_run, monkeypatch):
    run = new_run("run", save_every=5, eval_every=5)
    change_losses(monkeypatch, lambda step, loss: loss * float("nan") if step == 8 else loss)
    with pytest.raises(TrainingError, match="stopped at step 8: the loss is nan.*step-5.*learning_rate"):
        finish(run)
    assert [c.name for c in run.checkpoints()] == ["step-5"]


def test_last_good_checkpoint_is_before_the_loss_rose(new_run, monkeypatch):
    """Checkpoints that are saved while the loss rises are not good."""
    run = new_run("run", steps=40, save_every=5, eval_every=0, save_total_limit=1)
    change_losses(monkeypatch, lambda step, loss: loss * 0 + (4.0 if step <= 3 else 6.5 if step <= 8 else 60.0))
    with pytest.raises(
        TrainingError, match=r"step 23: the loss rose to 60.00: 15 of .* 6.70; the last good .*step-10 "
    ):
        finish(run)
    loaded, _ = load_model(run.path / "checkpoints/step-10")
    assert loaded(mx.array([[1]])).shape == (1, 1, 300)


@pytest.mark.parametrize("validation_loss", [6.6, 6.8])
def test_a_run_that_ends_worse_than_chance_fails(new_run, monkeypatch, validation_loss):
    """A run of a few steps, in which the loss alone shows no divergence. Chance is ln 300 = 5.70 nats."""
    run, losses = new_run("run", steps=3, eval_every=2), iter([9.0, validation_loss])
    monkeypatch.setattr("mlxlm.train.objectives.evaluate_dataset", lambda *_, **__: Evaluation(next(losses), 1.0, 9))
    if validation_loss < np.log(300) + 1:
        assert finish(run)[-1].best_loss == validation_loss
        return
    with pytest.raises(TrainingError, match="step 3: the best validation loss is 6.80, that of a uniform .* 5.70"):
        finish(run)


def test_nan_validation_loss_stops_training(new_run, monkeypatch):
    run, nan = new_run("run", eval_every=2), Evaluation(float("nan"), float("nan"), 9)
    monkeypatch.setattr("mlxlm.train.objectives.evaluate_dataset", lambda *_, **__: nan)
    with pytest.raises(TrainingError, match="stopped at step 2: the validation loss is nan"):
        finish(run)
    assert run.checkpoints() == []


# Other errors


def test_errors_are_logged(new_run, monkeypatch):
    """If the log can't be written either, the first error is raised."""
    run, real, steps = new_run("run", steps=4), TrainStep.__call__, itertools.count(1)

    def broken(self, batches, rate):
        if next(steps) >= 3:
            raise RuntimeError("[malloc] Unable to allocate 99 bytes.")
        return real(self, batches, rate)

    monkeypatch.setattr(TrainStep, "__call__", broken)
    with pytest.raises(DeviceError, match="malloc"):
        finish(run)
    last = read_log(run)[-1]
    assert (last["event"], last["step"]) == ("failed", 3) and last["message"].startswith("out of memory")
    assert (run.path / "report.html").exists()

    def record(log, event):
        if isinstance(event, Failed):
            raise CheckpointError("cannot write")

    monkeypatch.setattr("mlxlm.train.loop.RunLog.record", record)
    with pytest.raises(DeviceError, match="malloc"):
        finish(Run.open(run.path), resume=True)


def test_plot_errors_are_warnings(new_run):
    run = new_run("run", steps=2)
    (run.path / "report.html").write_text("mine")
    events = finish(run)
    assert isinstance(events[-1], TrainingWarning) and "is not a report" in events[-1].message
    assert read_log(run)[-1]["message"] == events[-1].message
    assert read_run(run.path).state == "finished"


def test_resume_errors(stopped):
    with pytest.raises(CheckpointError, match="has been trained already"):
        finish(stopped)
    train_json = stopped.path / "train.json"
    values = json.loads(train_json.read_text())
    train_json.write_text(json.dumps({**values, "settings": {**values["settings"], "batch_size": 2}}))
    with pytest.raises(CheckpointError, match="other settings than step-15: batch_size"):
        finish(Run.open(stopped.path), resume=True)
    train_json.write_text(json.dumps(values))
    with stopped.locked(), pytest.raises(CheckpointError, match="is being trained by another process"):
        finish(stopped, resume=True)
    manifest = stopped.data / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(DataError, match="has changed since"):
        finish(stopped, resume=True)


# Samples


def test_sampling_does_not_change_training(new_run):
    runs = {prompt: new_run(f"run {prompt}", steps=4, dropout=0.1, sample_every=2, sample_tokens=3,
                            sample_prompt=prompt) for prompt in ("", "The cat")}  # fmt: skip
    for prompt, run in runs.items():
        samples = [e for e in finish(run) if isinstance(e, Sample)]
        assert [(s.step, s.prompt) for s in samples] == [(2, prompt), (4, prompt)]
    without = new_run("without", steps=4, dropout=0.1)
    finish(without)
    models = {(run.path / "checkpoints/step-4/model.safetensors").read_bytes() for run in (without, *runs.values())}
    assert len(models) == 1


def test_resume_samples_once_if_it_was_due(new_run):
    run = new_run("run", steps=8, eval_every=0, sample_every=4, sample_tokens=3)
    for stop_at in (4, 0, 8, 8):  # before the sample of step 4, after it, at the end, and with nothing to do
        finish(Run.open(run.path), resume=True, stop_at=stop_at)
    finish(Run.open(run.path), resume=True)
    assert logged(run, "sample") == [(4,), (8,)]


# Generators that are closed, and the thread that reads batches


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_restart_before_the_first_checkpoint_logs_steps_once(new_run):
    run = new_run("run", steps=4)
    with closing(train(run, load(run.path))) as events:
        while getattr(next(events), "step", 0) < 2:
            pass
        assert prefetch_threads()
    assert not prefetch_threads()
    finish(Run.open(run.path))
    assert logged(run, "step") == [(1,), (2,), (3,), (4,)]


def test_read_errors_end_the_run(new_run, monkeypatch):
    run, real, seen = new_run("run"), TrainBatches.batch, []

    def fails(self, index):
        if index == 4:
            raise DataError("the disk is gone")
        return real(self, index)

    monkeypatch.setattr(TrainBatches, "batch", fails)
    with pytest.raises(DataError, match="the disk is gone"):
        for event in train(run, load(run.path)):
            seen += [event.step] if isinstance(event, Step) else []
    assert seen == [1, 2, 3, 4] and not prefetch_threads()


def test_time_asleep_is_reported_and_counts_nowhere(new_run, monkeypatch):
    """The clocks of a run stand still while the machine sleeps."""
    run, asleep = new_run("run", steps=4), iter([5.0, 5.0, 14.0, 7814.0, 7814.0])
    monkeypatch.setattr("mlxlm.train.loop.seconds_asleep", lambda: next(asleep))
    events = finish(run)
    (warning,) = (e for e in events if isinstance(e, TrainingWarning))
    assert (warning.step, warning.message) == (3, "this machine slept for 2h10m, which is no training time")
    assert events[-1].seconds < 60 and "this machine slept" in str(read_log(run))


def test_low_power_mode_is_reported(new_run, monkeypatch):
    monkeypatch.setattr("mlxlm.train.loop.platform.low_power_mode", lambda: True)
    warnings = [e.message for e in finish(new_run("run", steps=1)) if isinstance(e, TrainingWarning)]
    assert warnings == ["this Mac is in Low Power Mode, which slows training down"]


STEPS = np.arange(4000)


def bimodal(rng, fraction):
    """Answers of which most are known, as in fine-tuning with a batch size of 1."""
    return np.where(rng.random(len(STEPS)) < fraction, 3 + 0.5 * rng.standard_normal(len(STEPS)), 0.01)


HEALTHY = {
    "stationary": lambda rng: 3 + 0.5 * rng.standard_normal(len(STEPS)),
    "decaying": lambda rng: 3 + 3 * np.exp(-STEPS / 300) + 0.5 * rng.standard_normal(len(STEPS)),
    "noise above the threshold": lambda rng: 6 + 1.5 * rng.standard_normal(len(STEPS)),
    "heavy-tailed": lambda rng: np.exp(rng.standard_normal(len(STEPS))),
    "a sixth is not learned": lambda rng: bimodal(rng, 1 / 6),
    "a third is not learned": lambda rng: bimodal(rng, 1 / 3),
}


def stopped_at(losses, detector=None):
    detector = detector or SpikeDetector(1.0, math.log(1024))
    return next((step for step, loss in enumerate(losses, 1) if detector.problem(max(loss, 1e-6), 1.0)), None)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_not_stopped(name):
    """Of 2,000 runs of each kind, none is; here are three."""
    rng = np.random.default_rng(0)
    assert [stopped_at(HEALTHY[name](rng).tolist()) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize(
    ("rise", "earliest", "latest"),
    [(lambda step: 3.0, 14, 25), (lambda step: 0.1 * step, 10, 50), (lambda step: 0.01 * step, 80, 250)],
    ids=["jump", "fast", "slow"],
)
def test_diverging_runs_are_stopped_soon(rise, earliest, latest):
    rng = np.random.default_rng(0)
    for noise in (0.05, 0.5):
        losses = 3 + 3 * np.exp(-STEPS / 200) + noise * rng.standard_normal(len(STEPS))
        losses[1000:] += [rise(step) for step in range(3000)]
        assert earliest <= stopped_at(losses.tolist()) - 1000 <= latest


def test_a_run_that_diverges_at_once_is_stopped():
    """It has no lower loss to compare with. Above a uniform distribution's only the first losses of some models are."""
    assert stopped_at([7.0, 7.1] + [50_000.0] * 20) == 17
    assert stopped_at([12.0] * 50 + [6.0] * 50) is None
    assert stopped_at([7.0] + [9.0] * 14 + [6.0] * 50) is None


def test_a_resumed_run_is_stopped_at_the_same_step():
    rng = np.random.default_rng(0)
    losses = (3 + 0.5 * rng.standard_normal(300) + np.where(np.arange(300) < 200, 0, 3)).tolist()
    whole = stopped_at(losses)
    first = SpikeDetector(1.0, math.log(1024))
    assert stopped_at(losses[: whole - 1], first) is None
    assert not first.healthy  # a checkpoint saved now is not a good one
    state = json.loads(json.dumps(first.state))
    assert stopped_at(losses[whole - 1 :], SpikeDetector(1.0, math.log(1024), state)) == 1


def test_losses_that_are_not_compared():
    """Of steps without a token to learn; and all, with a threshold of 0, except those that are not finite."""
    detector = SpikeDetector(1.0, math.log(1024))
    assert stopped_at([3.0] * 100, detector) is None
    state = detector.state
    assert all(detector.problem(0.0, 0.0) is None for _ in range(100)) and detector.state == state
    assert detector.healthy and stopped_at([4.5] * 20, detector) is not None
    off = SpikeDetector(0.0, math.log(1024))
    assert stopped_at([3.0] * 100 + [9e9] * 100, off) is None and off.healthy
    assert off.problem(math.nan, 1.0) == "the loss is nan and the gradient's norm 1.0"

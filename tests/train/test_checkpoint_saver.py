"""Checkpoints by steps and by time, and on a full disk."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxlm.model import Decoder
from mlxlm.tokenizer import load
from mlxlm.train import CheckpointNotSaved, CheckpointSaved, Finished, Paused, Resumed, Step, Stopped, train
from mlxlm.train.checkpoint_saver import CheckpointSaver, checkpoint_bytes
from mlxlm.train.run import TrainState
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import CheckpointError
from tests.train.training_runs import contents, finish, read_log

ROOM = 1 << 30


class Disk:
    """A disk of `free` bytes and a clock at `seconds`, of which a step takes 10, for all runs."""

    def __init__(self, monkeypatch):
        self.free, self.seconds = ROOM, 0.0
        clock = SimpleNamespace(monotonic=lambda: self.seconds, sleep=self._sleep)
        monkeypatch.setattr("mlxlm.train.checkpoint_saver.free_disk_bytes", lambda path: self.free)
        monkeypatch.setattr("mlxlm.train.checkpoint_saver.time", clock)
        monkeypatch.setattr("mlxlm.train.throttle.time", clock)

    def _sleep(self, seconds):
        self.seconds += seconds
        self.on_sleep()

    def on_sleep(self):
        pass

    def finish(self, run, at=lambda event: None, should_stop=lambda: False, **options):
        """All events of a run; `at` is called with each."""
        events = []
        for event in train(run, load(run.path), should_stop=should_stop, now=lambda: self.seconds, **options):
            self.seconds += 10 * isinstance(event, Step)
            at(event)
            events.append(event)
        return events


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def saves(events):
    """The steps of checkpoints, negative for those that were not saved."""
    kinds = {CheckpointSaved: 1, CheckpointNotSaved: -1}
    return [kinds[type(e)] * e.step for e in events if type(e) in kinds]


# A full disk


def test_checkpoint_bytes(new_run):
    run = new_run("run", steps=1)
    step = TrainStep(Decoder(run.config), run.settings)
    finish(run)
    [folder] = run.checkpoints()
    written = sum(f.stat().st_size for f in folder.iterdir())
    assert checkpoint_bytes(step) <= written <= checkpoint_bytes(step) + 20_000


def test_training_continues_on_a_full_disk(new_run, disk):
    """A checkpoint that is postponed at step 10 is tried again a minute later, which is 6 steps, or when one is due."""
    run, whole = new_run("run", steps=20, save_every=5, eval_every=0), new_run("whole", steps=20)
    finish(whole)

    def at(event):
        disk.free = 1000 if 7 <= event.step < 13 else ROOM

    events = disk.finish(run, at)
    assert saves(events) == [5, -10, 15, 20]
    [event] = [e for e in events if isinstance(e, CheckpointNotSaved)]
    assert "a checkpoint needs 17" in event.reason and "1 kB of the disk are free" in event.reason
    assert event.hint.startswith("free 17") and str(run.path) in event.hint
    assert contents(whole.path / "checkpoints/step-20") == contents(run.path / "checkpoints/step-20")
    assert [e["step"] for e in read_log(run) if e["event"] == "checkpoint_not_saved"] == [10]


def test_postponed_checkpoint_is_saved_when_there_is_room(new_run, disk):
    run = new_run("run", steps=20, save_every=10, eval_every=0)

    def at(event):
        disk.free = 0 if 5 < event.step < 18 else ROOM

    assert saves(disk.finish(run, at)) == [-10, 18, 20]


def test_disk_that_fills_up_while_saving(new_run, disk, monkeypatch):
    from mlxlm.train import run as module

    run, real, folders = new_run("run", steps=6, save_every=2, eval_every=0), module.write_hashed, []

    def full(path, tensors, **options):
        if path.parent.name.startswith(".step-4."):
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, tensors, **options)

    monkeypatch.setattr(module, "write_hashed", full)

    def at(event):
        if isinstance(event, CheckpointNotSaved):
            folders.extend(p.name for p in (run.path / "checkpoints").iterdir())

    events = disk.finish(run, at)
    assert saves(events) == [2, -4, 6] and folders == ["step-2"]
    [event] = [e for e in events if isinstance(e, CheckpointNotSaved)]
    assert "No space left on device" in event.reason and "disk space" in event.hint


def test_last_checkpoint_waits_for_room(new_run, disk):
    run = new_run("run", steps=4, save_every=0, eval_every=0)
    disk.on_sleep = lambda: setattr(disk, "free", ROOM if disk.seconds > 3600 else 0)
    events = disk.finish(run, lambda event: setattr(disk, "free", 0))
    assert [type(e) for e in events[-5:]] == [CheckpointNotSaved, Paused, Resumed, CheckpointSaved, Finished]
    assert "no room for the last checkpoint" in events[-4].reason and 3500 < events[-3].seconds < 3700
    assert [c.name for c in run.checkpoints()] == ["step-4"]


def test_stop_while_the_last_checkpoint_waits(new_run, disk):
    run = new_run("run", steps=4, save_every=2, eval_every=0)

    def at(event):
        if event.step == 3:
            disk.free = 0

    with pytest.raises(CheckpointError, match="the training up to step 4 is not saved: a checkpoint needs .*free 1"):
        disk.finish(run, at, should_stop=lambda: disk.seconds > 100)
    assert [c.name for c in run.checkpoints()] == ["step-2"]
    assert read_log(run)[-1]["event"] == "failed"
    disk.free = ROOM
    assert isinstance(finish(run, resume=True)[-1], Finished)


def test_stop_without_room_waits_for_it(new_run, disk):
    run = new_run("run", steps=9, eval_every=0)
    disk.free = 0
    disk.on_sleep = lambda: setattr(disk, "free", ROOM if disk.seconds > 500 else 0)
    events = disk.finish(run, should_stop=lambda: disk.seconds >= 40)
    assert [type(e) for e in events[-5:]] == [CheckpointNotSaved, Paused, Resumed, CheckpointSaved, Stopped]
    assert events[-1].step == 4 and run.checkpoints()[-1].name == "step-4"


def test_other_errors_are_raised(new_run, disk, monkeypatch):
    run = new_run("run", steps=1)

    def broken(*_, **__):
        raise CheckpointError("the weights are not finite")

    monkeypatch.setattr("mlxlm.train.run.write_hashed", broken)
    with pytest.raises(CheckpointError, match="not finite"):
        disk.finish(run)


# Room that is made by deleting checkpoints


class Log:
    def flush(self):
        pass


def make_saver(run):
    return CheckpointSaver(run, TrainStep(Decoder(run.config), run.settings), Log())


@pytest.fixture
def three_checkpoints(new_run):
    run = new_run("run", steps=8, save_every=2, eval_every=0, save_total_limit=3)
    finish(run, stop_at=6)
    assert [c.name for c in run.checkpoints()] == ["step-2", "step-4", "step-6"]
    return run


def test_expired_checkpoint_is_deleted_first(three_checkpoints, monkeypatch):
    """With a limit of 3 the oldest is deleted before the fourth is written."""
    run, saver = three_checkpoints, make_saver(three_checkpoints)
    oldest = run.checkpoints()[0]
    monkeypatch.setattr(
        "mlxlm.train.checkpoint_saver.free_disk_bytes", lambda path: saver._needed - 100_000 * oldest.exists()
    )
    assert isinstance(saver.save(TrainState(8)), CheckpointSaved)
    assert [c.name for c in run.checkpoints()] == ["step-4", "step-6", "step-8"]


def test_no_checkpoint_is_deleted_if_that_makes_too_little_room(three_checkpoints, disk):
    disk.free = 1000
    saver = make_saver(three_checkpoints)
    assert isinstance(saver.save(TrainState(8)), CheckpointNotSaved) and len(three_checkpoints.checkpoints()) == 3
    missing, model = saver._missing_bytes(), three_checkpoints.checkpoints()[0] / "model.safetensors"
    (three_checkpoints.path / "mine").hardlink_to(model)  # deleting one of two names makes no room
    assert saver._missing_bytes() == missing + model.stat().st_size


def test_only_checkpoint_is_not_deleted(new_run, disk):
    run = new_run("run", steps=4, save_total_limit=1)
    finish(run, stop_at=2)
    disk.free = 0
    assert isinstance(make_saver(run).save(TrainState(3)), CheckpointNotSaved)
    assert [c.name for c in run.checkpoints()] == ["step-2"]


# A disk without hard links


def test_full_disk_without_hard_links_keeps_the_model(new_run, disk, monkeypatch):
    run, models, real = new_run("run", steps=8, save_every=4, eval_every=4), [], shutil.copy2
    model = run.path / "model.safetensors"

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    def full(source, target):
        if "step-4." in str(source):
            return real(source, target)
        models.append(model.read_bytes())
        if len(models) == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return real(source, target)

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    monkeypatch.setattr("mlxlm.utils.files.shutil.copy2", full)
    assert saves(disk.finish(run))[-2:] == [-8, 8]
    assert models[0] == models[1] != model.read_bytes()
    assert {p.name for p in (run.path / "checkpoints").iterdir()} == {"step-4", "step-8"}


# By time


def test_checkpoints_by_time(new_run, disk):
    """A step takes 10 seconds: with a minute between checkpoints, every sixth step is saved."""
    options = {"steps": 15, "save_every": 0, "eval_every": 0, "dropout": 0.1}
    whole, run = new_run("whole", save_minutes=0, **options), new_run("run", save_minutes=1, **options)
    assert saves(disk.finish(whole)) == [15]
    events = train(run, load(run.path), now=lambda: disk.seconds)
    for event in events:
        disk.seconds += 10 * isinstance(event, Step)
        if event.step == 14:
            break
    events.close()
    assert [c.name for c in run.checkpoints()] == ["step-6", "step-12"]
    rest = disk.finish(run, resume=True)
    assert next(e.step for e in rest if isinstance(e, Step)) == 13 and saves(rest) == [15]
    assert contents(whole.path / "checkpoints/step-15") == contents(run.path / "checkpoints/step-15")


def test_time_counts_from_the_last_checkpoint(new_run, disk):
    run = new_run("run", steps=14, save_every=5, eval_every=0, save_minutes=0.5)
    assert saves(disk.finish(run)) == [3, 5, 8, 10, 13, 14]

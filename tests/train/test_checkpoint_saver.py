"""Checkpoints on a full disk, and what a power cut can't take."""

import errno
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.model import Decoder
from mlxlm.tokenizer import load
from mlxlm.train import CheckpointNotSaved, CheckpointSaved, Finished, Paused, Resumed, Step, Stopped, train
from mlxlm.train.checkpoint_saver import CheckpointSaver, checkpoint_bytes
from mlxlm.train.step import TrainStep
from mlxlm.train.throttle import Throttle
from mlxlm.train.train_state import TrainState
from mlxlm.utils.errors import CheckpointError
from tests.train.training_runs import contents, finish, read_log

ROOM = 1 << 30


class Disk:
    """What runs see of the disk and the clock: `free` bytes, and `seconds`, of which a step takes 10."""

    def __init__(self, monkeypatch, free=ROOM):
        self.free, self.seconds = free, 0.0
        saver = partial(CheckpointSaver, free=lambda path: self.free, now=lambda: self.seconds)
        monkeypatch.setattr("mlxlm.train.loop.CheckpointSaver", saver)
        monkeypatch.setattr(
            "mlxlm.train.throttle.Throttle", partial(Throttle, now=lambda: self.seconds, sleep=self._sleep)
        )

    def _sleep(self, seconds):
        self.seconds += seconds
        self.on_sleep()

    def on_sleep(self):
        pass

    def drive(self, run, at=lambda event: None, should_stop=lambda: False, **options):
        """All events of a run; `at` is called with each."""
        events = []
        for event in train(run, load(run.path), should_stop=should_stop, **options):
            self.seconds += 10 * isinstance(event, Step)
            at(event)
            events.append(event)
        return events


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def of_kind(events, *kinds):
    return [(type(e), e.step) for e in events if isinstance(e, kinds)]


def test_the_size_of_a_checkpoint_is_known_before(new_run):
    run = new_run("run", steps=2)
    step = TrainStep(Decoder(run.config), run.settings)
    finish(run)
    [folder] = run.checkpoints()
    written = sum(f.stat().st_size for f in folder.iterdir())
    assert checkpoint_bytes(step) <= written <= checkpoint_bytes(step) + 20_000


def test_without_room_training_goes_on_and_saves_when_there_is_some(new_run, disk):
    run, whole = new_run("run", steps=30, save_every=5, eval_every=0), new_run("whole", steps=30)
    finish(whole)

    def at(event):
        if event.step == 7:
            disk.free = 1000
        if event.step == 13:
            disk.free = ROOM

    events = disk.drive(run, at)
    # Put off at step 10, tried again no sooner than after a minute, which is 6 steps.
    assert of_kind(events, CheckpointSaved, CheckpointNotSaved) == [
        (CheckpointSaved, 5),
        (CheckpointNotSaved, 10),
        (CheckpointSaved, 15),
        (CheckpointSaved, 20),
        (CheckpointSaved, 25),
        (CheckpointSaved, 30),
    ]
    [event] = [e for e in events if isinstance(e, CheckpointNotSaved)]
    assert "a checkpoint needs 17" in event.reason and "1 kB of the disk are free" in event.reason
    assert event.hint.startswith("free 17") and str(run.path) in event.hint
    assert contents(whole.path / "checkpoints/step-30") == contents(run.path / "checkpoints/step-30")
    assert [e["step"] for e in read_log(run) if e["event"] == "checkpoint_not_saved"] == [10]


def test_what_was_put_off_is_saved_as_soon_as_there_is_room(new_run, disk):
    run = new_run("run", steps=30, save_every=10, eval_every=0)

    def at(event):
        disk.free = 0 if 5 < event.step < 18 else ROOM

    assert of_kind(disk.drive(run, at), CheckpointSaved, CheckpointNotSaved) == [
        (CheckpointNotSaved, 10), (CheckpointSaved, 18), (CheckpointSaved, 20), (CheckpointSaved, 30),
    ]  # fmt: skip


def test_a_disk_that_fills_up_while_saving_kills_neither_the_run_nor_the_checkpoint_before(new_run, disk, monkeypatch):
    run, whole = new_run("run", steps=15, save_every=5, eval_every=0), new_run("whole", steps=15)
    finish(whole)
    from mlxlm.train import run as runs

    real = runs.write_hashed

    def full(path, tensors, **options):
        if path.parent.name.startswith(".step-10."):
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, tensors, **options)

    monkeypatch.setattr(runs, "write_hashed", full)
    found = []

    def at(event):
        if event.step == 10 and isinstance(event, CheckpointNotSaved):
            found.extend(p.name for p in (run.path / "checkpoints").iterdir())

    events = disk.drive(run, at)
    assert of_kind(events, CheckpointSaved, CheckpointNotSaved) == [
        (CheckpointSaved, 5),
        (CheckpointNotSaved, 10),
        (CheckpointSaved, 15),
    ]
    assert found == ["step-5"]  # whole, and nothing half beside it
    [event] = [e for e in events if isinstance(e, CheckpointNotSaved)]
    assert "No space left on device" in event.reason and "disk space" in event.hint
    assert contents(whole.path / "checkpoints/step-15") == contents(run.path / "checkpoints/step-15")


def test_the_last_checkpoint_is_waited_for(new_run, disk):
    run = new_run("run", steps=4, save_every=0, eval_every=0)

    def at(event):
        if event.step == 2:
            disk.free = 0

    disk.on_sleep = lambda: setattr(disk, "free", ROOM if disk.seconds > 3600 else 0)
    events = disk.drive(run, at)
    assert [type(e) for e in events[-5:]] == [CheckpointNotSaved, Paused, Resumed, CheckpointSaved, Finished]
    assert "no room for the last checkpoint" in events[-4].reason and 3500 < events[-3].seconds < 3700
    assert [c.name for c in run.checkpoints()] == ["step-4"]


def test_a_wait_for_room_can_be_given_up(new_run, disk):
    run = new_run("run", steps=4, save_every=2, eval_every=0)

    def at(event):
        if event.step == 3:
            disk.free = 0

    with pytest.raises(CheckpointError, match="the training up to step 4 is not saved: a checkpoint needs .*free 1"):
        disk.drive(run, at, should_stop=lambda: disk.seconds > 100)
    assert [c.name for c in run.checkpoints()] == ["step-2"]
    assert read_log(run)[-1]["event"] == "failed"
    disk.free = ROOM
    assert isinstance(finish(run, resume=True)[-1], Finished)


def test_a_stop_without_room_waits_for_it(new_run, disk):
    run = new_run("run", steps=9, eval_every=0)
    disk.free = 0
    disk.on_sleep = lambda: setattr(disk, "free", ROOM if disk.seconds > 500 else 0)
    events = disk.drive(run, should_stop=lambda: disk.seconds >= 40)
    assert [type(e) for e in events[-5:]] == [CheckpointNotSaved, Paused, Resumed, CheckpointSaved, Stopped]
    assert events[-1].step == 4 and run.checkpoints()[-1].name == "step-4"


def saver_of(run, free):
    return CheckpointSaver(run, TrainStep(Decoder(run.config), run.settings), Log(), free=free)


@pytest.fixture
def three_checkpoints(new_run):
    run = new_run("run", steps=8, save_every=2, eval_every=0, save_total_limit=3)
    finish(run, stop_at=6)
    assert [c.name for c in run.checkpoints()] == ["step-2", "step-4", "step-6"]
    return run


NEXT = TrainState(8)


def test_room_is_made_by_what_this_checkpoint_puts_out_anyway(three_checkpoints):
    """With keep 3 the oldest goes before the fourth is written, and no other does."""
    run, there = three_checkpoints, []
    needed = saver_of(run, lambda path: 0)._needed

    def free(path):
        there.append([c.name for c in run.checkpoints()])
        return needed if len(there[-1]) < 3 else needed - 100_000

    assert isinstance(saver_of(run, free).save(NEXT), CheckpointSaved)
    assert there[0] == ["step-2", "step-4", "step-6"] and there[-1] == ["step-4", "step-6"]
    assert [c.name for c in run.checkpoints()] == ["step-4", "step-6", "step-8"]


def test_no_checkpoint_goes_where_that_makes_too_little_room(three_checkpoints):
    event = saver_of(three_checkpoints, lambda path: 1000).save(NEXT)
    assert isinstance(event, CheckpointNotSaved) and len(three_checkpoints.checkpoints()) == 3


def test_the_only_checkpoint_stays_where_there_is_no_room(new_run):
    run = new_run("run", steps=4, save_total_limit=1)
    finish(run, stop_at=2)
    assert isinstance(saver_of(run, lambda path: 0).save(TrainState(3)), CheckpointNotSaved)
    assert [c.name for c in run.checkpoints()] == ["step-2"]


class Log:
    def flush(self):
        pass


def test_an_error_that_is_no_matter_of_room_is_one(new_run, disk, monkeypatch):
    run = new_run("run", steps=4)

    def broken(*_, **__):
        raise CheckpointError("the weights are not finite")

    monkeypatch.setattr("mlxlm.train.run.write_hashed", broken)
    with pytest.raises(CheckpointError, match="not finite"):
        disk.drive(run)


def test_nothing_of_a_checkpoint_is_lost_with_the_power(new_run, monkeypatch):
    """Each file and folder is flushed to the disk before the name appears, the name itself after, the log before."""
    run = new_run("run", steps=2)
    happened = []
    fsync, rename, mkdir = os.fsync, Path.replace, Path.mkdir

    def flushed(descriptor):
        happened.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(path, target):
        happened.append(("rename", str(path), str(target)))
        return rename(path, target)

    def made(path, *args, **kwargs):
        happened.append(("mkdir", str(path)))
        mkdir(path, *args, **kwargs)

    if not Path("/proc/self/fd").exists():
        pytest.skip("file names of descriptors are in /proc")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(Path, "mkdir", made)
    finish(run)
    target = run.path / "checkpoints" / "step-2"
    [at] = [i for i, h in enumerate(happened) if h[0] == "rename" and h[2] == str(target)]
    partial_folder = happened[at][1]
    before = {h[1] for h in happened[:at] if h[0] == "flush"}
    for file in target.iterdir():
        assert f"{partial_folder}/{file.name}" in before
    assert {partial_folder, str(run.log_file)} <= before
    after = [h[1] for h in happened[at:] if h[0] == "flush"]
    assert str(target.parent) in after and str(run.path) in after  # the folder `checkpoints` is new, too


# By the clock


def test_a_checkpoint_is_due_by_time_and_changes_nothing(new_run, disk):
    """A step takes 10 seconds: with a minute between checkpoints every sixth is saved, and a kill costs that much."""
    options = {"steps": 15, "save_every": 0, "eval_every": 0, "dropout": 0.1}
    whole, run = new_run("whole", save_minutes=0, **options), new_run("run", save_minutes=1, **options)
    assert of_kind(disk.drive(whole, now=lambda: disk.seconds), CheckpointSaved) == [(CheckpointSaved, 15)]
    events = train(run, load(run.path), now=lambda: disk.seconds)
    for event in events:
        disk.seconds += 10 * isinstance(event, Step)
        if event.step == 14:
            break
    events.close()  # as a kill leaves it
    assert [c.name for c in run.checkpoints()] == ["step-6", "step-12"]
    rest = disk.drive(run, resume=True, now=lambda: disk.seconds)
    assert of_kind(rest, Step)[0] == (Step, 13) and of_kind(rest, CheckpointSaved) == [(CheckpointSaved, 15)]
    assert contents(whole.path / "checkpoints/step-15") == contents(run.path / "checkpoints/step-15")


def test_the_time_between_checkpoints_counts_from_the_last_one(new_run, disk):
    """Whatever that was due by."""
    run = new_run("run", steps=14, save_every=5, eval_every=0, save_minutes=0.5)
    assert run.settings.save_minutes == 0.5 and new_run("usual").settings.save_minutes == 10
    events = disk.drive(run, now=lambda: disk.seconds)
    assert of_kind(events, CheckpointSaved) == [(CheckpointSaved, n) for n in (3, 5, 8, 10, 13, 14)]


def test_a_checkpoint_that_is_due_by_time_waits_for_room(new_run, disk):
    run = new_run("run", steps=12, save_every=0, eval_every=0, save_minutes=0.5)

    def at(event):
        disk.free = ROOM if event.step >= 8 else 0

    events = disk.drive(run, at, now=lambda: disk.seconds)
    # Tried again when it is due again, and when there may be room after a minute.
    assert of_kind(events, CheckpointSaved, CheckpointNotSaved) == [
        (CheckpointNotSaved, 3),
        (CheckpointNotSaved, 6),
        (CheckpointSaved, 9),
        (CheckpointSaved, 12),
    ]


# The run's own model


def model_of(run):
    return (run.path / "model.safetensors").read_bytes()


@pytest.fixture
def no_links(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)


def test_the_run_has_the_weights_of_its_best_checkpoint(new_run):
    """Without their bytes twice."""
    run, names = new_run("run", steps=12, save_every=2, eval_every=4), set()
    for event in train(run, load(run.path)):
        if isinstance(event, CheckpointSaved):
            best = best_checkpoint(run.path)
            names.add(best.name)
            assert (best / "model.safetensors").samefile(run.path / "model.safetensors")
    assert len(names) > 1
    assert [p.name for p in run.path.glob(".model*")] == []


def test_a_disk_without_hard_links_has_a_copy(new_run, no_links):
    run = new_run("run", steps=4, save_every=2, eval_every=2)
    finish(run)
    best = best_checkpoint(run.path) / "model.safetensors"
    assert model_of(run) == best.read_bytes() and not best.samefile(run.path / "model.safetensors")
    before = (run.path / "model.safetensors").stat().st_ino
    run.update_model()
    assert (run.path / "model.safetensors").stat().st_ino == before  # it is known to be the same


def test_the_copy_needs_room_too(new_run, monkeypatch):
    run = new_run("run")
    step = TrainStep(Decoder(run.config), run.settings)
    model = sum(array.nbytes for array in step.weights().values())
    with_links = CheckpointSaver(run, step, Log())._needed
    monkeypatch.setattr("mlxlm.train.checkpoint_saver.has_hard_links", lambda path: False)
    assert CheckpointSaver(run, step, Log())._needed == with_links + model


def test_bytes_with_another_name_make_no_room(three_checkpoints):
    run = three_checkpoints
    saver = saver_of(run, lambda path: 0)
    missing = saver._missing_bytes()
    model = run.checkpoints()[0] / "model.safetensors"
    (run.path / "mine").hardlink_to(model)
    assert saver._missing_bytes() == missing + model.stat().st_size


@pytest.mark.parametrize("links", [True, False])
def test_a_crash_between_a_checkpoint_and_the_model_is_made_up_for(new_run, request, monkeypatch, links):
    if not links:
        request.getfixturevalue("no_links")
    run = new_run("run", steps=8, save_every=4, eval_every=4)
    finish(run, stop_at=4)
    finish(run, resume=True, stop_at=4)  # its validation is made up for
    first = model_of(run)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlxlm.train.run.commit_file", crash)
        with pytest.raises(KeyboardInterrupt):
            finish(run, resume=True)
    assert run.checkpoints()[-1].name == "step-8" and model_of(run) == first  # the one before, whole
    finish(run, resume=True)
    assert best_checkpoint(run.path).name == "step-8"
    assert model_of(run) == (run.path / "checkpoints/step-8/model.safetensors").read_bytes() != first


def test_a_full_disk_without_hard_links_leaves_the_model_before(new_run, disk, no_links, monkeypatch):
    run = new_run("run", steps=8, save_every=4, eval_every=4)
    seen, real = [], shutil.copy2

    def full(source, target):
        if "step-4." in str(source):
            return real(source, target)
        seen.append(model_of(run))
        if len(seen) == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return real(source, target)

    monkeypatch.setattr("mlxlm.utils.files.shutil.copy2", full)
    events = disk.drive(run)
    assert of_kind(events, CheckpointSaved, CheckpointNotSaved)[-2:] == [(CheckpointNotSaved, 8), (CheckpointSaved, 8)]
    assert seen[0] == seen[1] != model_of(run)
    assert {p.name for p in (run.path / "checkpoints").iterdir()} == {"step-4", "step-8"}


def test_a_run_without_checkpoints_is_loaded_from_its_own_model(new_run):
    run = new_run("run", steps=2)
    finish(run)
    shutil.rmtree(run.path / "checkpoints")
    model, _ = load_model(run.path)
    assert model(mx.array([[1, 2]])).shape == (1, 2, 300)

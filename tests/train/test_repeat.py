"""Runs with a time limit, repeated from their log."""

import itertools

import pytest

from mlxlm.cli.main import _run
from mlxlm.train import Finished, Run, StepsChanged, repeat_run
from mlxlm.utils.errors import CheckpointError, DataError
from tests.train.training_runs import contents, finish, read_log


class Ticking:
    """A clock that goes on by some seconds whenever it is asked, the same in every run."""

    def __init__(self, each=0.25):
        self._count, self._each = itertools.count(), each

    def __call__(self):
        return next(self._count) * self._each


def timed(new_run, name, **settings):
    return new_run(name, steps=20, time_limit=30.0, eval_every=0, save_every=5, **settings)


def test_repeat_is_bit_equal(new_run, tmp_path, capsys):
    run = timed(new_run, "original", lr_schedule="linear", eval_tokens=64)
    first = finish(run, now=Ticking(), stop_at=8)
    rest = finish(Run.open(run.path), resume=True, now=Ticking())
    assert any(isinstance(e, StepsChanged) for e in first) and isinstance(rest[-1], Finished)
    copy = repeat_run(tmp_path / "copy", Run.open(run.path))
    again = finish(copy, stop_at=5, now=Ticking(each=9.0)) + finish(Run.open(copy.path), resume=True)

    def told(log, kind):
        return [(e["step"], e.get("steps"), e.get("loss")) for e in log if e["event"] == kind]

    for kind in ("steps_changed", "step", "validation"):
        assert told(read_log(copy), kind) == told(read_log(run), kind)
    assert again[-1].step == rest[-1].step
    assert contents(copy.checkpoints()[-1]) == contents(run.checkpoints()[-1])
    assert _run(["pretrain", "--repeat", str(run.path), "--out", str(tmp_path / "other"), "--steps", "3"]) == 2
    assert "--repeat takes --out" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="hasn't finished .try: mlxlm pretrain --resume"):
        repeat_run(tmp_path / "none", timed(new_run, "unfinished"))


def test_repeat_checks_the_data(new_run, tmp_path):
    run = new_run("original")
    finish(run)
    manifest = run.data / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"{", b"{ ", 1))
    with pytest.raises(DataError, match="has changed since"):
        repeat_run(tmp_path / "copy", run)
    run.data.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="--resume .* --data FOLDER"):
        repeat_run(tmp_path / "copy", run)

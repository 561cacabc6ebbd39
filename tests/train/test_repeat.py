"""Runs with a time limit, repeated from their log."""

import pytest

from mlxlm.cli.main import _run
from mlxlm.train import Finished, Run, repeat_run
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.train.training_runs import TIME_LIMIT, contents, finish, read_log, ticking_clock


def test_repeat_is_bit_equal(new_run, tmp_path, capsys):
    run = new_run("original", **{**TIME_LIMIT, "eval_every": None}, lr_schedule="linear", eval_tokens=64)
    first = finish(run, now=ticking_clock(), stop_at=8)
    rest = finish(Run.open(run.path), resume=True, now=ticking_clock())
    assert isinstance(rest[-1], Finished) and rest[-1].step > first[-1].step
    copy = repeat_run(tmp_path / "copy", Run.open(run.path))
    again = finish(copy, stop_at=5, now=ticking_clock(9.0)) + finish(Run.open(copy.path), resume=True)

    def entries(run, event):
        return [(e["step"], e.get("learning_rate"), e["loss"]) for e in read_log(run) if e["event"] == event]

    for event in ("step", "validation"):
        assert entries(copy, event) == entries(run, event)
    assert len(entries(run, "validation")) > 1
    assert again[-1].step == rest[-1].step
    assert contents(copy.checkpoints()[-1]) == contents(run.checkpoints()[-1])
    (copy.path / "repeat_plan.jsonl").write_text('{"event": "step", "step": 1, "learning_rate": 1}\n')
    with pytest.raises(ConfigError, match="repeat_plan.jsonl is damaged"):
        finish(Run.open(copy.path), resume=True)
    assert _run(["pretrain", "--repeat", str(run.path), "--out", str(tmp_path / "other"), "--steps", "3"]) == 2
    assert "--repeat takes --out" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="hasn't finished .try: mlxlm pretrain --resume"):
        repeat_run(tmp_path / "none", new_run("unfinished", **TIME_LIMIT))


def test_pretraining_on_answers_only_is_no_fine_tuning(new_run):
    run = new_run("answers", mask_prompt=True, packing="best-fit")
    assert run.resume_command == f"mlxlm pretrain --resume {run.path}"
    finish(run, stop_at=2)
    assert not run.is_finetuning


def test_repeat_checks_the_data(stopped, tmp_path):
    manifest = stopped.data / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"{", b"{ ", 1))
    with pytest.raises(DataError, match="has changed since"):
        repeat_run(tmp_path / "copy", stopped)
    stopped.data.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="--resume .* --data FOLDER"):
        repeat_run(tmp_path / "copy", stopped)

"""Runs and their checkpoints."""

import os

from mlxlm.checkpoint.locations import best_checkpoint


def test_pipe_as_state_is_ignored(tmp_path):
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    os.mkfifo(tmp_path / "checkpoints" / "step-2" / "state.json")
    (tmp_path / "checkpoints" / "step-1" / "state.json").write_text('{"validation_loss": 1.5}')
    assert best_checkpoint(tmp_path).name == "step-1"

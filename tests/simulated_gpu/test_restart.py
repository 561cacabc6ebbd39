"""A training command whose device fails continues in a new process."""

import json
import os
import shutil
import signal
import sys

import numpy as np
import pytest

from mlxlm.cli.main import _run
from mlxlm.train import Run, start_run
from tests.run_command import run_command
from tests.simulated_gpu.faults import IMPACTING_INTERACTIVITY, INSUFFICIENT_MEMORY

SETTINGS = {"steps": 6, "batch_size": 4, "max_seq_length": 32, "eval_every": 0, "save_every": 2, "eval_tokens": 200}
LIMITS = ["MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, folder, tiny_config):
    """A new run, and a copy that was trained without a fault."""
    out = tmp_path_factory.mktemp("runs")
    start_run(out / "new", [folder / "stories.txt"], tiny_config, tokenizer=folder / "my-model", settings=SETTINGS)
    shutil.copytree(out / "new", out / "finished")
    for _ in range(2):  # the first checks the kernels, which takes evaluations, too
        shutil.rmtree(out / "finished")
        shutil.copytree(out / "new", out / "finished")
        assert run_command("pretrain", "--resume", out / "finished").returncode == 0
    return out / "finished"


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished.with_name("new"), tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def restarts(monkeypatch):
    """Lets new processes begin in this one. Their command lines and the values of LIMITS are added to the list."""
    found = []

    def execve(path, command, environment):
        assert path == sys.executable and command[:4] == [path, "-P", "-m", "mlxlm.cli.main"]
        found.append((command[4:], *(int(environment[name]) for name in LIMITS)))
        for name in LIMITS:
            monkeypatch.setenv(name, environment[name])
        raise SystemExit(_run(command[4:]))

    monkeypatch.setattr(os, "execve", execve)
    for name in LIMITS:
        monkeypatch.delenv(name, raising=False)
    return found


def resume(run, *options):
    """The exit code of the last process."""
    return run_command("pretrain", "--resume", run, *options).returncode


def losses(run):
    entries = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return [entry["loss"] for entry in entries if entry["event"] == "step"]


def last_checkpoint(run):
    return {path.name: path.read_bytes() for path in Run.open(run).checkpoints()[-1].glob("*.safetensors")}


@pytest.mark.parametrize("failing", [{0}, {3}, {1, 4}, {6}])  # the seventh evaluates the validation
def test_shorter_command_buffers_give_the_same_weights(simulated_gpu, finished, run, restarts, failing):
    simulated_gpu.faults.failing_evaluations = set(failing)
    simulated_gpu.faults.command_buffer_error = IMPACTING_INTERACTIVITY
    assert resume(run, "--duty-cycle", "99", "--allow-sleep") == 0
    command = ["pretrain", "--resume", str(run), "--duty-cycle", "99.0", "--allow-sleep", "--micro-batches", "1"]
    assert [found[1:] for found in restarts] == [(20, 20), (10, 10)][: len(failing)] and restarts[0][0] == command
    assert losses(run) == losses(finished) and last_checkpoint(run) == last_checkpoint(finished)


def test_less_memory_gives_the_same_weights_up_to_rounding(simulated_gpu, finished, run, restarts, monkeypatch):
    said = []
    monkeypatch.setattr("mlxlm.cli.render.say", lambda text, **_: said.append(text))
    simulated_gpu.faults.failing_evaluations = {1, 4}
    assert resume(run) == 0
    assert [found[0][-1] for found in restarts] == ["2", "4"] and restarts[-1][1:] == (40, 40)
    restarting = [text for text in said if "continuing" in text]
    what = f"out of memory: {INSUFFICIENT_MEMORY.rstrip('.')}; continuing after step"
    assert restarting == [f"{what} {step} in a new process with --micro-batches {n}" for step, n in ((0, 2), (2, 4))]
    assert any(text.startswith("warning: each batch is computed in 4 parts, before in 2") for text in said)
    assert np.allclose(losses(run), losses(finished), atol=5e-3)  # in bfloat16
    state = json.loads((Run.open(run).checkpoints()[-1] / "state.json").read_text())
    assert state["environment"]["micro_batches"] == 4


def test_a_run_without_progress_ends(simulated_gpu, run, restarts):
    simulated_gpu.faults.failing_evaluations = set(range(100))
    simulated_gpu.faults.command_buffer_error = IMPACTING_INTERACTIVITY
    assert resume(run) == 1
    assert [found[1:] for found in restarts] == [(20, 20), (10, 10), (5, 5), (5, 5), (5, 5)]
    assert [found[0][-1] for found in restarts] == ["1", "1", "1", "2", "4"]


def test_a_run_with_progress_goes_on(simulated_gpu, finished, run, restarts):
    """Where nothing can be made smaller: each process saves a checkpoint before it fails."""
    simulated_gpu.faults.failing_evaluations = {2, 6}
    assert resume(run, "--micro-batches", "4") == 0
    assert [found[0][-1] for found in restarts] == ["4", "4"] and len(losses(run)) == 6


def test_a_run_that_was_asked_to_stop_does_not_go_on(simulated_gpu, run, restarts, monkeypatch):
    def interrupt_before_a_step(group, learning_rate):
        if learning_rate is not None:  # None ends the other processes
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("mlxlm.backend.process_group.ProcessGroup.broadcast_object", interrupt_before_a_step)
    simulated_gpu.faults.failing_evaluations = {0}
    assert resume(run) == 1 and restarts == []


def test_fine_tuning_goes_on(simulated_gpu, folder, tmp_path, restarts):
    data = [folder / "my-model", folder / "chats.jsonl", "--steps", "2", "--batch-size", "2", "--max-seq-length", "64"]
    assert run_command("finetune", *data, "--out", tmp_path / "first").returncode == 0  # checks the kernels
    simulated_gpu.faults.evaluations = 0
    assert run_command("finetune", *data, "--out", tmp_path / "second").returncode == 0
    simulated_gpu.faults.failing_evaluations = {simulated_gpu.faults.evaluations - 2}
    assert run_command("finetune", *data, "--out", tmp_path / "third").returncode == 0
    assert restarts == [(["finetune", "--resume", str(tmp_path / "third"), "--micro-batches", "2"], 40, 40)]


def test_sweeps_go_on(simulated_gpu, folder, tmp_path, restarts):
    sizes = ["--preset", "0.3m", "--vocab-size", "300", "--max-seq-length", "32", "--batch-size", "2", "--steps", "2"]
    sweep = ["compare-architectures", folder / "stories.txt", "--out", tmp_path / "a", *sizes]
    variants = ["--variant", "rms: norm=rms", "--variant", "layer: norm=layer"]
    assert run_command(*sweep, *variants).returncode == 0
    sweep[3] = tmp_path / "b"
    simulated_gpu.faults.evaluations = 0
    simulated_gpu.faults.failing_evaluations = {1}
    assert run_command(*sweep, *variants).returncode == 0
    (found,) = restarts
    assert found[0] == ["compare-architectures", "--resume", str(tmp_path / "b"), "--micro-batches", "2"]
    assert all(len(losses(tmp_path / "b" / name)) == 2 for name in ("rms", "layer"))

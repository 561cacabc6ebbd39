"""Several processes: collectives, and real runs by mlx.launch with ranks that end and are stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.backend.process_group import ProcessGroup, join_process_group, versions
from mlxlm.checkpoint.locations import checkpoint_step
from mlxlm.families import config_to_hf
from mlxlm.train import Run
from mlxlm.train.worker import run_worker
from mlxlm.utils.errors import DataError, PlatformError
from tests.paths import ROOT
from tests.train.training_runs import finish, flip_byte

HERE = Path(__file__).parent


def free_port() -> int | None:
    """A port that is free now; None if no sockets may be opened here."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return server.getsockname()[1]
    except OSError:
        return None


needs_sockets = pytest.mark.skipif(free_port() is None, reason="no sockets may be opened here")


# One process


@pytest.fixture
def environment(monkeypatch):
    for name in ("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "backend"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, None),
        ({"MLX_RANK": "1", "MLX_IBV_DEVICES": "x"}, "jaccl"),
        ({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1"}, "nccl"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpi"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "\n"}, None),  # what mlx.launch -n 1 gives
        ({"MLX_RANK": "1", "MLX_HOSTFILE": '[["127.0.0.1:1"],["127.0.0.1:2"]]'}, "ring"),
    ],
)
def test_how_a_process_was_started_is_in_its_environment(environment, tmp_path, variables, backend):
    """A process alone joins nothing. Processes that can't meet don't train alone, each for itself."""
    joined = []

    def init(strict, backend):
        joined.append(backend)
        raise RuntimeError("no")

    for name, value in variables.items():
        if name == "MLX_HOSTFILE":
            (tmp_path / "hosts").write_text(value)
        environment.setenv(name, str(tmp_path / "hosts") if name == "MLX_HOSTFILE" else value)
    environment.setattr(mx.distributed, "init", init)
    if backend is None:
        assert join_process_group().size == 1 and not joined
    else:
        with pytest.raises(PlatformError, match=f"MLX's {backend} backend can't connect"):
            join_process_group()
        assert joined == [backend]


def test_alone_every_sum_is_its_own(environment):
    process_group = join_process_group()
    tree = {"a": mx.array([1.0, 2.0])}
    assert (process_group.rank, process_group.size) == (0, 1)
    assert process_group.average(tree) is tree and process_group.broadcast([tree["a"]]) == [tree["a"]]
    assert process_group.broadcast_object({"step": 3}) == {"step": 3} and not process_group.stop_requested


def test_a_step_is_shared_equally_or_not_at_all():
    assert [ProcessGroup(0, n).batches_per_process(6) for n in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(PlatformError, match="6 batches, which 4 processes.*1 or 2 or 3 or 6"):
        ProcessGroup(0, 4).batches_per_process(6)


class _Worker(ProcessGroup):
    """Rank 1 of two, which gets these objects from rank 0."""

    def __init__(self, *objects):
        super().__init__(1, 2)
        self._objects = list(objects)

    def broadcast_object(self, value=None):
        return self._objects.pop(0)


def test_a_worker_without_the_data_says_where_it_should_be(new_run):
    run = new_run("run")
    good = {**run.worker_config(), "step": 0, "versions": versions()}
    with pytest.raises(DataError, match="rank 1: .* not in /nowhere/data.*same prepared folder at /nowhere/data"):
        run_worker(_Worker({**good, "data": "/nowhere/data"}))
    with pytest.raises(DataError, match="rank 1: .* has changed"):
        run_worker(_Worker({**good, "data_digest": "0"}))
    with pytest.raises(PlatformError, match="rank 0 has mlxlm 0, rank 1 has mlxlm"):
        run_worker(_Worker({**good, "versions": "mlxlm 0"}))
    flip_byte(run.data / "train-00000.bin")
    with pytest.raises(DataError, match="rank 1: .*train-00000.bin has changed"):
        run_worker(_Worker(good))
    assert run_worker(_Worker(None)) is None  # the run ended before it began


# Two processes


@needs_sockets
def test_collectives_and_a_rank_that_ends(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{free_port()}"] for _ in range(2)]))
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "two_ranks.py"],
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    first, ending = map(json.loads, processes[0].communicate(timeout=60)[0].splitlines())
    second = json.loads(processes[1].communicate(timeout=60)[0])
    assert first["rank"] == [0, 2] and second["rank"] == [1, 2]
    for found in (first, second):
        assert found["average"] == [[[1.5] * 4] * 3, [15.0, [1.5] * 50]]
        bits = np.array([0.1, np.nan, 1.0], np.float32).view(np.uint32).tolist()
        assert found["broadcast"] == [bits, 5, [1.0]]
        assert found["objects"] == [{"n": i, "by": 0, "long": "x" * 1000 * i} for i in range(3)] and found["stop"]
    assert ending["error"].startswith("another process has ended") and ending["a"] == [[1.0] * 4] * 3


@pytest.fixture
def pretrain(tmp_path, text_file, tiny_config, tokenizer_folder):
    """Starts `mlxlm pretrain` on a tiny model."""
    (tmp_path / "tiny.json").write_text(json.dumps(config_to_hf(tiny_config)))
    settings = "--batch-size 2 --max-seq-length 32 --learning-rate 3e-3 --warmup-steps 3 --eval-every 0"
    started = []

    def start(out: Path, *options: str, resume: bool = False) -> subprocess.Popen:
        model = ["--config", tmp_path / "tiny.json", "--tokenizer", tokenizer_folder, *settings.split()]
        words = ["--resume", out] if resume else [text_file, "--out", out, *model]
        command = [sys.executable, ROOT / "cli.py", "pretrain", *words, *options]
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        quiet = {**os.environ, "MKL_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=quiet, stdin=subprocess.DEVNULL, text=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()


def losses(run: Path) -> list[float]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if entry["event"] == "step"]


def wait_for_checkpoint(run: Path, after: int) -> None:
    """Nothing is saved before the data of all ranks has been checked."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if (run / "train.json").exists() and last_checkpoint(run) > after:
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} has no checkpoint after step {after}")


def last_checkpoint(run: Path) -> int:
    return max(map(checkpoint_step, Run.open(run).checkpoints()), default=0)


@needs_sockets
def test_two_ranks_train_as_one_and_save_however_they_end(pretrain, new_run, tmp_path):
    """Rank 1 is killed; after a resume, Ctrl-C; then one process resumes."""
    path = tmp_path / "run"
    options = ["--steps", "100000", "--save-every", "3", "--dtype", "float32"]
    process = pretrain(path, *options, "--num-processes", "2")
    wait_for_checkpoint(path, after=0)
    ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if "MLX_RANK" in child.environ()]
    next(rank for rank in ranks if rank.environ()["MLX_RANK"] == "1").kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    step = int(re.search(r"error: stopped in step \d+: another process has ended .*; step (\d+) is saved", err)[1])
    assert f"mlxlm pretrain --resume {path}" in err and "Node with rank 1 exited with code -9" in err
    assert last_checkpoint(path) == len(losses(path)) == step

    assert Run.open(path).settings.grad_accumulation_steps == 2 and err.count("parameters, steps 1 to ") == 1
    settings = {"grad_accumulation_steps": 2, "batch_size": 2, "warmup_steps": 3, "eval_every": 0, "save_every": 0}
    settings["dtype"] = "float32"
    alone = new_run("alone", steps=100_000, **settings)
    finish(alone, stop_at=min(step, 6))
    one, two = losses(alone.path), losses(path)
    np.testing.assert_allclose(two[: len(one)], one[: len(two)], rtol=0, atol=1e-5)

    process = pretrain(path, "--num-processes", "2", resume=True)
    wait_for_checkpoint(path, after=step)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.strip() == str(path) and "error" not in err
    assert err.count("Ctrl-C: finishing this step") == 1
    step = int(re.search(r"stopped after step (\d+), saved", err)[1])
    assert last_checkpoint(path) == len(losses(path)) == step
    finish(Run.open(path), resume=True, stop_at=step + 1)
    assert len(losses(path)) == step + 1

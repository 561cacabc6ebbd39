"""Several processes: collectives, and real runs by mlx.launch with ranks that end, hang and are stopped."""

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
from mlxlm.families import config_to_hf
from mlxlm.train import ProcessGroup, Run, run_worker
from mlxlm.train.distributed.process_group import detect_backend
from mlxlm.utils.errors import DataError, PlatformError
from tests.paths import ROOT
from tests.train.training_runs import finish

HERE = Path(__file__).parent


def sockets() -> bool:
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError:
        return False
    return True


needs_sockets = pytest.mark.skipif(not sockets(), reason="no sockets may be opened here")


# One process


@pytest.fixture
def environment(monkeypatch):
    for name in ("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"MLX_RANK": "0"}, None),
        ({"MLX_RANK": "1", "MLX_IBV_DEVICES": "x", "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}, "jaccl"),
        ({"MLX_RANK": "1", "NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "2"}, "nccl"),
        ({"MLX_RANK": "0", "NCCL_HOST_IP": "10.0.0.1", "MLX_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "mpi"),
        ({"PMI_SIZE": "1"}, None),
    ],
)
def test_how_a_process_was_started_is_in_its_environment(environment, variables, expected):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert detect_backend() == expected


def test_the_hostfile_of_a_ring(environment, tmp_path):
    file = tmp_path / "hosts"
    environment.setenv("MLX_RANK", "0")
    environment.setenv("MLX_HOSTFILE", str(file))
    file.write_text("\n")  # what mlx.launch -n 1 gives
    assert detect_backend() is None
    file.write_text('[["127.0.0.1:1"],["127.0.0.1:2"]]')
    assert detect_backend() == "ring"
    file.write_text("{")
    with pytest.raises(PlatformError, match="hosts.*not JSON"):
        detect_backend()


def test_alone_every_sum_is_its_own(environment):
    process_group = ProcessGroup.join(on_hang=pytest.fail)
    tree = {"a": mx.array([1.0, 2.0])}
    assert (process_group.rank, process_group.size, process_group.is_main_process) == (0, 1, True)
    assert process_group.all_reduce(tree) is tree and process_group.broadcast(tree) is tree
    assert process_group.broadcast_object({"step": 3}) == {"step": 3} and process_group.peer_status("stop") == []


def test_a_step_is_shared_equally_or_not_at_all():
    assert [ProcessGroup(0, n).batches_per_process(6) for n in (1, 2, 3, 6)] == [6, 3, 2, 1]
    with pytest.raises(PlatformError, match="6 batches, which 4 processes.*1 or 2 or 3 or 6"):
        ProcessGroup(0, 4).batches_per_process(6)


class _Told(ProcessGroup):
    """A rank that is told what a test wants it to be."""

    def __init__(self, *values):
        super().__init__(1, 2)
        self._values = list(values)

    def broadcast_object(self, value=None):
        return self._values.pop(0)


def test_a_follower_without_the_data_says_where_it_should_be(new_run):
    run = new_run("run")
    missing = {**run.worker_config(), "step": 0, "data": "/nowhere/data"}
    with pytest.raises(DataError, match="rank 1: .* not in /nowhere/data.*same prepared folder at /nowhere/data"):
        run_worker(_Told(missing))
    other = {**run.worker_config(), "step": 0, "data_digest": "0"}
    with pytest.raises(DataError, match="rank 1: .* has changed"):
        run_worker(_Told(other))
    assert run_worker(_Told(None)) is None  # the run ended before it began


# Two processes


@pytest.mark.parametrize("how", ["cut", "stuck"])
@needs_sockets
def test_collectives_and_a_rank_that_hangs(tmp_path, how):
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
    hosts, saved = tmp_path / "hosts.json", tmp_path / "saved.safetensors"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "two_ranks.py", how, saved],
            env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, ending = map(json.loads, processes[0].communicate(timeout=60)[0].splitlines())
    processes[1].kill()
    second = json.loads(processes[1].communicate(timeout=60)[0])
    assert first["rank"] == [0, 2, True] and second["rank"] == [1, 2, False]
    for found in (first, second):
        assert found["all_reduce"] == [[[3.0] * 4] * 3, [30.0, [3.0] * 50], 14]
        assert found["dtypes"] == [f"mlx.core.{kind}" for kind in ("float32", "float32", "bfloat16", "int32")]
        bits = np.array([-0.0, np.nan, 1.0], np.float32).view(np.uint32).tolist()
        assert found["broadcast"] == [bits, 5, [1.0]]
        assert found["shared"] == [{"n": i, "by": 0} for i in range(3)]
    silence = "rank 1 has not been heard of for 4 seconds"
    if how == "cut":
        assert ending == {"lost": silence, "sum": True} and processes[0].returncode == 1
    else:
        assert ending == {"stuck": f"saved: {silence}"} and processes[0].returncode == 7
        assert mx.load(str(saved))["weights"].shape == (100, 100)


SETTINGS = ["--batch-size", "2", "--max-seq-length", "32", "--learning-rate", "3e-3", "--warmup-steps", "3"]


@pytest.fixture
def pretrain(tmp_path, text_file, tiny_config, tokenizer_folder):
    """Starts `mlxlm pretrain` on a tiny model, by a launcher or with options."""
    (tmp_path / "tiny.json").write_text(json.dumps(config_to_hf(tiny_config)))
    started = []

    def start(out: Path, *options: str, before: tuple[str, ...] = (), resume: bool = False) -> subprocess.Popen:
        words = ["--config", tmp_path / "tiny.json", "--tokenizer", tokenizer_folder, "--eval-every", "0", *SETTINGS]
        words = ["--resume", out] if resume else [text_file, "--out", out, *words]
        command = [*before, sys.executable, ROOT / "cli.py", "pretrain", *words, *options]
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


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    for process in psutil.Process(launcher.pid).children(recursive=True):
        if process.environ().get("MLX_RANK") == str(rank):
            return process
    raise AssertionError(f"there is no rank {rank}")


def wait_for_steps(run: Path, steps: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if (run / "log.jsonl").exists() and len(losses(run)) >= steps:
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} has not come to step {steps}")


def wait_for_checkpoint(run: Path) -> None:
    """By the first one the data of all ranks has been checked, without which nothing is saved."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if (run / "train.json").exists() and Run.open(run).checkpoints():
            return
        time.sleep(0.02)
    raise AssertionError(f"{run} has saved nothing")


@needs_sockets
def test_two_ranks_are_one_with_twice_the_accumulation(pretrain, new_run, tmp_path):
    """The plain line: mlx.launch -n 2 --backend ring -- mlxlm pretrain ..."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = Path(sys.executable).with_name("mlx.launch")
    line = (program, "-n", "2", "--backend", "ring", "--starting-port", str(min(port, 60_000)), "--")
    process = pretrain(tmp_path / "two", "--steps", "12", "--grad-accumulation-steps", "2", before=line)
    out, err = process.communicate(timeout=120)
    assert out.strip() == str(tmp_path / "two"), err
    assert err.count("steps 1 to 12 of 256 tokens") == 1  # rank 0 alone speaks
    run = Run.open(tmp_path / "two")
    assert run.settings.grad_accumulation_steps == 4 and [c.name for c in run.checkpoints()] == ["step-12"]
    alone = new_run(
        "one", steps=12, grad_accumulation_steps=4, batch_size=2, warmup_steps=3, eval_every=0, save_every=0
    )
    finish(alone)
    two, one = losses(run.path), losses(alone.path)
    assert len(two) == 12 and one[0] - one[-1] > 0.1
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)


@needs_sockets
def test_a_killed_rank_ends_the_run_which_one_process_can_go_on_with(pretrain, new_run, tmp_path):
    path = tmp_path / "killed"
    process = pretrain(
        path, "--steps", "100000", "--lr-schedule", "constant", "--save-every", "5", "--num-processes", "2"
    )
    wait_for_checkpoint(path)
    rank_process(process, 1).send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    step = int(re.search(r"error: stopped in step \d+: rank 1 has ended; step (\d+) is saved", err)[1])
    assert f"mlxlm pretrain --resume {path}" in err and "rank 1 has ended without an exit code" in err
    run = Run.open(path)
    assert run.checkpoints()[-1].name == f"step-{step}" and len(losses(path)) == step
    finish(run, resume=True, stop_at=step + 3)
    alone = new_run(
        "alone",
        steps=100_000,
        grad_accumulation_steps=2,
        batch_size=2,
        warmup_steps=3,
        lr_schedule="constant",
        eval_every=0,
        save_every=0,
    )
    finish(alone, stop_at=min(step, 20) + 3)
    together = losses(path)
    assert len(together) >= step + 3
    np.testing.assert_allclose(together[:20], losses(alone.path)[: len(together[:20])], rtol=0, atol=1e-5)


@needs_sockets
def test_rank_1_saves_for_a_killed_rank_0_and_after_a_resume_ctrl_c_stops_both(pretrain, tmp_path):
    path = tmp_path / "run"
    process = pretrain(path, "--steps", "100000", "--save-every", "5", "--hosts", "localhost,127.0.0.1")
    wait_for_checkpoint(path)
    rank_process(process, 0).send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    step = int(re.search(r"rank 1: error: rank 0 has ended; step (\d+) is saved", err)[1])
    assert Run.open(path).checkpoints()[-1].name == f"step-{step}"
    process = pretrain(path, "--num-processes", "2", resume=True)
    wait_for_steps(path, step + 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.strip() == str(path)
    assert err.count("Ctrl-C: finishing this step") == 1
    last = int(re.search(r"stopped after step (\d+), saved", err)[1])
    assert Run.open(path).checkpoints()[-1].name == f"step-{last}"
    # Rank 0 may have been killed before it had logged the step that rank 1 saved.
    assert last - 1 <= len(losses(path)) <= last and "error" not in err


@needs_sockets
def test_a_killed_launcher_ends_the_run_in_order(pretrain, tmp_path):
    path = tmp_path / "run"
    process = pretrain(path, "--steps", "100000", "--save-every", "0", "--num-processes", "2")
    wait_for_steps(path, 5)
    others = psutil.Process(process.pid).children(recursive=True)
    if hasattr(os, "sched_getaffinity"):
        shares = [rank_process(process, rank).cpu_affinity() for rank in range(2)]
        assert len(shares[0]) == len(shares[1]) == max(1, len(os.sched_getaffinity(0)) // 2)
    process.kill()
    gone, left = psutil.wait_procs(others, timeout=60)
    for one in left:
        one.kill()
    assert not left
    assert [c.name for c in Run.open(path).checkpoints()] == [f"step-{len(losses(path))}"]

"""Texts of a model whose parts several processes have: in threads of this process, and by the command line."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, run_batch, score
from mlxlm.generation import workers as workers_module
from mlxlm.generation.distributed import load_split, run_worker
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.embedding import embed_batch
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.generation.workers import Connection, Workers
from mlxlm.utils.errors import CheckpointError, ConfigError, GenerationError, PlatformError
from tests.generation.texts import OPTIONS, SYSTEM, request, same
from tests.paths import ROOT
from tests.small_models import write_folder
from tests.split_model import thread_groups
from tests.train.test_distributed import needs_sockets

pytestmark = needs_sockets


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("split") / "model", lm.model, lm.config)
    lm.tokenizer.save(folder)
    return folder


@contextmanager
def split(size: int):
    """Yields the `Workers` of other ranks in threads, and a list of what ends the ranks."""
    first, *others = thread_groups(size)
    lost: list[object] = []

    def end(problem):  # as a process does
        lost.append(problem)
        first.barrier.abort()

    def work(group):
        try:
            run_worker(group, end)
        except Exception as error:
            end(error)

    threads = [threading.Thread(target=work, args=[group], daemon=True) for group in others]
    for thread in threads:
        thread.start()
    mx.disable_compile()  # threads can't exchange arrays of a trace
    try:
        with Workers(first, end) as workers:
            yield workers, lost
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        mx.enable_compile()


PROMPTS = [[5, 6, 7, 8], SYSTEM, [*SYSTEM, 9, 10], [11] * 3, [*SYSTEM, 12], [13, 14]]


@pytest.mark.parametrize(("size", "kv"), [(2, KVOptions()), (4, KVOptions.of(size=24))])
def test_texts_are_those_of_one_process(folder, lm, size, kv):
    """Texts that share a prefix, two at a time; one is cancelled. Four processes share two key-value heads."""
    wanted = [request(PROMPTS[i % len(PROMPTS)], 8, **OPTIONS[i % len(OPTIONS)]) for i in range(8)]
    with Engine(lm, kv=kv, batch_size=2) as engine:
        expected = dict(run_batch(engine, wanted))
    with split(size) as (workers, lost):
        whole_bytes, lm = lm.weight_bytes, load_split(workers, folder)
        with Engine(lm, kv=kv, batch_size=2) as engine:
            cancelled = engine.submit(request(SYSTEM, 60))
            next(cancelled)
            cancelled.cancel()
            engine.limit_memory(64 << 20)
            for number, result in run_batch(engine, wanted):
                same(result, expected[number])
            assert engine.stats.cached_tokens and not lost
        assert lm.weight_bytes < whole_bytes


def test_sums_of_a_token(folder):
    """Two for each layer, and one for the token."""
    with split(2) as (workers, _), Engine(load_split(workers, folder), prefix_cache_bytes=0) as engine:

        def sums(max_tokens):
            before = workers.group.num_sums
            engine.submit(request(max_tokens=max_tokens, temperature=0)).result()
            return workers.group.num_sums - before

        layers = engine.lm.config.num_hidden_layers
        assert (sums(12) - sums(7)) / 5 == 2 * layers + 1


def test_what_needs_the_whole_model_is_refused(folder, tmp_path):
    with split(2) as (workers, lost):
        lm = load_split(workers, folder)
        engine = Engine(lm)
        for use in (
            lambda: Engine(lm, speculation=SpeculativeDecoder(PromptLookup())),
            lambda: Engine(lm, prefix_cache_dir=tmp_path / "cache"),
            lambda: engine.save_prefix(tmp_path / "file", [1, 2]),
            lambda: engine.load_prefix(tmp_path / "file"),
            lambda: embed_batch(lm, [[1, 2]]),
            lambda: score(lm, "a"),
        ):
            with pytest.raises(GenerationError, match="a model that is split over several processes has no .*try: one"):
                use()
        assert not lost


def test_a_model_that_a_rank_cannot_load(folder, tmp_path, monkeypatch):
    """The next one can be loaded."""
    with split(3) as (workers, lost), pytest.raises(ConfigError, match="3 processes can't share num_attention_heads"):
        load_split(workers, folder)
    with split(2) as (workers, lost):
        real = workers_module.Connection.send

        def send(self, message=None):
            if message and message.get("do") == "load" and "elsewhere" in message["path"]:
                message = {**message, "path": str(tmp_path / "nowhere")}
            real(self, message)

        monkeypatch.setattr(workers_module.Connection, "send", send)
        (tmp_path / "elsewhere").symlink_to(folder)
        with pytest.raises(CheckpointError, match="rank 1: there is no model folder .*nowhere"):
            load_split(workers, tmp_path / "elsewhere")
        with Engine(load_split(workers, folder)) as engine:
            assert engine.submit(request(max_tokens=3)).result().tokens
        assert not lost


def test_an_error_of_one_rank_ends_all(folder, monkeypatch):
    """It hasn't taken a step that the others have."""

    def fail(*_):
        raise RuntimeError("no memory")

    with split(2) as (workers, lost), Engine(load_split(workers, folder)) as engine:
        monkeypatch.setattr(engine._scheduler._step, "_can_compile", fail)
        monkeypatch.setattr(workers_module, "_GRACE", 0)
        with pytest.raises(RuntimeError, match="no memory"):
            engine.submit(request(max_tokens=3)).result()
        assert "RuntimeError: no memory" in lost[0]


def test_only_workers_are_let_in():
    hello = {"secret": "abc", "rank": 1, "host": "mini"}
    sent = [b"GET / HTTP/1.1\r\n", b"x" * 2000, b"", b"[1]\n", json.dumps({**hello, "secret": "abd"}).encode() + b"\n"]
    for line in [*sent, json.dumps(hello).encode() + b"\n"]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(line)
            theirs.shutdown(socket.SHUT_WR)
            assert workers_module._read_hello(ours, "abc") == (hello if b'"abc"' in line else None)


@pytest.mark.parametrize("how", ["closed", "silent", "ended"])
def test_a_process_that_is_lost(how, monkeypatch):
    monkeypatch.setattr(workers_module, "_TIMEOUT", 0.1 if how == "silent" else 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours = server.accept()[0]
    lost: SimpleQueue[str] = SimpleQueue()
    connection = Connection(ours, "rank 1 on mini", lost.put)
    with theirs:
        if how == "ended":
            connection.close()
            assert lost.empty()
            return
        if how == "closed":
            theirs.shutdown(socket.SHUT_RDWR)
        message = lost.get(timeout=60)
        why = "its connection was closed" if how == "closed" else "it hasn't answered for"
        assert message.startswith(f"rank 1 on mini has ended, or can't be reached any more: {why}")
        connection.send({"do": "step"})
        assert lost.empty()
        connection.close()


def test_machines_with_other_versions(monkeypatch):
    with pytest.raises(PlatformError, match="the machines differ: rank 0 has mlxlm 0, rank 1 has mlxlm"):
        group = thread_groups(2)[1]
        monkeypatch.setattr(group, "broadcast_object", lambda: {"versions": "mlxlm 0"})
        run_worker(group, print)


def test_two_processes_of_the_command_line(folder, lm):
    """They generate the texts of one. When a worker is killed in the middle of a text, rank 0 says so and ends."""
    command = [sys.executable, ROOT / "cli.py", "generate", folder, "--jsonl", "-", "--hosts", "localhost,localhost"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, env={**os.environ, "MKL_NUM_THREADS": "1"}, text=True, **pipes)
    wanted = request(SYSTEM, 12, temperature=0, seed=0)
    values = {"id": "a", "prompt": SYSTEM, "max_tokens": 12, "temperature": 0}
    process.stdin.write(json.dumps(values) + "\n")
    process.stdin.flush()
    with Engine(lm) as engine:
        assert json.loads(process.stdout.readline())["text"] == engine.submit(wanted).result().text
    process.stdin.write(json.dumps({**values, "id": "b", "max_tokens": 80, "min_tokens": 80}) + "\n")
    process.stdin.flush()
    children = psutil.Process(process.pid).children(recursive=True)
    [worker] = [child for child in children if child.environ().get("MLX_RANK") == "1"]
    worker.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.count("error:") == 1
    assert "error: rank 1 on " in err and "has ended, or can't be reached any more" in err
    psutil.wait_procs(children, 10)
    assert not any(child.is_running() for child in children)

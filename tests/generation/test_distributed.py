"""Texts of a model whose parts several processes have: in threads of this process, and by the command line."""

import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, load, run_batch
from mlxlm.generation.distributed import load_split, run_worker
from mlxlm.generation.workers import Workers
from tests.generation.texts import OPTIONS, SYSTEM, request, same
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
    """Yields the `Workers` of other ranks in threads, and what they or this rank have lost, or failed with."""
    first, *others = thread_groups(size)
    lost: list[object] = []

    def work(group):
        try:
            run_worker(group, lost.append)
        except Exception as error:
            lost.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=[group], daemon=True) for group in others]
    for thread in threads:
        thread.start()
    mx.disable_compile()  # threads can't exchange arrays of a trace
    try:
        with Workers(first, lost.append) as workers:
            yield workers, lost
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        mx.enable_compile()


PROMPTS = [[5, 6, 7, 8], SYSTEM, [*SYSTEM, 9, 10], [11] * 3, [*SYSTEM, 12], [13, 14]]


@pytest.mark.parametrize(("size", "kv"), [(2, KVOptions()), (2, KVOptions.of(size=24, bits=8))])
def test_texts_are_those_of_one_process(folder, lm, size, kv):
    """Texts that begin at any time, share a prefix, and are cancelled; two at a time."""
    if kv.key_bits:
        lm = load(folder)
    wanted = [request(PROMPTS[i % len(PROMPTS)], 12, **OPTIONS[i % len(OPTIONS)]) for i in range(10)]
    with Engine(lm, kv=kv, batch_size=2) as engine:
        expected = dict(run_batch(engine, wanted))
    with split(size) as (workers, lost), Engine(load_split(workers, folder), kv=kv, batch_size=2) as engine:
        cancelled = engine.submit(request(SYSTEM, 200))
        next(cancelled)
        cancelled.cancel()
        engine.limit_memory(64 << 20)
        for number, result in run_batch(engine, wanted):
            same(result, expected[number])
        assert engine.stats.cached_tokens and not lost

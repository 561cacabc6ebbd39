"""Checks of token shards in the background."""

import json
import threading
from concurrent.futures import Future

import pytest

from mlxlm.data import DataOptions, prepare
from mlxlm.data.shards import verify_shards
from mlxlm.tokenizer import load
from mlxlm.train import Step, train
from mlxlm.utils.errors import DataError
from tests.train.training_runs import finish, flip_byte


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx.npy"])
def test_changed_shard_stops_training_before_saving(stopped, name):
    flip_byte(stopped.data / name)
    before = [c.name for c in stopped.checkpoints()]
    with pytest.raises(DataError, match=rf"data/{name} has changed.*unchanged copy"):
        finish(stopped, resume=True)
    assert [c.name for c in stopped.checkpoints()] == before
    flip_byte(stopped.data / name)
    assert finish(stopped, resume=True)[-1].step == 20


def test_changed_loss_mask(tmp_path, tiny_tokenizer):
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The cat."}]}] * 40
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(DataOptions([tmp_path / "chat.jsonl"]), tiny_tokenizer, tmp_path / "out")
    verify_shards(tmp_path / "out")
    flip_byte(tmp_path / "out/train-00000.mask.bin")
    with pytest.raises(DataError, match=r"train-00000.mask.bin has changed"):
        verify_shards(tmp_path / "out")


@pytest.mark.parametrize("found_at", [3, "the first save"])
def test_training_starts_during_the_check_and_saving_waits(new_run, monkeypatch, found_at):
    run, go = new_run("run", save_every=5), threading.Event()

    def slow(folder, should_stop):
        while not (should_stop() or go.wait(0.01)):
            pass
        if go.is_set():
            raise DataError(f"{folder} has changed")

    def result(check, *timeout, real=Future.result):
        if not check.done() and threading.current_thread() is threading.main_thread():
            go.set()  # something waits for the check
        return real(check, *timeout)

    monkeypatch.setattr("mlxlm.train.loop.verify_shards", slow)
    monkeypatch.setattr("mlxlm.train.loop.Future.result", result)
    steps = []
    with pytest.raises(DataError, match="has changed"):
        for event in train(run, load(run.path)):
            if isinstance(event, Step):
                steps.append(event.step)
            if steps and steps[-1] == found_at:
                go.set()
    assert run.checkpoints() == [] and (steps == [1, 2, 3, 4, 5] or found_at == 3 and len(steps) >= 3)


def test_verify_shards_stops_on_request(stopped):
    looked = []

    def should_stop():
        looked.append(1)
        return True

    verify_shards(stopped.data, should_stop)
    assert len(looked) == 1

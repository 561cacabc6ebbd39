"""Checks of token shards in the background, on one rank and on several."""

import json
import re
import threading

import pytest

from mlxlm.data import DataOptions, prepare
from mlxlm.data.shards import verify_shards
from mlxlm.tokenizer import load
from mlxlm.train import ProcessGroup, Step, train
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.worker import _Status
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

    def wait(check, real=DataCheck.wait):
        go.set()
        real(check)

    monkeypatch.setattr("mlxlm.train.data_check.verify_shards", slow)
    monkeypatch.setattr(DataCheck, "wait", wait)
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


class Others(ProcessGroup):
    """One of three ranks; `peer_status` are those of the others."""

    def __init__(self, rank=0, peer_status=()):
        super().__init__(rank, 3)
        self.statuses = list(peer_status)

    def peer_status(self, name):
        return [status[name] for status in self.statuses if name in status]

    wait_for_peer_status = peer_status


def test_rank_0_waits_for_all_ranks(stopped):
    others = Others(peer_status=[{"data_problem": ""}, {"data_problem": "rank 2: data/x has changed"}])
    check = DataCheck(stopped.data, others)
    for raises in (check.wait, check.raise_if_failed):
        with pytest.raises(DataError, match="rank 2: data/x has changed .*same unchanged files on every machine"):
            raises()
    others.statuses = [{"data_problem": ""}] * 2
    check.wait()
    check.close()


def test_other_ranks_report_their_check(stopped):
    other, status = Others(rank=1), _Status(lambda: False)
    for expected in ("", "rank 1: .*train-00000.bin has changed"):
        status.data_check = DataCheck(stopped.data, other)
        status.data_check._result.exception()
        assert re.match(expected, status()["data_problem"])
        flip_byte(stopped.data / "train-00000.bin")

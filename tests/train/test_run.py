"""Run directories: checkpoints, damaged files, moved data, the run's model, other programs."""

import errno
import json
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.data import DataOptions, prepare
from mlxlm.data.shards import verify_shards
from mlxlm.report import plot_losses
from mlxlm.tokenizer import load
from mlxlm.train import CheckpointSaved, Finished, Run, Step, loop, train
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, DataError
from tests.run_command import run as run_mlxlm
from tests.train.training_runs import GPT2, finish, flip_byte, read_log


def test_the_best_validation_so_far_is_saved(new_run):
    events = finish(new_run("run", steps=7, eval_every=3, save_every=0))
    assert [e.step for e in events if isinstance(e, CheckpointSaved)] == [3, 6, 7]


def test_save_total_limit_keeps_the_best_checkpoint(new_run):
    run = new_run("run", steps=12, save_every=2, save_total_limit=2, eval_every=4)
    finish(run)
    steps = {int(c.name.removeprefix("step-")) for c in run.checkpoints()}
    best = int(best_checkpoint(run.path).name.removeprefix("step-"))
    logged = {e["step"]: e["loss"] for e in read_log(run) if e["event"] == "validation"}
    assert best == min(logged, key=logged.get)
    assert steps == {10, 12, best}


@pytest.mark.parametrize("state", [None, "[1]", "{"])
def test_checkpoint_without_a_state_is_not_good(stopped, state):
    file = stopped.checkpoints()[-1] / "state.json"
    file.unlink() if state is None else file.write_text(state)
    assert stopped.last_good().name == "step-10" and stopped.expired_checkpoints() == []


def test_truncated_checkpoint(stopped):
    weights = stopped.checkpoints()[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is not a valid safetensors file"):
        finish(stopped, resume=True)
    with pytest.raises(CheckpointError, match="model.safetensors is not a valid safetensors file"):
        load_model(weights.parent)


def test_partial_checkpoints_are_removed(new_run):
    run = new_run("run", steps=4, save_every=2)
    (run.path / "checkpoints/.step-2.1.partial").mkdir(parents=True)  # what kill -9 would leave
    assert isinstance(finish(run, resume=True)[-1], Finished)  # without a checkpoint, from the start
    assert {c.name for c in (run.path / "checkpoints").iterdir()} == {"step-2", "step-4"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_checkpoint_with_a_changed_byte(stopped, name):
    first, last = stopped.checkpoints()
    digests = json.loads((last / "state.json").read_text())["sha256"]
    assert digests[name] == file_sha256(last / name, CheckpointError)
    flip_byte(last / name)
    with pytest.raises(CheckpointError, match=rf"step-15/{name} has changed since .*removing .*step-15.* from step-10"):
        finish(stopped, resume=True)
    shutil.rmtree(last)  # as it says
    rest = finish(stopped, resume=True, stop_at=11)
    assert [e.step for e in rest if isinstance(e, Step)] == [11]
    shutil.rmtree(stopped.checkpoints()[-1])
    flip_byte(first / name)
    with pytest.raises(CheckpointError, match=f"step-10/{name} has changed .*unchanged copy of this file"):
        finish(stopped, resume=True)


def test_write_plots(stopped, monkeypatch):
    monkeypatch.setattr("mlxlm.train.run.plot_losses", plot_losses)
    stopped.write_plots()
    assert (stopped.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (stopped.path / "report.html").read_text()


# The run's own model


def model_of(run):
    return (run.path / "model.safetensors").read_bytes()


@pytest.fixture
def no_links(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)


def test_run_model_is_a_link_to_the_best_checkpoint(new_run):
    run, names = new_run("run", steps=12, save_every=2, eval_every=4), set()
    for event in train(run, load(run.path)):
        if isinstance(event, CheckpointSaved):
            best = best_checkpoint(run.path)
            names.add(best.name)
            assert (best / "model.safetensors").samefile(run.path / "model.safetensors")
    assert len(names) > 1
    assert [p.name for p in run.path.glob(".model*")] == []


def test_run_model_is_a_copy_without_hard_links(new_run, no_links):
    run = new_run("run", steps=4, save_every=2, eval_every=2)
    finish(run)
    best = best_checkpoint(run.path) / "model.safetensors"
    assert model_of(run) == best.read_bytes() and not best.samefile(run.path / "model.safetensors")
    before = (run.path / "model.safetensors").stat().st_ino
    run.update_model()
    assert (run.path / "model.safetensors").stat().st_ino == before  # it is known to be the same


@pytest.mark.parametrize("links", [True, False])
def test_resume_updates_the_run_model_after_a_crash(new_run, request, monkeypatch, links):
    if not links:
        request.getfixturevalue("no_links")
    run = new_run("run", steps=8, save_every=4, eval_every=4)
    finish(run, stop_at=4)
    finish(run, resume=True, stop_at=4)  # the validation of step 4
    first = model_of(run)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlxlm.train.run.commit_file", crash)
        with pytest.raises(KeyboardInterrupt):
            finish(run, resume=True)
    assert run.checkpoints()[-1].name == "step-8" and model_of(run) == first
    finish(run, resume=True)
    assert best_checkpoint(run.path).name == "step-8"
    assert model_of(run) == (run.path / "checkpoints/step-8/model.safetensors").read_bytes() != first


def test_run_without_checkpoints_is_loadable(stopped):
    shutil.rmtree(stopped.path / "checkpoints")
    model, _ = load_model(stopped.path)
    assert model(mx.array([[1, 2]])).shape == (1, 2, 300)


def test_checkpoints_are_flushed_to_disk(new_run, monkeypatch):
    """Files, their folder and the log are flushed before the folder is renamed, and its parent after."""
    run = new_run("run", steps=2)
    happened = []
    fsync, rename = os.fsync, Path.replace

    def flushed(descriptor):
        happened.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(path, target):
        happened.append(("rename", str(path), str(target)))
        return rename(path, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("file names of descriptors are in /proc")
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    finish(run)
    target = run.path / "checkpoints" / "step-2"
    [at] = [i for i, h in enumerate(happened) if h[0] == "rename" and h[2] == str(target)]
    partial_folder = happened[at][1]
    before = {h[1] for h in happened[:at] if h[0] == "flush"}
    for file in target.iterdir():
        assert f"{partial_folder}/{file.name}" in before
    assert {partial_folder, str(run.log_file)} <= before
    after = [h[1] for h in happened[at:] if h[0] == "flush"]
    assert str(target.parent) in after and str(run.path) in after  # the folder `checkpoints` is new, too


# Moved data


def test_with_data(stopped, tmp_path):
    moved = tmp_path / "elsewhere"
    stopped.data.rename(moved)
    with pytest.raises(DataError, match=r"the data of .*run is not in .*--resume .*run --data FOLDER"):
        finish(stopped, resume=True)
    with pytest.raises(DataError, match="is not a prepared dataset"):
        stopped.with_data(tmp_path)
    with pytest.raises(DataError, match="other data than .*run began with"):
        other = tmp_path / "other"
        shutil.copytree(moved, other)
        (other / "manifest.json").write_text((other / "manifest.json").read_text() + " ")
        stopped.with_data(other)
    assert stopped.with_data(moved).data == moved
    again = Run.open(stopped.path)
    assert again.data == moved
    assert finish(again, resume=True)[-1].step == 20


def test_pretrain_resume_with_moved_data(stopped, tmp_path):
    moved = tmp_path / "elsewhere"
    stopped.data.rename(moved)
    code, _, err = run_mlxlm("pretrain", "--resume", stopped.path)
    assert code == 1 and f"(try: mlxlm pretrain --resume {stopped.path} --data FOLDER" in err
    code, _, err = run_mlxlm("pretrain", tmp_path / "text.txt", "--out", tmp_path / "new", "--data", moved)
    assert code == 2 and "--data needs --resume RUN" in err
    assert run_mlxlm("pretrain", "--resume", stopped.path, "--data", moved)[0] == 0
    assert stopped.checkpoints()[-1].name == "step-20"


def test_data_inside_the_run(stopped, tmp_path):
    stopped.data.rename(stopped.path / "tokens")
    stopped.with_data(stopped.path / "tokens")
    stopped.path.rename(tmp_path / "renamed")
    assert Run.open(tmp_path / "renamed").data == tmp_path / "renamed/tokens"


# Other programs


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
def test_run_opens_in_transformers_and_mlx_lm(new_run, changes):
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers and PyTorch")
    torch = pytest.importorskip("torch", reason="the oracle needs transformers and PyTorch")
    run = new_run("run", config=changes, steps=2, eval_every=2)
    finish(run)
    tokens = np.random.default_rng(0).integers(0, 300, (2, 20))
    model, _ = load_model(run.path)
    expected = np.array(model(mx.array(tokens)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run.path).eval()
    with torch.no_grad():
        np.testing.assert_allclose(theirs(torch.tensor(tokens)).logits.numpy(), expected, atol=2e-5)
    text = "The cat sat on a mat."
    assert transformers.AutoTokenizer.from_pretrained(run.path)(text)["input_ids"] == load(run.path).encode(text)
    assert theirs.generation_config.eos_token_id == run.config.eos_token_id
    mlx_lm = pytest.importorskip("mlx_lm", reason="the oracle needs mlx_lm")
    model, tokenizer = mlx_lm.load(str(run.path))
    np.testing.assert_allclose(np.array(model(mx.array(tokens))), expected, atol=2e-5)
    assert tokenizer.encode(text) == load(run.path).encode(text)


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

    @contextmanager
    def check_data(run, real=loop._check_data):
        with real(run) as check:

            def result():
                go.set()  # something waits for the check
                return check.result()

            yield SimpleNamespace(done=check.done, result=result)

    monkeypatch.setattr(loop, "verify_shards", slow)
    monkeypatch.setattr(loop, "_check_data", check_data)
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

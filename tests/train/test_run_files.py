"""What lies in a run: files that changed unseen, data that was moved, a model that other programs open."""

import json
import shutil
import threading

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.cli.main import main
from mlxlm.data import DataOptions, prepare
from mlxlm.data.shards import verify_shards
from mlxlm.tokenizer import load
from mlxlm.train import ProcessGroup, Run, Step, start_run, train
from mlxlm.train.data_check import DataCheck
from mlxlm.train.distributed.worker import _Status
from mlxlm.utils.digests import file_sha256
from mlxlm.utils.errors import CheckpointError, DataError
from tests.train.training_runs import QUICK, contents, finish


def flip(path, at=-9):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.fixture
def stopped(new_run):
    """A run with checkpoints of steps 10 and 15, of 20."""
    run = new_run("run", save_every=10)
    finish(run, stop_at=15)
    return run


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_a_changed_byte_is_refused(stopped, name):
    last = stopped.checkpoints()[-1]
    flip(last / name)
    with pytest.raises(CheckpointError, match=rf"step-15/{name} has changed since .*removing .*step-15.* from step-10"):
        finish(stopped, resume=True)
    shutil.rmtree(last)  # as it says
    rest = finish(stopped, resume=True)
    assert [e.step for e in rest if isinstance(e, Step)] == list(range(11, 21))


def test_the_only_checkpoint_with_a_changed_byte_names_another_way(new_run):
    run = new_run("run")
    finish(run, stop_at=5)
    flip(run.checkpoints()[-1] / "model.safetensors")
    with pytest.raises(CheckpointError, match="step-5/model.safetensors has changed .*unchanged copy of this file"):
        finish(run, resume=True)


def test_a_checkpoint_has_the_digests_of_its_files(stopped):
    state = json.loads((stopped.checkpoints()[-1] / "state.json").read_text())
    assert state["sha256"] == {
        name: file_sha256(stopped.checkpoints()[-1] / name, CheckpointError)
        for name in ("model.safetensors", "optimizer.safetensors")
    }


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx.npy", "validation-00000.bin"])
def test_a_shard_with_a_changed_byte_is_refused_before_anything_is_saved(stopped, name):
    flip(stopped.data / name)
    before = [c.name for c in stopped.checkpoints()]
    with pytest.raises(DataError, match=rf"data/{name} has changed.*unchanged copy"):
        finish(stopped, resume=True)
    assert [c.name for c in stopped.checkpoints()] == before
    flip(stopped.data / name)
    assert finish(stopped, resume=True)[-1].step == 20


def test_a_mask_with_a_changed_byte_is_found(tmp_path, tiny_tokenizer):
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The cat."}]}] * 40
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(DataOptions([tmp_path / "chat.jsonl"]), tiny_tokenizer, tmp_path / "out")
    verify_shards(tmp_path / "out")
    flip(tmp_path / "out/train-00000.mask.bin")
    with pytest.raises(DataError, match=r"train-00000.mask.bin has changed"):
        verify_shards(tmp_path / "out")


@pytest.mark.parametrize("found_at", [3, "the first save"])
def test_steps_begin_while_the_data_is_checked_and_the_first_save_waits(new_run, monkeypatch, found_at):
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


def test_a_stop_does_not_wait_for_the_whole_check(stopped):
    looked = []

    def should_stop():
        looked.append(1)
        return True

    verify_shards(stopped.data, should_stop)
    assert len(looked) == 1


class Others(ProcessGroup):
    """This rank among three; `peer_status` are those of the others."""

    def __init__(self, rank=0, peer_status=()):
        super().__init__(rank, 3)
        self.statuses = list(peer_status)

    def peer_status(self, name):
        return [status[name] for status in self.statuses if name in status]

    wait_for_peer_status = peer_status


def test_rank_0_waits_for_the_checks_of_all_ranks(stopped):
    others = Others(peer_status=[{"data_problem": ""}, {"data_problem": "rank 2: data/x has changed"}])
    check = DataCheck(stopped.data, others)
    for judge in (check.wait, check.raise_if_failed):
        with pytest.raises(DataError, match="rank 2: data/x has changed .*same unchanged files on every machine"):
            judge()
    others.statuses = [{"data_problem": ""}] * 2
    check.wait()
    check.close()


def test_other_ranks_report_their_data_check(stopped):
    other = Others(rank=1, peer_status=[{"data_problem": ""}])
    check, status = DataCheck(stopped.data, other), _Status(lambda: False)
    check.close()
    status.data_check = check
    assert status()["data_problem"] == ""
    flip(stopped.data / "train-00000.bin")
    check = status.data_check = DataCheck(stopped.data, other)
    check._result.exception()
    assert status()["data_problem"].startswith("rank 1: ") and "train-00000.bin has changed" in status()["data_problem"]


# Moved data


def test_moved_data_is_found_by_its_new_place_and_remembered(stopped, new_run, tmp_path):
    whole = new_run("whole", save_every=10)
    finish(whole)
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
    finish(again, resume=True)
    assert contents(stopped.path / "checkpoints/step-20") == contents(whole.path / "checkpoints/step-20")


def test_the_command_resumes_with_moved_data(stopped, tmp_path, capsys):
    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, capsys.readouterr().err

    moved = tmp_path / "elsewhere"
    stopped.data.rename(moved)
    code, err = command("pretrain", "--resume", stopped.path)
    assert code == 1 and f"(try: mlxlm pretrain --resume {stopped.path} --data FOLDER" in err
    code, err = command("pretrain", tmp_path / "text.txt", "--out", tmp_path / "new", "--data", moved)
    assert code == 2 and "--data needs --resume RUN" in err
    for name in ("pretrain", "finetune"):
        assert command(name, "--resume", stopped.path, "--data", moved)[0] == 0
    assert stopped.checkpoints()[-1].name == "step-20"


def test_data_inside_the_run_moves_with_it(stopped, tmp_path):
    stopped.data.rename(stopped.path / "tokens")
    stopped.with_data(stopped.path / "tokens")
    stopped.path.rename(tmp_path / "renamed")
    assert Run.open(tmp_path / "renamed").data == tmp_path / "renamed/tokens"


# Other programs


GPT2 = {  # whose files have other names, transposed matrices, and query, key and value in one
    "norm": "layer", "positions": "learned", "mlp_gated": False, "hidden_act": "gelu_new", "attention_bias": True,
    "mlp_bias": True, "num_key_value_heads": 4, "intermediate_size": 128,
}  # fmt: skip


def test_a_resume_from_files_in_another_layout_is_equal_to_the_bit(tmp_path, text_file, tiny_config, tokenizer_folder):
    def make(name):
        config = tiny_config.with_changes(**GPT2)
        return start_run(tmp_path / name, [text_file], config, tokenizer=tokenizer_folder, settings=dict(QUICK))

    whole, parts = make("whole"), make("parts")
    finish(whole)
    finish(parts, stop_at=7)
    finish(parts, resume=True)
    assert contents(whole.checkpoints()[-1]) == contents(parts.checkpoints()[-1])


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, GPT2], ids=["tied", "untied", "gpt2"])
def test_a_run_opens_in_transformers_and_mlx_lm(tmp_path, text_file, tiny_config, tokenizer_folder, changes):
    transformers = pytest.importorskip("transformers", reason="the oracle needs transformers and PyTorch")
    torch = pytest.importorskip("torch", reason="the oracle needs transformers and PyTorch")
    run = start_run(
        tmp_path / "run", [text_file], tiny_config.with_changes(**changes), tokenizer=tokenizer_folder,
        settings={**QUICK, "steps": 6, "eval_every": 2, "save_every": 2},
    )  # fmt: skip
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

"""Runs: bit-equal resume, stopping, failing safely, learning."""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.data import Batch
from mlxlm.evaluate import Evaluation
from mlxlm.report import read_run
from mlxlm.tokenizer import load
from mlxlm.train import (
    Budget,
    Finished,
    Run,
    Sample,
    Stopped,
    TokenizerOptions,
    TrainingWarning,
    TrainSettings,
    Validation,
    start_run,
    train,
)
from mlxlm.train.events import Failed
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError, TrainingError
from tests.train.training_runs import QUICK, contents, finish, read_log


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1, "grad_accumulation_steps": 2, "grad_checkpoint": True},
        {"lr_schedule": "wsd", "save_every": 7, "optimizer": "muon", "ema_decay": 0.9},
    ],
)
def test_resume_is_equal_to_the_bit(new_run, changes):
    """20 steps = 10 + resume + 10, dropout, accumulation and optimizer included."""
    whole, parts = new_run("whole", **changes), new_run("parts", **changes)
    assert isinstance(finish(whole)[-1], Finished)
    assert finish(parts, stop_at=10)[-1] == Stopped(10, parts.path)
    assert isinstance(finish(Run.open(parts.path), resume=True)[-1], Finished)
    assert contents(whole.path / "checkpoints/step-20") == contents(parts.path / "checkpoints/step-20")

    def losses(run):
        return [(e["step"], e["loss"]) for e in read_log(run) if e["event"] == "step"]

    assert losses(whole) == losses(parts)


def test_training_learns_and_the_run_is_a_model(new_run):
    run = new_run("run", steps=60, eval_every=20)
    events = finish(run)
    validations = [e for e in events if isinstance(e, Validation)]
    assert validations[-1].loss < validations[0].loss < np.log(300) + 0.1
    assert validations[-1].perplexity == pytest.approx(np.exp(validations[-1].loss))
    manifest = json.loads((run.path / "data/manifest.json").read_text())["validation"]
    ratio = manifest["tokens"] / manifest["bytes"]
    assert validations[-1].bits_per_byte == pytest.approx(validations[-1].loss / np.log(2) * ratio)
    model, config = load_model(run.path)
    assert config.vocab_size == 300 and model(mx.array([[1, 2, 3]])).shape == (1, 3, 300)
    assert (run.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {e["event"] for e in read_log(run)} == {"started", "step", "validation", "checkpoint_saved", "finished"}


def test_the_last_k_and_the_best_are_kept(new_run):
    run = new_run("run", steps=12, save_every=2, save_total_limit=2, eval_every=4)
    finish(run)
    steps = {int(c.name.removeprefix("step-")) for c in run.checkpoints()}
    best = int(best_checkpoint(run.path).name.removeprefix("step-"))
    logged = {e["step"]: e["loss"] for e in read_log(run) if e["event"] == "validation"}
    assert best == min(logged, key=logged.get)
    assert steps == {10, 12, best}


@pytest.mark.parametrize("state", [None, "[1]", "{"])
def test_a_checkpoint_without_a_state_is_not_a_good_one(new_run, state):
    """And saving goes on beside it, which asks for the last good one."""
    run = new_run("run")
    for step, content in ((5, '{"healthy": true}'), (7, state)):
        (run.path / f"checkpoints/step-{step}").mkdir(parents=True)
        if content is not None:
            (run.path / f"checkpoints/step-{step}/state.json").write_text(content)
    assert run.last_good().name == "step-5" and run.expired_checkpoints() == []


def test_nan_stops_before_anything_is_overwritten(new_run, monkeypatch):
    run = new_run("run", save_every=5, eval_every=5)
    real, calls = TrainStep.__call__, []

    def breaks(self, batch, rate):
        calls.append(rate)
        loss, norm = real(self, batch, rate)
        return (loss * float("nan"), norm) if len(calls) == 8 else (loss, norm)

    monkeypatch.setattr(TrainStep, "__call__", breaks)
    with pytest.raises(TrainingError, match="stopped at step 8: the loss is nan.*step-5.*learning-rate"):
        finish(run)
    assert [c.name for c in run.checkpoints()] == ["step-5"]
    assert (run.path / "loss.png").exists()


def test_a_loss_spike_stops(new_run, monkeypatch):
    run = new_run("run", steps=40)
    real, calls = TrainStep.__call__, []

    def spikes(self, batch, rate):
        calls.append(rate)
        loss, norm = real(self, batch, rate)
        return loss + (3.0 if len(calls) > 20 else 0.0), norm

    monkeypatch.setattr(TrainStep, "__call__", spikes)
    with pytest.raises(TrainingError, match="the loss rose from .*step-20"):
        finish(run)


def test_one_noisy_batch_is_no_spike(new_run, monkeypatch):
    run = new_run("run")
    real, calls = TrainStep.__call__, []

    def noisy(self, batch, rate):
        calls.append(rate)
        loss, norm = real(self, batch, rate)
        return loss + (3.0 if len(calls) == 15 else 0.0), norm

    monkeypatch.setattr(TrainStep, "__call__", noisy)
    assert isinstance(finish(run)[-1], Finished)


def test_accumulation_equals_a_larger_batch(tiny_config):
    from mlxlm.model import Decoder

    batch = np.random.default_rng(0).integers(0, 300, (4, 2, 17))
    found = []
    for shape in ((4, 2, 17), (1, 8, 17)):
        model = Decoder(tiny_config)
        model.init_weights(0)
        settings = TrainSettings(steps=5, learning_rate=1e-3, grad_accumulation_steps=shape[0], batch_size=shape[1])
        step = TrainStep(model, settings)
        loss, norm = step([Batch(rows) for rows in batch.reshape(shape)], 1e-3)
        found.append((loss.item(), norm.item(), np.array(model.model.norm.weight)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def test_decay_is_on_matrices_only(tiny_config):
    from mlxlm.model import Decoder

    def after(decay):
        model = Decoder(tiny_config)
        model.init_weights(0)
        step = TrainStep(model, TrainSettings(steps=5, learning_rate=0.1, weight_decay=decay))
        mx.eval(step([Batch(np.ones((2, 9), np.int32))], 0.1))
        return model

    with_decay, without = after(0.5), after(0.0)
    assert mx.array_equal(with_decay.model.norm.weight, without.model.norm.weight)
    matrix = with_decay.layers[0].mlp.up_proj.weight
    start = (without.layers[0].mlp.up_proj.weight - matrix) / (0.1 * 0.5)  # decay takes lr·wd·w off
    model = Decoder(tiny_config)
    model.init_weights(0)
    np.testing.assert_allclose(np.array(start), np.array(model.layers[0].mlp.up_proj.weight), atol=1e-4)


def test_adamw_equals_torch(tiny_config):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    from mlxlm.model import Decoder

    model = Decoder(tiny_config)
    model.init_weights(0)
    weight = torch.nn.Parameter(torch.tensor(np.array(model.layers[0].mlp.up_proj.weight)))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    step = TrainStep(model, TrainSettings(steps=9, learning_rate=1e-2, weight_decay=0.1, grad_clip=0))
    batch = np.random.default_rng(0).integers(0, 300, (2, 17))
    for _ in range(4):
        gradient = mx.grad(step._loss)(model.trainable_parameters(), mx.array(batch))
        model.load_weights([], strict=False)
        weight.grad = torch.tensor(np.array(gradient["model"]["layers"][0]["mlp"]["up_proj"]["weight"]) / 32)
        optimizer.step()
        mx.eval(step([Batch(batch)], 1e-2), step.state)
        np.testing.assert_allclose(np.array(model.layers[0].mlp.up_proj.weight), weight.detach().numpy(), atol=2e-5)


def test_an_existing_run_is_refused(new_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="run already exists .*--resume .*another --out"):
        new_run("run")
    assert (tmp_path / "run/mine.txt").read_text() == "precious"


def test_a_text_shorter_than_a_sequence(tmp_path, tiny_config, tokenizer_folder):
    (tmp_path / "short.txt").write_text("the cat sat on a mat. " * 8)
    with pytest.raises(DataError, match="less than one sequence of 64 .*--max-seq-length"):
        start_run(
            tmp_path / "run", [tmp_path / "short.txt"], tiny_config, tokenizer=tokenizer_folder,
            settings={**QUICK, "max_seq_length": 64},
        )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_a_damaged_checkpoint_is_named(new_run):
    run = new_run("run", steps=10)
    finish(run, stop_at=5)
    weights = run.checkpoints()[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is truncated"):
        finish(Run.open(run.path), resume=True)
    with pytest.raises(CheckpointError, match="model.safetensors is truncated"):
        load_model(run.path)


def test_a_save_that_was_killed_leaves_the_last_checkpoint(new_run):
    run = new_run("run", steps=10, save_every=5)
    (run.path / "checkpoints/.step-5.1.partial").mkdir(parents=True)  # what kill -9 would leave
    assert isinstance(finish(run, resume=True)[-1], Finished)  # without a checkpoint, from the start
    assert {c.name for c in (run.path / "checkpoints").iterdir()} == {"step-5", "step-10"}


def test_the_log_of_a_resumed_run_has_every_step_once(new_run):
    run = new_run("run", steps=20, save_every=5, eval_every=0)
    finish(run, stop_at=10)
    with run.log_file.open("a") as file:
        file.write('{"event": "step", "step": 11, "tokens": 1, "loss": 9.0}\n{"event": "st')  # lost with the power
    finish(run, resume=True)
    assert [e["step"] for e in read_log(run) if e["event"] == "step"] == list(range(1, 21))


def test_schedules():
    def rates(**changes):
        s = TrainSettings(steps=100, learning_rate=1.0, warmup_steps=10, **changes)
        return [s.learning_rate_at(i) for i in range(100)]

    cosine, wsd, constant = rates(), rates(lr_schedule="wsd"), rates(lr_schedule="constant")
    for r in (cosine, wsd, constant):
        assert r[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert cosine[10] == 1 and cosine[-1] == pytest.approx(0.1) and cosine == sorted(cosine[:10]) + cosine[10:]
    assert wsd[10:81] == [1.0] * 71 and wsd[81] < 1 and wsd[99] == pytest.approx(0.1)
    assert wsd == sorted(wsd[:10]) + sorted(wsd[10:], reverse=True)
    assert constant[10:] == [1.0] * 90


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"batch_size": 0, "dropout": 1.0}, "batch_size is 0.*dropout is 1.0"),
        ({"lr_schedule": "sine"}, "schedule is 'sine'.*cosine, linear, constant, wsd"),
        ({"warmup_steps": 100}, "warmup_steps is 100, it must be less than steps, which is 50"),
    ],
)
def test_impossible_settings(change, expected):
    with pytest.raises(ConfigError, match=expected):
        TrainSettings(**{"steps": 50, "learning_rate": 1e-3, **change})


def test_samples_with_and_without_a_prompt(new_run):
    for name, prompt in (("empty", ""), ("given", "The cat")):
        run = new_run(name, steps=4, sample_every=2, sample_tokens=5, sample_prompt=prompt)
        samples = [e for e in finish(run) if isinstance(e, Sample)]
        assert [(s.step, s.prompt) for s in samples] == [(2, prompt), (4, prompt)]


def test_sampling_changes_nothing_of_the_training(new_run):
    with_samples = new_run("a", steps=6, dropout=0.1, sample_every=1, sample_tokens=3)
    without = new_run("b", steps=6, dropout=0.1)
    finish(with_samples), finish(without)
    model = "checkpoints/step-6/model.safetensors"
    assert (with_samples.path / model).read_bytes() == (without.path / model).read_bytes()


def test_a_validation_that_a_stop_skipped_is_made_up_for(new_run):
    whole, parts = new_run("whole"), new_run("parts")
    finish(whole)
    assert not [e for e in finish(parts, stop_at=10) if isinstance(e, Validation)]
    finish(Run.open(parts.path), resume=True)

    def validations(run):
        return [(e["step"], e["loss"]) for e in read_log(run) if e["event"] == "validation"]

    assert validations(whole) == validations(parts)
    assert best_checkpoint(whole.path).name == best_checkpoint(parts.path).name


def test_a_sample_that_a_stop_skipped_is_made_up_for_once(new_run):
    run = new_run("run", steps=8, eval_every=0, sample_every=4, sample_tokens=3)
    for stop_at in (4, 0, 8, 8):  # before the sample of step 4, after it, at the end, and with nothing to do
        finish(Run.open(run.path), resume=True, stop_at=stop_at)
    finish(Run.open(run.path), resume=True)
    assert [e["step"] for e in read_log(run) if e["event"] == "sample"] == [4, 8]


def test_a_start_that_died_before_its_first_checkpoint_is_logged_once(new_run):
    run = new_run("run", steps=4)
    events = train(run, load(run.path))
    while getattr(next(events), "step", 0) < 2:
        pass
    events.close()
    finish(Run.open(run.path))
    assert [e["step"] for e in read_log(run) if e["event"] == "step"] == [1, 2, 3, 4]


def test_any_error_is_logged_and_leaves_a_report(new_run, monkeypatch):
    """Also one of MLX's own, and also where the log can't be written then: it is the first that counts."""
    run, real = new_run("run", steps=4), TrainStep.__call__

    def broken(self, batches, rate):
        if loop_step[0] == 2:
            raise RuntimeError("[malloc] Unable to allocate 99 bytes.")
        loop_step[0] += 1
        return real(self, batches, rate)

    loop_step = [0]
    monkeypatch.setattr(TrainStep, "__call__", broken)
    with pytest.raises(RuntimeError, match="malloc"):
        finish(run)
    last = read_log(run)[-1]
    assert (last["event"], last["step"]) == ("failed", 3) and last["message"].startswith("out of memory")
    assert (run.path / "report.html").exists()

    def full(log, event):
        raise CheckpointError("cannot write")

    monkeypatch.setattr("mlxlm.train.loop.RunLog.record", lambda log, e: full(log, e) if type(e) is Failed else None)
    with pytest.raises(RuntimeError, match="malloc"):
        finish(Run.open(run.path), resume=True)


def test_a_report_that_is_refused_is_warned_of_in_the_log(new_run):
    run = new_run("run", steps=2)
    (run.path / "report.html").write_text("mine")
    events = finish(run)
    assert isinstance(events[-1], TrainingWarning) and "is not a report" in events[-1].message
    assert read_log(run)[-1]["message"] == events[-1].message
    assert read_run(run.path).state == "finished"


def test_the_last_good_checkpoint_is_one_before_the_rise(new_run, monkeypatch):
    """A loss that creeps up is saved meanwhile: what is named, and kept, is from before."""
    run = new_run("run", steps=60, save_every=5, eval_every=0, save_total_limit=1)
    real, calls = TrainStep.__call__, []

    def creeps(self, batch, rate):
        calls.append(rate)
        loss, norm = real(self, batch, rate)
        return loss * 0 + 4.0 + 0.05 * max(0, len(calls) - 20), norm

    monkeypatch.setattr(TrainStep, "__call__", creeps)
    with pytest.raises(TrainingError, match=r"the loss rose from 4.00 to 5.0.*last good checkpoint is .*step-30"):
        finish(run)
    loaded, _ = load_model(run.path / "checkpoints/step-30")
    assert loaded(mx.array([[1]])).shape == (1, 1, 300)


def test_a_validation_that_is_not_finite_stops(new_run, monkeypatch):
    run = new_run("run")
    monkeypatch.setattr("mlxlm.train.loop.evaluate_dataset", lambda *_, **__: Evaluation(float("nan"), float("nan"), 9))
    with pytest.raises(TrainingError, match="stopped at step 10: the validation loss is nan"):
        finish(run)
    assert run.checkpoints() == []


def test_what_resume_refuses(new_run):
    run = new_run("run", steps=10)
    finish(run, stop_at=5)
    with pytest.raises(CheckpointError, match="has been trained already"):
        finish(run)
    train_json = run.path / "train.json"
    values = json.loads(train_json.read_text())
    train_json.write_text(json.dumps({**values, "settings": {**values["settings"], "batch_size": 2}}))
    with pytest.raises(CheckpointError, match="other settings than step-5: batch_size"):
        finish(Run.open(run.path), resume=True)
    train_json.write_text(json.dumps(values))
    with run.locked(), pytest.raises(CheckpointError, match="is being trained by another process"):
        finish(run, resume=True)
    manifest = run.data / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(DataError, match="has changed since"):
        finish(run, resume=True)


def test_settings_are_checked_before_the_work(tmp_path, text_file, tiny_config, tokenizer_folder):
    def start(**changes):
        options = {"tokenizer": tokenizer_folder, "settings": dict(QUICK), **changes}
        if "budget" in options:
            options["budget"] = Budget(**options["budget"])
        start_run(tmp_path / "run", ["/nowhere.txt"], tiny_config, **options)

    for changes, expected in (
        ({"settings": {**QUICK, "beta1": 2}}, "beta1 is 2"),
        ({"minutes": 3}, "minutes and steps each say how long"),
        ({"settings": {}, "budget": {"tokens": float("nan")}}, "tokens is nan"),
        ({"settings": {}, "minutes": 0}, "minutes is 0"),
        ({"settings": {}, "budget": {"tokens": -5}}, "tokens is -5"),
        ({"settings": {**QUICK, "batch_size": 2**40}}, "training takes about .* of memory"),
    ):
        with pytest.raises(ConfigError, match=expected):
            start(**changes)


def test_what_a_killed_start_left_goes_with_the_next(tmp_path, new_run):
    """A process that is gone had prepared tokens for a run of this name."""
    left = tmp_path / ".run-parts.4999999.partial"  # a number that Linux gives to no process
    left.mkdir()
    (left / "tokens").write_bytes(bytes(100))
    new_run("run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "text.txt"]


def test_a_model_larger_than_the_memory_is_refused(tmp_path, text_file, tiny_config):
    huge = tiny_config.with_changes(hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=100, head_dim=64)
    with pytest.raises(ConfigError, match="training takes about .* are available .*smaller model"):
        start_run(tmp_path / "run", [text_file], huge, tokenizer=TokenizerOptions(vocab_size=300), settings=dict(QUICK))
    assert not (tmp_path / "run").exists()


def test_the_context_is_what_the_model_was_trained_on(new_run):
    assert new_run("run").config.max_position_embeddings == 32


def test_conversations_make_a_chat_model(tmp_path, tiny_config, tokenizer_folder):
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The cat."}]}] * 60
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = start_run(
        tmp_path / "run", [tmp_path / "chat.jsonl"], tiny_config, tokenizer=tokenizer_folder, settings=dict(QUICK)
    )
    tokenizer = load(run.path)
    assert "<|assistant|>" in tokenizer.chat_template
    assert run.config.eos_token_id == [tokenizer.eos_id, tokenizer.special_tokens["<|end|>"]]


def test_accumulation_keeps_one_forward_pass_in_memory(tiny_config, monkeypatch):
    from mlxlm.model import Decoder

    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: 1)  # how far the parts of several overlap is chance

    def peak(grad_accumulation_steps):
        model = Decoder(tiny_config)
        model.init_weights(0)
        step = TrainStep(
            model,
            TrainSettings(steps=5, learning_rate=1e-3, grad_accumulation_steps=grad_accumulation_steps, batch_size=4),
        )
        batch = [Batch(np.ones((4, 65), np.int32))] * grad_accumulation_steps
        mx.eval(step(batch, 1e-3), step.state)
        mx.reset_peak_memory()
        mx.eval(step(batch, 1e-3), step.state)
        return mx.get_peak_memory()

    assert peak(16) < 2 * peak(1)

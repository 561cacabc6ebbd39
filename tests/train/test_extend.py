"""Longer runs (`extend_run`), decay branches, and further pretraining (`init`)."""

import json
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_weights, open_tokenizer
from mlxlm.checkpoint.locations import best_checkpoint
from mlxlm.data import CHAT_TEMPLATE, DataOptions, prepare
from mlxlm.generation import GenerationConfig, load
from mlxlm.tokenizer import train as train_tokenizer
from mlxlm.train import Budget, Finished, Run, Stopped, TrainSettings, extend_run, repeat_run, start_run
from mlxlm.train.extend import start_decay_branch
from mlxlm.train.objectives import open_batches
from mlxlm.train.settings import LR_SCHEDULES
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.run_command import run as mlxlm
from tests.small_models import random_decoder, write_folder
from tests.train.training_runs import QUICK, TIME_LIMIT, contents, finish, read_log, ticking_clock

CONSTANT = {"lr_schedule": "constant", "warmup_steps": 2, "ema_decay": 0.9, "dropout": 0.1}


def rates(run):
    return {e["step"]: e["learning_rate"] for e in read_log(run) if e["event"] == "step"}


def test_a_longer_run_with_a_constant_rate(new_run):
    """It ends like a run that was longer from the beginning."""
    long, short = new_run("long", steps=16, **CONSTANT), new_run("short", steps=10, **CONSTANT)
    finish(long)
    finish(short)
    longer = extend_run(Run.open(short.path), Budget(tokens=16 * short.settings.tokens_per_step))
    assert finish(longer, resume=True, stop_at=13)[-1] == Stopped(13, longer.path)
    assert extend_run(longer, Budget(steps=16)).settings == longer.settings  # the same command again
    assert isinstance(finish(Run.open(longer.path), resume=True)[-1], Finished)
    assert contents(long.path / "checkpoints/step-16") == contents(longer.path / "checkpoints/step-16")
    assert sorted(rates(longer)) == [*range(1, 17)]


@given(
    schedule=st.sampled_from(LR_SCHEDULES),
    steps=st.integers(2, 300),
    finished=st.integers(0, 300),
    more=st.integers(1, 600),
    warmup=st.integers(0, 20) | st.none(),
)
def test_the_schedule_of_an_extended_run(schedule, steps, finished, more, warmup):
    finished = min(finished, steps)
    warmup = None if warmup is None else min(warmup, steps - 1)
    before = TrainSettings(steps=steps, learning_rate=1.0, lr_schedule=schedule, warmup_steps=warmup)
    last = before.learning_rate_at(finished / steps, finished - 1) if finished else None
    total, warmup = finished + more, min(before.warmup, finished + more - 1)
    longer = {"steps": total, "warmup_steps": warmup}
    new = TrainSettings(learning_rate=1.0, lr_schedule=schedule, **longer)
    settings = TrainSettings(**new.to_dict() | {"rewarm_step": finished, "rewarm_learning_rate": last})
    found = [settings.learning_rate_at((i + 1) / total, i) for i in range(finished, total)]
    wanted = [new.learning_rate_at((i + 1) / total) for i in range(finished, total)]
    start = warmup if finished else 0  # steps that lead from one schedule to the other
    assert found[start:] == pytest.approx(wanted[start:])
    low, high = sorted([last or 0.0, max(wanted)])
    assert all(min(low, min(wanted)) - 1e-9 <= rate <= high + 1e-9 for rate in found)
    if schedule == "constant" and finished > before.warmup:
        assert found == pytest.approx([1.0] * more)


def test_limits_of_time(new_run, monkeypatch):
    """Minutes count from now, and a run with a time limit can be extended by steps."""
    run = new_run("run", steps=10, lr_schedule="wsd", warmup_steps=1)
    finish(run, now=ticking_clock())
    [state] = [json.loads((run.checkpoints()[-1] / "state.json").read_text())]
    with monkeypatch.context() as patch:
        patch.setattr(Budget, "seconds_left", lambda budget: 60 * budget.minutes)
        timed = extend_run(run, Budget(minutes=0.1))
    assert timed.settings.time_limit == state["elapsed"] + 6.0
    assert timed.settings.steps == 10 + round(6.0 * 10 / state["elapsed"])
    [*_, ending] = finish(timed, resume=True, now=ticking_clock())
    assert isinstance(ending, Finished) and ending.step > 10 and rates(timed)[ending.step] < rates(timed)[13]
    longer = extend_run(Run.open(timed.path), Budget(steps=ending.step + 3))
    assert longer.settings.time_limit is None
    assert finish(longer, resume=True)[-1].step == ending.step + 3

    chosen_by_time = new_run("other", **TIME_LIMIT | {"eval_every": None})
    assert extend_run(chosen_by_time, Budget(steps=30)).settings.eval_every == TrainSettings.eval_every


def test_a_repeated_run_gets_longer(new_run, tmp_path):
    original = new_run("original", steps=6)
    finish(original)
    finish(longer := extend_run(original, Budget(steps=9)), resume=True)
    copy = repeat_run(tmp_path / "copy", longer)
    finish(copy)
    assert contents(longer.path / "checkpoints/step-9") == contents(copy.path / "checkpoints/step-9")
    assert finish(extend_run(Run.open(copy.path), Budget(steps=11)), resume=True)[-1].step == 11


def test_the_finished_model_stays_until_a_better_one(new_run):
    run = new_run("run", steps=10, save_total_limit=1)
    finish(run)
    before = contents(run.path / "checkpoints/step-10")
    longer = extend_run(run, Budget(steps=40))
    finish(longer, resume=True, stop_at=11)
    assert contents(run.path / "checkpoints/step-10") == before
    assert (run.path / "checkpoints/step-10/model.safetensors").samefile(run.path / "model.safetensors")


def test_other_settings_are_still_refused(stopped):
    extend_run(stopped, Budget(steps=30))
    file = stopped.path / "train.json"
    values = json.loads(file.read_text())
    values["settings"]["learning_rate"] *= 2
    file.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="has other settings than step-15: learning_rate .try"):
        finish(Run.open(stopped.path), resume=True)


def test_a_decay_branch(new_run, tmp_path):
    """It ends like a run with the schedule "wsd", and the trunk stays as it is."""
    trunk = new_run("trunk", **CONSTANT | {"steps": 30, "save_every": 4, "save_total_limit": 9})
    finish(trunk, stop_at=10)
    before = {file: file.read_bytes() for file in trunk.path.rglob("*") if file.is_file()}
    assert [c.name for c in start_decay_branch(tmp_path / "last", trunk.path, 4).checkpoints()] == ["step-10"]
    branch = start_decay_branch(tmp_path / "branch", trunk.path / "checkpoints/step-8", 4)
    assert isinstance(finish(branch, resume=True)[-1], Finished)
    wsd = new_run("wsd", **CONSTANT | {"steps": 12, "lr_schedule": "wsd", "decay_fraction": 4 / 12, "save_every": 4})
    finish(wsd)
    assert rates(branch) == rates(wsd) and rates(branch)[8] == 3e-3 > rates(branch)[9]
    assert contents(branch.path / "checkpoints/step-12") == contents(wsd.path / "checkpoints/step-12")
    assert before == {file: file.read_bytes() for file in before}
    with pytest.raises(ConfigError, match="at step 12 is 0.0003, not its peak .try: a run with `lr_schedule=constant`"):
        start_decay_branch(tmp_path / "other", branch.path, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_config, tiny_tokenizer):
    """A model with a chat template, sampling options, and more rows of the embedding than tokens."""
    folder = tmp_path_factory.mktemp("base") / "model"
    config = tiny_config.with_changes(vocab_size=320, eos_token_id=[5, 7])
    write_folder(folder, random_decoder(config, seed=4), config, tiny_tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": "{{ messages[0].content }}"})
    )
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    return folder


def test_init(base, tmp_path, text_file, tiny_tokenizer):
    settings = {"steps": 4, "batch_size": 2, "save_every": 2}
    run = start_run(tmp_path / "run", [text_file], init=base, settings=settings)
    found, wanted = load_weights(run.path / "checkpoints/step-0"), load_weights(base)
    assert set(found) == set(wanted) and all(mx.array_equal(found[name], wanted[name]) for name in wanted)
    assert (run.config.vocab_size, run.config.eos_token_id, run.config.max_position_embeddings) == (320, [5, 7], 128)
    assert run.settings.max_seq_length == 128 and run.settings.learning_rate < 3e-3
    tokenizer = open_tokenizer(run.path)
    assert (
        tokenizer.chat_template == "{{ messages[0].content }}" and tokenizer.fingerprint == tiny_tokenizer.fingerprint
    )
    assert finish(run, resume=True)[1].step == 0  # validates the model first
    assert load(run.path).generation_config == GenerationConfig({"temperature": 0.6})
    with pytest.raises(CheckpointError, match="started from a model, and only runs from scratch can be repeated"):
        repeat_run(tmp_path / "copy", run)

    again = start_run(tmp_path / "again", [text_file], init=run.path, settings={"batch_size": 2})
    assert [e["model"] for e in read_log(again) if e["event"] == "initialized"] == [str(best_checkpoint(run.path))]
    epoch = open_batches(again.data, again.settings).epoch_at
    assert epoch(again.settings.steps - 1) < 1 <= epoch(again.settings.steps)


def test_what_init_refuses(base, tmp_path, tiny_config, tiny_tokenizer, make_text):
    start = partial(start_run, tmp_path / "run", settings=QUICK)
    conversation = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The cat."}]
    talk = tmp_path / "talk.jsonl"
    talk.write_text((json.dumps({"messages": conversation}) + "\n") * 60)
    other = tmp_path / "other.txt"
    other.write_text(make_text(900))
    prepare(DataOptions([other]), train_tokenizer([make_text(900)], 280), tmp_path / "prepared")
    for error, message, data, options in (
        (DataError, "which .*model formats in another way .try: mlxlm finetune", talk, {}),
        (DataError, "prepared was prepared with another tokenizer", tmp_path / "prepared", {}),
        (ConfigError, "model has its own architecture and tokenizer", other, {"config": tiny_config}),
        (ConfigError, "model has its own architecture and tokenizer", other, {"tokenizer": base}),
        (CheckpointError, "there is no model 'nowhere'", other, {"init": "nowhere"}),
    ):
        with pytest.raises(error, match=message):
            start([data], **{"init": base, **options})
    assert not (tmp_path / "run").exists()
    # A model without a chat template gets ours.
    plain = write_folder(tmp_path / "plain", random_decoder(tiny_config), tiny_config, tiny_tokenizer)
    run = start([talk], init=plain)
    assert (
        open_tokenizer(run.path).chat_template == CHAT_TEMPLATE
        and run.config.eos_token_id[-1] == (tiny_tokenizer.special_tokens["<|end|>"])
    )


def test_the_commands(stopped, base, text_file, tmp_path):
    code, _, err = mlxlm("pretrain", "--resume", stopped.path, "--steps", 17)
    assert code == 0 and "follows the cosine schedule of the new length, from 0.00" in err and "steps 16 to 17" in err
    few = ["--steps", 2, "--batch-size", 2, "--max-seq-length", 16, "--eval-tokens", 100]
    code, out, err = mlxlm("pretrain", text_file, "--init", base, "--out", tmp_path / "new", *few)
    assert code == 0 and out == f"{tmp_path / 'new'}\n" and "step 0: validation" in err
    for code, message, arguments in (
        (1, "run has 17 steps already .try: --steps 34", ["--resume", stopped.path, "--tokens", 100]),
        (
            1,
            "not its peak .try: .*--lr-schedule constant",
            ["--resume", stopped.path, "--decay-steps", 3, "--out", "x"],
        ),
        (2, "--out is missing", ["--resume", stopped.path, "--decay-steps", 3]),
        (2, "--steps can't be given", ["--resume", stopped.path, "--decay-steps", 3, "--out", "x", "--steps", 9]),
        (2, "--decay-steps needs --resume", [text_file, "--out", "x", "--decay-steps", 3]),
        (2, "--preset would have no effect", [text_file, "--out", "x", "--init", base, "--preset", "1m"]),
        (2, "--vocab-size would have no effect", [text_file, "--out", "x", "--init", base, "--vocab-size", 300]),
        (2, "--set would have no effect", [text_file, "--out", "x", "--init", base, "--set", "norm=layer"]),
    ):
        found, _, err = mlxlm("pretrain", *arguments)
        assert found == code and re.search(message, err), err

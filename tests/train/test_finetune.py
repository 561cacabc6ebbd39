"""Fine-tuning on conversations: the first checkpoint, the loss mask, long conversations, resume, the command."""

import json
import re
import shutil
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mlxlm.backend.mlx import mx
from mlxlm.chat.session import Chat
from mlxlm.chat.sft_encoder import SFTEncoder
from mlxlm.checkpoint import load_model, load_weights
from mlxlm.cli import render
from mlxlm.cli.training import print_forecast, print_summary
from mlxlm.data import Chunk, DataOptions, Manifest, TokenDataset, TrainBatches
from mlxlm.generation import GenerationConfig, load
from mlxlm.kernels import cross_entropy
from mlxlm.train import (
    Budget,
    Finished,
    Run,
    Started,
    Step,
    Stopped,
    TrainSettings,
    Validation,
    open_base_model,
    repeat_run,
    start_finetune,
)
from mlxlm.train.finetune import FINETUNE_SETTINGS, _windows
from mlxlm.train.optimizers import default_learning_rate
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.quantized_weights import quantized_weights
from tests.run_command import run as run_mlxlm
from tests.small_models import random_decoder, write_folder
from tests.train.training_runs import contents, finish

QUICK = {"steps": 6, "batch_size": 2, "max_seq_length": 48, "learning_rate": 3e-3, "eval_every": 3, "save_every": 3}


@pytest.fixture(scope="session")
def base(tmp_path_factory, tiny_config, tiny_tokenizer):
    """An untrained model as a folder, its tokenizer without a template."""
    return write_folder(
        tmp_path_factory.mktemp("base") / "model", random_decoder(tiny_config, seed=4), tiny_config, tiny_tokenizer
    )


@pytest.fixture
def talks(tmp_path, make_text):
    """Forty conversations: a line as the question, the next one as the answer."""
    lines = iter(make_text(2000).splitlines())
    rows = []
    for _, question, answer in zip(range(40), lines, lines, strict=False):
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}) + "\n")
    (tmp_path / "talks.jsonl").write_text("".join(rows))
    return tmp_path / "talks.jsonl"


@pytest.fixture
def new_run(tmp_path, base, talks):
    def make(name, model=base, sources=(talks,), **options):
        names = {f.name for f in fields(TrainSettings)}
        changes = {k: options.pop(k) for k in list(options) if k in names}
        settings = {k: v for k, v in {**QUICK, **changes}.items() if v is not None}
        budget = Budget(**{k: options.pop(k) for k in ("epochs", "minutes") if k in options})
        opened, tokenizer = open_base_model(model)
        encoder = SFTEncoder(tokenizer, opened.config.eos_token_ids | {tokenizer.eos_token_id})
        data = DataOptions(sources, **options)
        return start_finetune(tmp_path / name, opened, tokenizer, encoder, data, budget=budget, settings=settings)

    return make


def test_first_checkpoint_is_the_base_model(new_run, base, tiny_tokenizer):
    run = new_run("run", learning_rate=1e-2)
    found, wanted = load_weights(run.path / "checkpoints/step-0"), load_weights(base)
    assert set(found) == set(wanted) and all(mx.array_equal(found[name], wanted[name]) for name in wanted)
    end = tiny_tokenizer.special_tokens["<|end|>"]
    assert run.config.eos_token_id == [tiny_tokenizer.eos_token_id, end] or run.config.eos_token_id == end
    assert run.config.max_position_embeddings == 128  # the model's own
    tuned = load(run.path)
    assert end in tuned.eos_token_ids and "<|{{ message.role }}|>" in tuned.tokenizer.chat_template
    events = finish(run, resume=True)
    assert isinstance(events[0], Started) and events[0].step == 0
    assert isinstance(events[1], Validation) and events[1].step == 0
    assert json.loads((run.path / "log.jsonl").read_text().splitlines()[2])["step"] == 0
    before, after = events[1].loss, [e for e in events if isinstance(e, Validation)][-1].loss
    assert before == pytest.approx(np.log(300), abs=0.2) and after < before - 0.1
    assert isinstance(events[-1], Finished)


def test_quantized_model_is_trained_in_float32(new_run, base, tiny_tokenizer, tmp_path):
    model, config = load_model(base)
    weights, quantization = quantized_weights(model, 4, 32)
    folder = write_folder(tmp_path / "4bit", weights, config, tiny_tokenizer, quantization=quantization)
    run = new_run("run", model=folder, steps=1)
    assert run.config.quantization is None
    found = load_weights(run.path / "checkpoints/step-0")
    for name, value in found.items():
        wanted, layer = weights[name], name.removesuffix("weight")
        if f"{layer}scales" in weights:
            scales, biases = (weights[f"{layer}{part}"].astype(mx.float32) for part in ("scales", "biases"))
            wanted = mx.dequantize(wanted, scales, biases, 32, 4)
        assert value.dtype == mx.float32 and mx.array_equal(value, wanted), name
    assert not mx.array_equal(found["model.embed_tokens.weight"], load_weights(base)["model.embed_tokens.weight"])


def test_sampling_options_of_the_base_model_stay(new_run, base, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "example_prompt": "Hello!"}
    (folder / "generation_config.json").write_text(json.dumps(values))
    run = new_run("run", model=folder, steps=1)
    assert load(run.path).generation_config == GenerationConfig({"temperature": 0.6, "top_p": 0.9})
    assert load(new_run("other", steps=1).path).generation_config == GenerationConfig()


def test_loss_is_that_of_the_answers(new_run, base):
    """The loss of the first step equals that of each conversation by itself, with the loss mask."""
    run = new_run("run", steps=1, dtype="float32")
    [first] = [e for e in finish(run, resume=True) if isinstance(e, Step)]
    data = TokenDataset.open(run.data, "train")
    form = {"packing": "best-fit", "document_mask": True, "mask_prompt": True}
    tokens, segment_ids, weights = TrainBatches(data, 2, 48, 0, **form).batch(0)
    model, _ = load_model(base)
    model.set_dtype(mx.float32)
    total = 0.0
    for row, numbers, counts in zip(tokens, segment_ids, weights, strict=True):
        for number in range(numbers[-1] + 1):
            [places] = np.nonzero(numbers == number)
            inputs, targets = mx.array(row[places][None]), mx.array(row[places + 1][None])
            losses = np.array(cross_entropy(model(inputs), targets))[0]
            total += (losses * counts[places]).sum()
    assert 0 < weights.sum() < weights.size
    assert first.loss == pytest.approx(total / weights.sum(), rel=1e-5)


def test_resume_is_bit_equal(new_run):
    changes = {"dropout": 0.1, "grad_accumulation_steps": 2}
    whole, parts = new_run("whole", **changes), new_run("parts", **changes)
    finish(whole, resume=True)
    assert finish(parts, resume=True, stop_at=4)[-1] == Stopped(4, parts.path)
    finish(Run.open(parts.path), resume=True)
    assert contents(whole.path / "checkpoints/step-6") == contents(parts.path / "checkpoints/step-6")


def test_defaults(new_run, tiny_config):
    """Three epochs of at least 8 steps, and a fifth of the learning rate of pretraining."""
    run = new_run("run", steps=None, batch_size=None, learning_rate=None, eval_every=None)
    rows = TrainBatches(
        TokenDataset.open(run.data, "train"), 1, 48, 0, packing="best-fit", document_mask=True, mask_prompt=True
    ).rows
    assert run.settings.batch_size == max(1, rows // 8) < 16
    assert run.settings.steps == -(-3 * rows // run.settings.batch_size)
    assert run.settings.eval_every == run.settings.steps // 10
    assert run.settings.learning_rate == pytest.approx(default_learning_rate(tiny_config) / 5)
    assert run.settings.packing == "best-fit" and run.settings.document_mask and run.settings.mask_prompt


def test_batch_size_with_a_time_limit(new_run, monkeypatch):
    """A row of 48 tokens takes 0.24 s: half a minute has 125 of them, fewer than the 200 steps of a useful run."""
    monkeypatch.setattr("mlxlm.train.finetune.seconds_per_token", lambda *_arguments, **_options: 0.005)
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 60 * budget.minutes)
    timed = new_run("timed", steps=None, batch_size=None, eval_every=None, save_every=None, minutes=0.5).settings
    assert timed.batch_size == 1 < new_run("run", steps=None, batch_size=None).settings.batch_size
    assert timed.eval_every is None and timed.save_every == 0 and timed.warmup_steps is None


def test_saving_the_base_model_counts_in_the_time_limit(new_run, monkeypatch):
    monkeypatch.setattr("mlxlm.train.budget.Budget.seconds_left", lambda budget: 3.0)  # however slow the machine is
    run = new_run("run", steps=None, minutes=0.05)
    state = json.loads((run.path / "checkpoints/step-0/state.json").read_text())
    assert state["elapsed"] > 0


def test_warmup_without_steps(new_run):
    assert new_run("run", steps=None, batch_size=None, warmup_steps=2).settings.warmup_steps == 2


def test_start_errors(new_run, tmp_path, base, talks, monkeypatch):
    new_run("run")
    with pytest.raises(CheckpointError, match="run already exists .try: mlxlm finetune --resume"):
        new_run("run")
    with pytest.raises(ConfigError, match="epochs and steps each say"):
        new_run("other", epochs=2.0)
    with pytest.raises(ConfigError, match="epochs is -1"):
        new_run("other", steps=None, epochs=-1.0)
    with pytest.raises(ConfigError, match="200 tokens are longer than the model's context .try: `max_seq_length=128`"):
        new_run("other", max_seq_length=200)
    with monkeypatch.context() as patch:
        patch.setattr("mlxlm.backend.device.device_memory", lambda: 1000)
        patch.setattr("mlxlm.plan.advice.preset_names", lambda: pytest.fail("there is no preset to choose"))
        with pytest.raises(ConfigError, match="of memory, .* are available .try: a smaller model"):
            new_run("other")
    (tmp_path / "text.jsonl").write_text('{"text": "no talk"}\n')
    with pytest.raises(DataError, match="text.jsonl, line 1 is a text, not a conversation"):
        new_run("other", sources=[tmp_path / "text.jsonl"])
    (tmp_path / "one.jsonl").write_text(talks.read_text().splitlines()[0])
    with pytest.raises(DataError, match="no answer is held out for validation .try: more answers, `val"):
        new_run("other", sources=[tmp_path / "one.jsonl"])
    empty = rows_of(tmp_path / "empty.jsonl", [["?", ""]])
    with pytest.raises(DataError, match="no answer is held out for validation"):
        new_run("other", validation=[empty])
    with pytest.raises(DataError, match="no answer is held out .*a larger `validation_fraction`"):
        new_run("other", validation_fraction=0)
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob(".other*"))


def rows_of(path, conversations):
    """A file of conversations, each a list of what is said in turns."""
    with path.open("w") as file:
        for turns in conversations:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def test_on_bad_input_skip(new_run, tmp_path, talks):
    lines = talks.read_text().splitlines()
    bad = ['{"text": "no talk"}', '{"messages": [{"role": "user", "content": "a?"}]}', "not JSON"]
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([lines[0], *bad, *lines[1:]]))
    with pytest.raises(DataError, match="bad.jsonl, line 2 is a text, not a conversation .*, or `on_bad_input=skip`"):
        new_run("run", sources=[path])
    run, clean = new_run("run", sources=[path], on_bad_input="skip"), new_run("clean")
    found, wanted = Manifest.read(run.data), Manifest.read(clean.data)
    assert found.skipped == 3 and logged(run)["conversations"] == 40 == found.num_conversations
    assert found.train == wanted.train and found.validation == wanted.validation


def logged(run):
    return next(e for e in map(json.loads, run.log_file.read_text().splitlines()) if e["event"] == "conversations")


def test_conversations_are_held_out_with_all_their_pieces(new_run, tmp_path):
    for count, held in ((6, 2), (30, 9)):
        file = rows_of(tmp_path / f"{count}.jsonl", [[f"{i} ?", "the cat sat on the mat"] * 5 for i in range(count)])
        run = new_run(f"run {count}", sources=[file], validation_fraction=0.3)
        splits = {name: TokenDataset.open(run.data, name) for name in ("train", "validation")}
        whole = logged(run)["pieces"] // count
        assert whole > 1 and splits["validation"].documents == held * whole
        numbers = {}
        for name, data in splits.items():
            text = open_base_model(run.path)[1].decode(data.slice(0, len(data)).tolist(), skip_special_tokens=False)
            numbers[name] = set(re.findall(r"<\|user\|>(\d+)", text))
        assert not numbers["train"] & numbers["validation"] and len(numbers["validation"]) == held


def learned_in_an_epoch(run):
    """The loss mask, and how often each token is a target in an epoch."""
    data = TokenDataset.open(run.data, "train")
    batches = TrainBatches(data, 1, run.settings.max_seq_length, 0, **FINETUNE_SETTINGS)
    counts, loss_mask = np.zeros(len(data), int), data.loss_mask(0, len(data))
    for row in range(batches.rows):
        spans = batches._packings[0].spans(row)
        targets = np.concatenate([np.arange(start, stop) for start, stop, _ in spans])[1:]
        tokens, segment_ids, weights = batches.batch(row)
        assert np.array_equal(tokens[0, 1 : len(targets) + 1], data.slice(0, len(data))[targets])
        assert not weights[0, len(targets) :].any()
        counts[targets] += weights[0, : len(targets)].astype(int)
    return loss_mask, counts


def test_every_answer_is_learned_once_in_an_epoch(new_run, tmp_path):
    """In conversations that fit a row, in longer ones, and in answers longer than a row."""
    turns = ["the cat?", "a mat"] * 12
    talks = [["a?", "the cat sat"], ["a?", "b" * 100], ["q" * 100, "b"], turns, ["a?", "b" * 30, "q" * 60, "c" * 20]]
    talks *= 3
    held = rows_of(tmp_path / "held.jsonl", [["a?", "b"]])
    run = new_run("run", sources=[rows_of(tmp_path / "talks.jsonl", talks)], validation=[held])
    assert logged(run) == {**logged(run), "conversations": 16, "split": 3, "cut": 9, "suggested_seq_length": 128}
    loss_mask, counts = learned_in_an_epoch(run)
    assert np.array_equal(counts, loss_mask)
    tokenizer = open_base_model(run.path)[1]
    wanted = sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for talk in talks for text in talk[1::2])
    assert loss_mask.sum() == wanted  # with <|end|>
    data = TokenDataset.open(run.data, "train")
    starts, stops = data.starts.bounds(np.arange(data.documents))
    assert (stops - starts).max() <= 49
    tokens = logged(run)["tokens"]
    assert tokens == len(data) + len(TokenDataset.open(run.data, "validation"))
    learned = wanted + len(tokenizer.encode("b", add_special_tokens=False)) + 1
    [text] = describe(run)
    assert text == (
        f"16 conversations of {tokens:,} tokens, {learned:,} learned ({learned / tokens:.0%}) and "
        f"{tokens - learned:,} masked: 12 are longer than a row of 48 tokens; 3 of them are split between turns; 9 are "
        "split inside an answer or its question, which continues in the next row; each epoch has every answer to its "
        "end (try: --max-seq-length 128)"
    )
    run = new_run("short", sources=[held] * 5)
    assert re.fullmatch(r"5 conversations of .* masked, each whole in a row of 48 tokens", *describe(run))


@given(loss_mask=st.lists(st.booleans(), min_size=2, max_size=200).filter(any), room=st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_windows_of_a_long_conversation(loss_mask, room):
    """Each target is in one window, with half a row of context or all there is. What fits is not split."""
    chunk = Chunk(np.arange(len(loss_mask)), 77, True, np.array([False, *loss_mask[1:]], np.uint8))
    if not chunk.loss_mask.any():
        return
    windows = list(_windows(chunk, room))
    assert len(windows) == 1 or np.flatnonzero(chunk.loss_mask)[-1] >= room
    found = []
    for window in windows:
        assert len(window.ids) <= room and window.starts_document
        assert np.array_equal(window.ids, np.arange(window.ids[0], window.ids[-1] + 1))
        places = np.flatnonzero(window.loss_mask)
        assert window.ids[0] == 0 or places[0] >= room // 2
        found += window.ids[places].tolist()
    assert found == np.flatnonzero(chunk.loss_mask).tolist()
    assert [w.text_bytes for w in windows] == [77] + [0] * (len(windows) - 1)


def describe(run):
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "say", lines.append)
        print_forecast(run)
    return lines


def test_command_that_continues_the_run(new_run, tmp_path, capsys):
    run = new_run("a run")
    ending = finish(run, resume=True, stop_at=1)[-1]
    print_summary(ending, run)
    assert f"mlxlm finetune --resume '{run.path}'" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="started from a model"):
        repeat_run(tmp_path / "copy", run)


def test_the_command_shows_what_is_learned(base, tmp_path, monkeypatch):
    rows = [{"question": "a\nb?", "answer": "cat"}, {"conversations": [{"from": "human", "value": "?"}]}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0], rows[0]]))
    options = ["--show", "2", "--on-bad-input", "skip"]
    code, out, _ = run_mlxlm("finetune", base, data, *options)
    first, second = (f"rows.jsonl, line {n} (question and answer)" for n in (1, 3))
    assert code == 0 and first in out and second in out and "line 4" not in out and "<|user|>·" in out
    learned = re.findall(r"\[([^]]+)\]", out.partition(second)[0])
    assert "".join(learned) == "cat<|end|>" and "\\n\n" in out
    with monkeypatch.context() as patch:  # a terminal
        patch.setattr(render, "stdout_console", lambda: Console(force_terminal=True, color_system="standard"))
        colored = run_mlxlm("finetune", base, data, *options)[1]
        patch.setenv("NO_COLOR", "1")
        assert "[<|end|>]" in run_mlxlm("finetune", base, data, *options)[1]
    assert "[<|end|>]" not in colored and re.search(r"\x1b\[30;(42|102)m<\|end\|>", colored)
    code, _, err = run_mlxlm("finetune", base, data, "--show", "1")
    assert code == 0 and run_mlxlm("finetune", "--resume", "run", "--show", "1")[0] == 2
    data.write_text("{}")
    code, _, err = run_mlxlm("finetune", base, data, "--show", "1")
    assert code == 1 and 'line 1 has no known format; its fields are none (try: records with "chosen"' in err


def test_the_command(tmp_path, base, talks):
    command = partial(run_mlxlm, "finetune")
    out = tmp_path / "tuned"
    options = ["--steps", "4", "--batch-size", "2", "--max-seq-length", "48"]
    code, out_text, err = command(base, talks, "--out", out, *options)
    assert code == 0 and out_text == f"{out}\n" and "step 0: validation" in err
    assert "the context of this model is 128 tokens: mlxlm chat --context-overflow drop" in err
    chat = Chat(load(out), max_tokens=5, temperature=0.0)
    "".join(part.text for part in chat.ask("the cat"))
    assert chat.messages[-1].role == "assistant" and len(chat.messages[-1].ids) <= 5
    code, _, err = command("--resume", out)
    assert code == 0 and "had already finished its 4 steps" in err
    for wrong in (["--resume", out, "--seed", "3"], ["--resume", out, base], [base, "--out", tmp_path / "x"]):
        assert command(*wrong)[0] == 2
    idle = ["--validation", talks, "--validation-fraction", "0.1"]
    code, _, err = command(base, talks, "--out", tmp_path / "x", *idle)
    assert code == 2 and "--validation-fraction would have no effect" in err

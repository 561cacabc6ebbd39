"""`start_run`: what it checks first, and the run that it makes."""

import json
from itertools import count
from types import SimpleNamespace

import pytest

from mlxlm.backend.mlx import ON_CPU
from mlxlm.data import DataOptions, Manifest, read_texts, total_bytes
from mlxlm.data.preparation import training_texts
from mlxlm.tokenizer import load
from mlxlm.tokenizer import train as train_tokenizer
from mlxlm.train import Budget, TokenizerOptions, start, start_run
from mlxlm.train.events import TextLimited
from mlxlm.train.objectives import open_batches
from mlxlm.train.optimizers import default_weight_decay
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.train.training_runs import QUICK, read_log


def test_existing_folder(new_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="run already exists .*--resume .*another `out`"):
        new_run("run")
    assert (tmp_path / "run/mine.txt").read_text() == "precious"


def test_text_shorter_than_a_sequence(tmp_path, tiny_config, tokenizer_folder):
    (tmp_path / "short.txt").write_text("the cat sat on a mat. " * 8)
    with pytest.raises(DataError, match="less than one sequence of 64 .*`max_seq_length"):
        start_run(
            tmp_path / "run", [tmp_path / "short.txt"], tiny_config, tokenizer=tokenizer_folder,
            settings={**QUICK, "max_seq_length": 64},
        )  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["short.txt"]


def test_settings_are_checked_before_data_is_read(tmp_path, text_file, tiny_config, tokenizer_folder):
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


@pytest.mark.skipif(not ON_CPU, reason="about the CPU backend")
def test_bfloat16_on_a_cpu(tmp_path, text_file, tiny_config):
    with pytest.raises(ConfigError, match="bfloat16 products many times slower than float32"):
        start_run(tmp_path / "run", [text_file], tiny_config, settings={"steps": 1, "dtype": "bfloat16"})


def test_model_larger_than_memory(tmp_path, text_file, tiny_config):
    huge = tiny_config.with_changes(hidden_size=2**15, intermediate_size=2**17, num_hidden_layers=100, head_dim=64)
    with pytest.raises(ConfigError, match="training takes about .* are available .*smaller model"):
        start_run(tmp_path / "run", [text_file], huge, tokenizer=TokenizerOptions(vocab_size=300), settings=dict(QUICK))
    assert not (tmp_path / "run").exists()


def test_context_length_is_the_sequence_length(new_run):
    assert new_run("run").config.max_position_embeddings == 32


def test_conversations_make_a_chat_model(tmp_path, tiny_config, tokenizer_folder):
    rows = [{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The cat."}]}] * 60
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = start_run(
        tmp_path / "run", [tmp_path / "chat.jsonl"], tiny_config, tokenizer=tokenizer_folder, settings=dict(QUICK)
    )
    tokenizer = load(run.path)
    assert "<|assistant|>" in tokenizer.chat_template
    assert run.config.eos_token_id == [tokenizer.eos_token_id, tokenizer.special_tokens["<|end|>"]]


@pytest.mark.parametrize("documents", [60, 1])
def test_tokenizer_is_trained_without_validation_text(tmp_path, make_text, tiny_config, documents):
    text = make_text(4000)
    size = len(text) // documents
    rows = (json.dumps({"text": text[i * size : (i + 1) * size]}) + "\n" for i in range(documents))
    sources = [tmp_path / "text.jsonl"]
    sources[0].write_text("".join(rows))
    settings = {**QUICK, "steps": 1, "seed": 1}
    data = DataOptions(sources, validation_fraction=0.2)
    tokenizer = TokenizerOptions(vocab_size=300)
    run = start_run(tmp_path / "run", data, tiny_config, tokenizer=tokenizer, settings=settings)
    wanted = train_tokenizer(training_texts(data, seed=1), 300)
    assert wanted.fingerprint != train_tokenizer(read_texts(sources), 300).fingerprint
    assert load(run.path).fingerprint == wanted.fingerprint


def test_weight_decay_by_epochs(tmp_path, text_file, tiny_config, tokenizer_folder):
    assert [default_weight_decay("adamw", passes) for passes in (0.1, 16, 16.1, 100)] == [0.1, 0.1, 1, 1]
    assert [default_weight_decay("muon", passes) for passes in (5, 5.1)] == [0.1, 1]
    assert default_weight_decay("adafactor", 100) == 0
    for name, steps, decay in (("few", 1, 0.1), ("many", 99, 1.0)):
        settings = {"steps": steps, "batch_size": 32, "max_seq_length": 64, "learning_rate": 1e-3}
        run = start_run(tmp_path / name, [text_file], tiny_config, tokenizer=tokenizer_folder, settings=settings)
        assert run.settings.weight_decay == decay


def test_padding_does_not_count_as_epochs(tmp_path, tiny_config, tokenizer_folder):
    """Rows that are half padding are not twice as many passes."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"word " * 24}{n}"}}\n' for n in range(200)))
    settings = {"batch_size": 8, "max_seq_length": 128, "learning_rate": 1e-3, "steps": 250, "packing": "best-fit"}
    source = tmp_path / "text.jsonl"
    run = start_run(tmp_path / "run", [source], tiny_config, tokenizer=tokenizer_folder, settings=settings)
    manifest, batches = Manifest.read(run.data), open_batches(run.data, run.settings)
    assert batches.epoch_at(250) < 16 < 250 * 8 * 128 / manifest.train.tokens
    assert run.settings.weight_decay == 0.1


def test_a_time_limit_limits_the_text(tmp_path, tiny_config, tokenizer_folder, make_text, monkeypatch):
    """A sample of 10 kB takes a second, so 15 kB can be prepared in 15% of ten seconds."""
    (tmp_path / "long.txt").write_text(make_text(70_000), encoding="utf-8")
    clock, prepared = count(), []

    def prepare_sample(data, folder):
        prepared.append(data.fraction)

    monkeypatch.setattr(start, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(start, "_SAMPLE_BYTES", 10_000)
    monkeypatch.setattr(start, "_MIN_BYTES_PER_SECOND", 1)
    data = DataOptions([tmp_path / "long.txt"])
    total = total_bytes(data.sources)
    limited, event = start.limit_text(data, 10.0, prepare_sample)
    assert prepared == [10_000 / total] and limited.fraction * total == pytest.approx(15_000)
    assert event == TextLimited(15_000, total)
    for seconds in (1e6, 1e3):  # there is no need to measure, or it finds that there is time for all of it
        assert start.limit_text(data, seconds, prepare_sample) == (data, None)
    assert len(prepared) == 2

    monkeypatch.setattr(Budget, "seconds_left", lambda self: 60.0)
    run = start_run(
        tmp_path / "run", data, tiny_config, tokenizer=tokenizer_folder, minutes=1, settings={"max_seq_length": 32}
    )
    assert Manifest.read(run.data).train.bytes < total / 2
    assert read_log(run)[0]["event"] == "text_limited"

"""Runs with packing, document masks and weighted sources: equal to the bit after a resume; no reader is left."""

import json
import threading
from contextlib import closing

import pytest

from mlxlm.data import DataOptions, TrainBatches, read_texts, training_texts
from mlxlm.experiments.sweep import prepare_shared_data
from mlxlm.tokenizer import load
from mlxlm.tokenizer import train as train_tokenizer
from mlxlm.train import Run, Started, Step, TokenizerOptions, start_run, train
from mlxlm.utils.errors import DataError
from tests.train.training_runs import QUICK, contents, finish


@pytest.fixture
def new_run(tmp_path, make_text, tiny_config, tokenizer_folder):
    """On two sources of short documents."""
    lines = make_text(6000).splitlines()
    for name, part in (("a", lines[::2]), ("b", lines[1::2])):
        rows = (json.dumps({"text": " ".join(part[i : i + 3])}) + "\n" for i in range(0, len(part), 3))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    sources = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]

    def make(name: str, weights=None, **settings) -> Run:
        values = {**QUICK, "steps": 12, "save_every": 6, "eval_every": 6, **settings}
        data = DataOptions(sources, weights)
        return start_run(tmp_path / name, data, tiny_config, tokenizer=tokenizer_folder, settings=values)

    return make


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ([3, 1], {"packing": "best-fit", "document_mask": True}),
        (None, {"document_mask": True, "grad_accumulation_steps": 2}),
    ],
)
def test_resume_is_equal_to_the_bit(new_run, weights, settings):
    whole, parts = new_run("whole", weights, **settings), new_run("parts", weights, **settings)
    started = finish(whole)[0]
    assert isinstance(started, Started)
    finish(parts, stop_at=5)
    finish(Run.open(parts.path), resume=True)
    assert contents(whole.path / "checkpoints/step-12") == contents(parts.path / "checkpoints/step-12")
    rows = 12 * 4 * settings.get("grad_accumulation_steps", 1)
    if weights:
        assert (
            set(started.epochs_by_source) == {"a.jsonl", "b.jsonl"}
            and started.dropped_fraction == 0 < started.padding < 0.1
        )
        assert (
            started.epochs_by_source["a.jsonl"] > 2 * started.epochs_by_source["b.jsonl"]
        )  # 3 : 1, the same number of documents
    else:
        assert (
            started.epochs_by_source == {"train": started.epochs}
            and started.padding == 0 < started.dropped_fraction < 0.02
        )
        assert started.epochs == pytest.approx(rows * 32 / whole_tokens(whole), rel=0.05)


@pytest.mark.parametrize("documents", [60, 1])
def test_a_tokenizer_is_trained_without_what_is_held_out(tmp_path, make_text, tiny_config, documents):
    text = make_text(4000)
    size = len(text) // documents
    rows = (json.dumps({"text": text[i * size : (i + 1) * size]}) + "\n" for i in range(documents))
    sources = [tmp_path / "text.jsonl"]
    sources[0].write_text("".join(rows))
    settings = {**QUICK, "steps": 1, "seed": 1}
    data = DataOptions(sources, validation_fraction=0.2)
    tokenizer = TokenizerOptions(vocab_size=300)
    shared, _ = prepare_shared_data(tmp_path, data, tokenizer, seed=1)
    run = start_run(tmp_path / "run", data, tiny_config, tokenizer=tokenizer, settings=settings)
    wanted = train_tokenizer(training_texts(DataOptions(sources, validation_fraction=0.2), seed=1), 300)
    assert wanted.fingerprint != train_tokenizer(read_texts(sources), 300).fingerprint
    assert load(run.path).fingerprint == shared.fingerprint == wanted.fingerprint


def whole_tokens(run: Run) -> int:
    return json.loads((run.data / "manifest.json").read_text())["train"]["tokens"]


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


def test_a_run_that_is_left_leaves_no_reader(new_run):
    run = new_run("run")
    with closing(train(run, load(run.path))) as events:
        for event in events:
            if isinstance(event, Step):
                assert readers()
                break
    assert not readers()


def test_an_error_of_the_reader_is_the_run_s(new_run, monkeypatch):
    run, real = new_run("run"), TrainBatches.batch

    def fails(self, index):
        if index == 4:
            raise DataError("the disk has gone")
        return real(self, index)

    monkeypatch.setattr(TrainBatches, "batch", fails)
    seen = []
    with pytest.raises(DataError, match="the disk has gone"):
        for event in train(run, load(run.path)):
            seen += [event.step] if isinstance(event, Step) else []
    assert seen == [1, 2, 3, 4] and not readers()

"""Batches of runs with packing, document masks and weighted sources."""

import json

import pytest

from mlxlm.data import DataOptions
from mlxlm.train import Run, Started, start_run
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
def test_resume_is_bit_equal(new_run, weights, settings):
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


def whole_tokens(run: Run) -> int:
    return json.loads((run.data / "manifest.json").read_text())["train"]["tokens"]

"""Runs on a tiny model and a short text."""

import json
import shutil
from pathlib import Path

import pytest

from mlxlm.train import Run, start_run
from tests.train.training_runs import QUICK, finish


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save(folder)
    return folder


@pytest.fixture
def new_run(tmp_path, text_file, tiny_config, tokenizer_folder):
    def make(name: str, data=None, config=None, **settings) -> Run:
        model = tiny_config.with_changes(**(config or {}))
        values = {**QUICK, **settings}
        return start_run(tmp_path / name, data or [text_file], model, tokenizer=tokenizer_folder, settings=values)

    return make


@pytest.fixture
def two_sources(tmp_path, make_text):
    """Two files of the same number of short documents."""
    lines = make_text(6000).splitlines()
    for name, part in (("a", lines[::2]), ("b", lines[1::2])):
        rows = (json.dumps({"text": " ".join(part[i : i + 3])}) + "\n" for i in range(0, len(part), 3))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory, make_text, tiny_config, tokenizer_folder) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "text.txt").write_text(make_text(4000), encoding="utf-8")
    run = start_run(folder / "run", [folder / "text.txt"], tiny_config, tokenizer=tokenizer_folder, settings=QUICK)
    finish(run, stop_at=15)
    return run.path


@pytest.fixture
def stopped(stopped_run, tmp_path) -> Run:
    """A run with checkpoints of steps 10 and 15, of 20."""
    shutil.copytree(stopped_run, tmp_path / "run")
    return Run.open(tmp_path / "run")

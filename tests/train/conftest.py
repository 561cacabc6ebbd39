"""Runs on a tiny model and a short text."""

from pathlib import Path

import pytest

from mlxlm.train import Run, start_run
from tests.train.training_runs import QUICK


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.save(folder)
    return folder


@pytest.fixture
def new_run(tmp_path, text_file, tiny_config, tokenizer_folder):
    def make(name: str, **settings) -> Run:
        values = {**QUICK, **settings}
        return start_run(tmp_path / name, [text_file], tiny_config, tokenizer=tokenizer_folder, settings=values)

    return make

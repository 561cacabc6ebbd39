"""A model folder, valid checkpoints of every kind, and a child process that opens damaged ones."""

from __future__ import annotations

import pytest

from tests.checkpoint.child_process import ChildProcess
from tests.checkpoint.samples import Sample, make
from tests.small_models import random_decoder, write_folder


@pytest.fixture
def model_dir(tmp_path, tiny_config, tiny_tokenizer):
    """The folder of a small model with a tokenizer."""
    folder = write_folder(tmp_path / "model", random_decoder(tiny_config), tiny_config)
    tiny_tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def valid_sample(tmp_path_factory):
    """`valid_sample(kind)`: a valid checkpoint, made once."""
    samples: dict[str, Sample] = {}

    def sample(kind: str) -> Sample:
        if kind not in samples:
            samples[kind] = make(kind, tmp_path_factory.mktemp("valid") / kind)
        return samples[kind]

    return sample


@pytest.fixture(scope="session")
def child():
    """The child process that opens damaged checkpoints."""
    process = ChildProcess()
    yield process
    process.close()

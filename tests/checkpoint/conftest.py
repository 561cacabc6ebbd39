"""A model folder, valid checkpoints of every kind, and a child process that opens damaged ones."""

from __future__ import annotations

import json

import pytest

from mlxlm.backend.mlx import tree_flatten
from mlxlm.checkpoint import save_weights
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from tests.checkpoint.child_process import ChildProcess
from tests.checkpoint.samples import Sample, make


@pytest.fixture
def model_dir(tmp_path, tiny_config, tiny_tokenizer):
    """The folder of a small model with a tokenizer."""
    model = Decoder(tiny_config)
    model.init_weights(0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    save_weights(folder, dict(tree_flatten(model.parameters())))
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

"""Fixtures of the command-line tests."""

import os
import shutil

import pytest

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.cli.main import _run
from tests.cli.helpers import QUICK
from tests.generation.conftest import lm  # noqa: F401
from tests.small_models import arrays_of, random_decoder, write_folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """`mlxlm quantize` generates a few tokens instead of some seconds of them, and the plot is empty."""
    monkeypatch.setattr("mlxlm.quantize.report.SECONDS", 0.0)
    monkeypatch.setattr("mlxlm.quantize.pipeline.plot_quantization", lambda report, path: path.touch())


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, make_text):
    """A finished run, which no test changes."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "text.txt").write_text(make_text(4000), encoding="utf-8")
    assert _run(["pretrain", str(folder / "text.txt"), "--preset", "0.3m", "--out", str(folder / "run"), *QUICK]) == 0
    return folder / "run"


@pytest.fixture
def model(tmp_path, tiny_config, tiny_tokenizer):
    """A small float16 model in the folder `model`."""
    config = tiny_config.with_changes(hidden_size=64, head_dim=16, intermediate_size=96, vocab_size=320)
    weights = {name: weight.astype(mx.float16) for name, weight in arrays_of(random_decoder(config)).items()}
    return write_folder(tmp_path / "model", weights, config, tiny_tokenizer)


@pytest.fixture
def home(tmp_path):
    """The environment of a user who has no models and no network."""
    cache = tmp_path / "home/.cache/mlxlm"
    cache.mkdir(parents=True)
    for library in platform.cache_folder().glob("*.so"):  # so that commands don't compile them again
        shutil.copy(library, cache)
    unset = ("XDG_CACHE_HOME", "OLLAMA_MODELS", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "HF_HUB_CACHE", "PYTHONPATH")
    return {
        **{name: value for name, value in os.environ.items() if name not in unset},
        "HOME": str(tmp_path / "home"),
        "HF_ENDPOINT": "http://127.0.0.1:9",  # nothing listens there
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "MLXLM_MODELS": str(tmp_path / "models"),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": os.getcwd(),
    }

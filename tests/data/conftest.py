"""Tokenizers and prepared folders for the tests of the data pipeline."""

import random
import shutil
from pathlib import Path

import pytest

from mlxlm.data import DataOptions, prepare
from mlxlm.tokenizer import load, train
from tests.paths import SHARED

WORDS = ["river", "water", "stone", "the", "of", "light", "naïve", "東京", "12", "a", "it's", "green", "🎉"]


def make_text(n_words, seed=0):
    """Lines of words, blank lines and indents."""
    draw = random.Random(seed)
    parts = []
    for _ in range(n_words):
        parts += [draw.choice(WORDS), draw.choice([" ", " ", " ", " ", "\n", "\n\n", "\n    ", "  "])]
    return "".join(parts)


@pytest.fixture(scope="session")
def text():
    return make_text


@pytest.fixture(scope="session")
def byte_level():
    return train([make_text(4000)], 300, "byte-level")


@pytest.fixture(scope="session")
def sentencepiece_bpe():
    return train([make_text(4000)], 300, "sentencepiece")


@pytest.fixture(scope="session")
def llama2():
    folder = SHARED / "tokenizers/llama2"
    if not folder.exists():
        pytest.skip("needs ../shared/tokenizers/llama2")
    return load(folder)


@pytest.fixture(params=["byte_level", "sentencepiece_bpe", "llama2"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory, byte_level):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text(make_text(20_000), encoding="utf-8")
    prepare(DataOptions([folder / "text.txt"]), byte_level, folder / "prepared", shard_tokens=5000)
    return folder / "prepared"


@pytest.fixture
def prepared(tmp_path, prepared_once):
    """A folder of 20,000 words in small shards."""
    return Path(shutil.copytree(prepared_once, tmp_path / "prepared"))

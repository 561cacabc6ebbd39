"""Tokenizers and prepared folders for the tests of the data pipeline."""

import random

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


@pytest.fixture
def prepared(tmp_path, byte_level):
    """A folder of 20,000 words in small shards."""
    (tmp_path / "text.txt").write_text(make_text(20_000), encoding="utf-8")
    prepare(DataOptions([tmp_path / "text.txt"]), byte_level, tmp_path / "prepared", shard_tokens=5000)
    return tmp_path / "prepared"

"""Tokenizers that are trained once, and public ones if they are next to this checkout."""

import pytest

from mlxlm.tokenizer import load, train
from tests.paths import SHARED

# Prose, code, numbers, accents, CJK, emoji (one with joiners), odd spaces and control characters.
SAMPLE = (
    "The quick brown fox didn't jump over 13 lazy dogs; it cost $1,234.56 in 2024.\n\n"
    "def fibonacci(n):\n    if n < 2:\n        return n\n\treturn fibonacci(n - 1) + fibonacci(n - 2)\r\n"
    "Ça coûte très cher, naïve façade. 東京都は日本の首都です。 Привет, мир! \u200bשלום\n"
    "👩‍👩‍👧 🎉🎉 e\u0301 \u00a0 \u3000 ▁ ▅ \x00\x07\x7f <s> <|user|> <0x0A> …—“quotes”    \n   \n"
)


@pytest.fixture(scope="session")
def corpus():
    words = ["one", "two", "three", "token", "tokens", "train", "training", "the", "then", "water", "12", "6789"]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(12)) for i in range(60)]
    return [SAMPLE * 3, "\n".join(lines)]


@pytest.fixture(scope="session")
def byte_level(corpus):
    return train(corpus, 420, "byte-level")


@pytest.fixture(scope="session")
def sentencepiece_bpe(corpus):
    return train(corpus, 420, "sentencepiece")


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece_bpe"])
def trained(request):
    return request.getfixturevalue(request.param)


def public(name):
    if not (SHARED / name).exists():
        pytest.skip(f"needs ../shared/{name}")
    return SHARED / name


@pytest.fixture(scope="session")
def llama2_folder():
    return public("tokenizers/llama2")


@pytest.fixture(scope="session")
def gpt2_folder():
    return public("tokenizers/gpt2")


@pytest.fixture(scope="session")
def llama2(llama2_folder):
    return load(llama2_folder)


@pytest.fixture(scope="session")
def gpt2(gpt2_folder):
    return load(gpt2_folder)


@pytest.fixture(scope="session", params=["tinyshakespeare.txt", "wikitext2-valid.txt"])
def real_text(request):
    return public(f"data/{request.param}").read_bytes()[:200_000].decode("utf-8", "ignore")


@pytest.fixture
def sample():
    return SAMPLE

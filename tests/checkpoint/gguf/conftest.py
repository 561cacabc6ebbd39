"""Models and tokenizers to write, and llama.cpp where it is installed."""

from __future__ import annotations

import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.model import Decoder
from mlxlm.tokenizer import train
from tests.checkpoint.gguf.gguf_models import MODELS, random_model
from tests.checkpoint.gguf.gguf_tokenizers import SAMPLE
from tests.small_models import tensors_of


@pytest.fixture(params=MODELS, scope="module")
def model(request, tiny_tokenizer) -> Decoder:
    """A decoder whose weights are exact in bfloat16, none of them 0 or 1. Tests must not change it."""
    return random_model(request.param, tiny_tokenizer)


@pytest.fixture
def tensors(model):
    return tensors_of(model)


@pytest.fixture(scope="session")
def open_llama_cpp():
    """`open_llama_cpp(path, **options)`: the model as llama.cpp loads it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    opened = []

    def open_(path, **options):
        float32 = {"type_k": 0, "type_v": 0}  # of the key-value cache, float16 otherwise
        opened.append(llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False, **float32, **options))
        return opened[-1]

    yield open_
    for one in opened:
        one.close()


@pytest.fixture(scope="session")
def texts(make_text):
    return [SAMPLE * 3, make_text(1000), "Once there was a cat (the cat sat). 12345 6789\n" * 20]


@pytest.fixture(scope="session")
def byte_level(texts):
    return train(texts, 420, "byte-level")


@pytest.fixture(scope="session")
def sentencepiece_bpe(texts):
    return train(texts, 420, "sentencepiece")


@pytest.fixture(params=["byte_level", "sentencepiece_bpe"])
def trained(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def through(tmp_path, open_llama_cpp, tiny_tokenizer):
    """`through(tokenizer)`: what comes back from a file, and `encode` of llama.cpp with that file."""

    def send(tokenizer, rows=None, notes=(), kind="qwen2"):
        model = random_model(kind, tiny_tokenizer)
        rows = rows or tokenizer.vocab_size
        config = model.config.with_changes(vocab_size=rows, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        path = tmp_path / "my-phi3.gguf"  # a name that must not matter to llama.cpp
        result = gguf.write(path, config, tensors_of(Decoder(config)), tokenizer, "F16")
        assert result.warnings == list(notes)

        loaded = open_llama_cpp(path, vocab_only=True)
        again = open_checkpoint(path).load_tokenizer()
        return again, lambda text: loaded.tokenize(text.encode(), add_bos=True, special=False)

    return send

"""Models to write, and llama.cpp itself where it is installed."""

from __future__ import annotations

import pytest

from mlxlm.model import Decoder
from tests.checkpoint.gguf.gguf_models import MODELS, random_model, tensors_of


@pytest.fixture(params=MODELS)
def model(request, tiny_tokenizer) -> Decoder:
    """A decoder whose weights bfloat16 can hold, none of them 0 or 1."""
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

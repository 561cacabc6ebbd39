"""A tiny model and its tokenizer, and models with other caches."""

import pytest

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from tests.generation.cache_models import Models

TEXT = ["The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n" * 4]


@pytest.fixture(scope="session")
def lm(tiny_config, tmp_path_factory) -> LoadedModel:
    tokens = tokenizer.train(TEXT, 300)
    config = tiny_config.with_changes(tie_word_embeddings=False)
    model = Decoder(config)
    model.init_weights(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20  # logits far apart, so that rounding decides nothing
    mx.eval(model.parameters())
    return LoadedModel(model, tokens, config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def models(lm) -> Models:
    return Models(lm)

"""A model small enough to check against the plainest computation, and a tokenizer that fits it."""

import pytest

from mlxlm import tokenizer
from mlxlm._mlx import mx
from mlxlm.config import ModelConfig
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder

TEXT = ["The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n" * 4]


@pytest.fixture(scope="session")
def loaded(tmp_path_factory) -> LoadedModel:
    tokens = tokenizer.train(TEXT, 300)
    config = ModelConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=tokens.vocab_size,
        max_position_embeddings=128,
    )
    model = Decoder(config)
    model.initialize(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20  # logits far apart, so that rounding decides nothing
    mx.eval(model.parameters())
    return LoadedModel(model, tokens, config, tmp_path_factory.getbasetemp())

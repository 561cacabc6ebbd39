"""A model whose logits are far apart, with its tokenizer, in memory and as a folder."""

import json

import pytest

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint.safetensors import save_weights
from mlxlm.families import config_to_hf
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder

TEXT = "The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n" * 4


@pytest.fixture(scope="session")
def lm(tiny_config, tmp_path_factory) -> LoadedModel:
    tokens = tokenizer.train([TEXT], 300)
    config = tiny_config.with_changes(tie_word_embeddings=False)
    model = Decoder(config)
    model.init_weights(seed=3)
    model.lm_head.weight = model.lm_head.weight * 20
    mx.eval(model.parameters())
    return LoadedModel(model, tokens, config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def folder(lm, tmp_path_factory):
    """`lm`, as a checkpoint."""
    path = tmp_path_factory.mktemp("evaluated")
    save_weights(path, dict(tree_flatten(lm.model.parameters())))
    (path / "config.json").write_text(json.dumps(config_to_hf(lm.config)))
    lm.tokenizer.save(path)
    return path


@pytest.fixture(scope="session")
def logprobs(lm):
    """`logprobs(ids)`: log p of each id but the first, in float64, from one pass over all of them."""
    import numpy as np

    def found(ids):
        logits = np.array(lm.model(mx.array([list(ids)]))[0], dtype=np.float64)
        top = logits.max(-1, keepdims=True)
        logs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        return logs[np.arange(len(ids) - 1), list(ids[1:])], logs[:-1].argmax(-1) == np.array(ids[1:])

    return found

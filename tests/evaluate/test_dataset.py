"""Evaluation against a sum over single tokens in float64."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.data import DataOptions, TokenDataset, prepare
from mlxlm.evaluate import evaluate_dataset
from mlxlm.model import Decoder


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_loss_is_the_mean_over_all_tokens(tmp_path, text_file, tiny_config, tiny_tokenizer, batch_size):
    prepare(DataOptions([text_file]), tiny_tokenizer, tmp_path / "data")
    data = TokenDataset.open(tmp_path / "data", "validation")
    model = Decoder(tiny_config)
    model.init_weights(0)
    found = evaluate_dataset(model, data, 50, batch_size)
    tokens = data.slice(0, len(data)).astype(np.int64)
    total = 0.0
    for start in range(0, len(tokens) - 1, 50):
        window = tokens[start : start + 51]
        logits = np.array(model(mx.array(window[None, :-1])), dtype=np.float64)[0]
        log_total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        total += (log_total - logits[np.arange(len(window) - 1), window[1:]]).sum()
    assert found.tokens == len(tokens) - 1
    assert found.loss == pytest.approx(total / found.tokens, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(found.loss / np.log(2) * len(tokens) / data.bytes)
    assert found.perplexity == pytest.approx(np.exp(found.loss))


def test_max_tokens_are_spread_over_the_data(tmp_path, text_file, tiny_config, tiny_tokenizer):
    prepare(DataOptions([text_file]), tiny_tokenizer, tmp_path / "data")
    data = TokenDataset.open(tmp_path / "data", "train")
    model = Decoder(tiny_config)
    model.init_weights(0)
    model.train()
    part = evaluate_dataset(model, data, 50, 4, max_tokens=1000)
    assert part.tokens == 1000 and model.training
    assert part.loss == pytest.approx(evaluate_dataset(model, data, 50, 4).loss, rel=0.02)

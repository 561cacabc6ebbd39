"""Packed documents have the same logits and gradients as separate ones."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.model import Decoder
from mlxlm.train.step import summed_loss

LENGTHS = [[9, 1, 14, 8], [20, 12]]  # of the documents in two rows of 32
FORMS = {
    "rope": {},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "alibi": {"positions": "alibi"},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "none": {"positions": "none"},
    "window": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "alibi and soft cap": {"positions": "alibi", "attn_logit_softcapping": 5.0},
}


def model_of(config, **changes):
    model = Decoder(config.with_changes(**changes))
    model.init_weights(0)
    return model


def packed(rows=LENGTHS):
    segment_ids = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, 300, segment_ids.shape, dtype=np.int32)
    return tokens, segment_ids


@pytest.mark.parametrize("form", ["rope", "learned", "alibi", "window"])
def test_gradients_equal_those_of_separate_documents(tiny_config, form):
    """Without the loss of each document's last token, which has no target in a separate document."""
    model = model_of(tiny_config, **FORMS[form])
    model.train()
    tokens, segment_ids = packed([[9, 1, 14, 9], [20, 13]])
    weights = np.zeros((2, 32), np.float32)
    weights[:, :] = np.random.default_rng(1).integers(0, 3, (2, 32))
    weights[segment_ids[:, 1:] != segment_ids[:, :-1]] = 0

    def gradients(*batch):
        loss = nn.value_and_grad(model, lambda *x: summed_loss(model, *x))
        total, found = loss(*(None if x is None else mx.array(x) for x in batch))
        return total.item(), dict(tree_flatten(found))

    total, together = gradients(tokens, segment_ids[:, :-1], weights)
    sum_nll, alone = 0.0, {}
    for row, of_row in enumerate(segment_ids):
        for number in range(of_row[-1] + 1):
            [places] = np.nonzero(of_row == number)
            if len(places) < 2:
                continue
            start, stop = places[0], places[-1] + 1
            part = tokens[row : row + 1, start:stop], None, weights[row : row + 1, start : stop - 1]
            loss, found = gradients(*part)
            sum_nll += loss
            alone = {name: found[name] + alone.get(name, 0) for name in found}
    assert total == pytest.approx(sum_nll, rel=1e-5)
    for name, found in together.items():
        wanted = np.array(alone[name])
        np.testing.assert_allclose(np.array(found), wanted, atol=2e-4 * max(1, np.abs(wanted).max()), err_msg=name)

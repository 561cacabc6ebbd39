"""A model that only mlx_lm implements."""

import json

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import save_weights

GRANITE = {
    "model_type": "granite", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    """`write(name=value, ...)`: a folder of a Granite model with these fields; None removes one."""

    def write(**changes):
        values = {name: value for name, value in {**GRANITE, **changes}.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(values))
        save_weights(tmp_path, {"model.embed_tokens.weight": mx.zeros((97, 32))})
        return tmp_path

    return write

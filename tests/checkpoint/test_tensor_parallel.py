"""Parts of checkpoints for several processes: their logits together, what each reads, and what can't be split."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import make_cache
from mlxlm.config import ModelConfig
from tests.small_models import arrays_of, in_memory, random_decoder
from tests.split_model import run_split

BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
KINDS = {
    "grouped-query": {"qk_norm": "head", "attention_bias": True, "sliding_window": 8},
    "biases": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "mlp_gated": False,
               "norm": "layer", "positions": "learned", "hidden_act": "gelu"},
    "parallel": {"parallel_residual": True, "shared_norm": True, "norm": "layer", "positions": "alibi"},
    "norms of outputs": {"norm_placement": "both", "tie_word_embeddings": True, "residual_multiplier": 0.5},
    "experts": {**EXPERTS, "shared_expert_intermediate_size": 32, "shared_expert_gate": True,
                "mlp_layer_types": ["dense", "sparse"]},
}  # fmt: skip
TOKENS = mx.array([[5, 17, 3, 42, 8, 60, 2, 11, 29, 33, 7, 1], [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])


def logits_of(model):
    """Of a prompt, and token by token after it, with a cache."""
    cache = make_cache(model)
    parts = [model(TOKENS[:, :7], cache=cache)] + [model(TOKENS[:, i : i + 1], cache=cache) for i in range(7, 12)]
    return np.array(mx.concatenate(parts, axis=1))


def random_model(**fields):
    """A random model whose biases aren't zero."""
    model = random_decoder(ModelConfig(**{**BASE, **fields}))
    biases = [(n, mx.random.normal(x.shape, key=mx.random.key(i)))
              for i, (n, x) in enumerate(arrays_of(model).items()) if n.endswith("bias")]  # fmt: skip
    model.load_weights(biases, strict=False)
    return model


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_give_the_logits_of_the_whole(kind, size):
    """Four processes share two key-value heads."""
    model = random_model(**KINDS[kind])
    whole = logits_of(model)
    for part in run_split(in_memory(model), size, logits_of):
        np.testing.assert_allclose(part, whole, rtol=0, atol=1e-4 * whole.std())

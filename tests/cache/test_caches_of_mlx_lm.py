"""Our caches under a model of mlx_lm."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, make_cache

llama = pytest.importorskip("mlx_lm.models.llama", reason="the oracle is mlx_lm (pip install mlx-lm)")
peers = pytest.importorskip("mlx_lm.models.cache")

TOKENS = mx.array(np.random.default_rng(0).integers(0, 50, (1, 40)))


@pytest.fixture(scope="module")
def model():
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=50, head_dim=32,
    )  # fmt: skip
    made = llama.Model(args)
    if hasattr(type(made), "make_cache"):
        del type(made).make_cache  # older ones have none: the caches are ours
    mx.eval(made.parameters())
    return made


def read(model, caches, pieces):
    parts, done = [], 0
    for n in pieces:
        parts.append(model(TOKENS[:, done : done + n], cache=caches))
        done += n
    return np.array(mx.concatenate(parts, axis=1))


PIECES = ([40], [1] * 40, [13, 1, 1, 20, 5])


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_full_cache_equals_its_own(model, pieces):
    own = read(model, [peers.KVCache() for _ in model.layers], pieces)
    np.testing.assert_allclose(read(model, make_cache(model), pieces), own, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_quantized_cache_equals_its_own(model, bits, pieces):
    own = [peers.QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
    found = read(model, make_cache(model, KVOptions.of(bits=bits)), pieces)
    np.testing.assert_allclose(found, read(model, own, pieces), atol=1e-4)


@pytest.mark.parametrize("bits", ["8", "8,4"])
def test_an_architecture_whose_attention_takes_plain_arrays_only(bits):
    deepseek = pytest.importorskip("mlx_lm.models.deepseek_v3")
    mx.random.seed(0)
    args = deepseek.ModelArgs(
        model_type="deepseek_v3", hidden_size=64, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=32, v_head_dim=32,
        qk_nope_head_dim=32, n_routed_experts=None, n_shared_experts=None, first_k_dense_replace=2, topk_group=1,
        n_group=1, rope_scaling=None,
    )  # fmt: skip
    model = deepseek.Model(args)
    exact = read(model, make_cache(model), [20, *[1] * 20])
    near = read(model, make_cache(model, KVOptions.of(bits=bits)), [20, *[1] * 20])
    assert 0 < np.abs(near - exact).mean() < 0.02


def test_keys_and_values_of_different_bits(model):
    exact = read(model, make_cache(model), [20, *[1] * 20])
    near = [np.abs(read(model, make_cache(model, KVOptions.of(bits=b)), [20, *[1] * 20]) - exact).mean()
            for b in ("8,8", "8,4", "none,4", "4,4")]  # fmt: skip
    assert min(near) > 0 and near[0] < near[1] and near[0] < 0.02 and near[3] < 0.2


def test_attention_sinks_keep_their_positions(model):
    """A rotating cache sees the tokens that the rule leaves, at the positions that they came with."""
    size, keep = 12, 2
    caches = make_cache(model, KVOptions(size, keep))
    found = read(model, caches, [5, 7, *[1] * 28])
    assert all(cache.size() <= size for cache in caches)
    # The same by masking what was dropped out of a full cache.
    rule, dropped, rows = caches[0].rotation, 0, []
    for t in range(40):
        held = t - dropped
        if held == size:
            dropped += rule.step
        rows.append([s <= t and (s < keep or s >= keep + dropped) for s in range(40)])
    mask = mx.array(rows)

    x = model.model.embed_tokens(TOKENS)
    for layer in model.layers:
        x = layer(x, mask, None)
    out = model.model.norm(x)
    logits = model.model.embed_tokens.as_linear(out) if model.args.tie_word_embeddings else model.lm_head(out)
    np.testing.assert_allclose(found, np.array(logits), atol=1e-4)


def test_masks(model):
    caches = make_cache(model, KVOptions(12, 2))
    read(model, caches, [12])
    cache = caches[0]
    assert cache.make_mask(1) is None and cache.make_mask(1, return_array=True) is None
    mask = cache.make_mask(1, window_size=4)
    assert mask.tolist() == [[False] * 8 + [True] * 4]  # one token is dropped, one comes
    empty = make_cache(model)[0]
    assert empty.make_mask(3) == "causal"
    assert empty.make_mask(3, return_array=True).tolist() == np.tri(3, dtype=bool).tolist()

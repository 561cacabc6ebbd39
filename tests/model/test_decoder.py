"""The decoder against transformers and against itself."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.cache import make_cache
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf, load_preset, preset_names
from mlxlm.model import Decoder
from mlxlm.model.decoder import lookup
from mlxlm.model.positions import alibi_slopes
from mlxlm.utils.errors import ConfigError

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": 97,
    "head_dim": 8,
}


def make(seed=0, **changes):
    config = ModelConfig(**{**SIZES, **changes})
    model = Decoder(config)
    model.init_weights(seed)
    return model, config


@pytest.mark.parametrize("kv_heads, biases, tied", [(6, False, False), (2, True, True), (1, False, True)])
def test_logits_equal_transformers(kv_heads, biases, tied):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers")
    model, config = make(
        num_key_value_heads=kv_heads, attention_bias=biases, mlp_bias=biases, tie_word_embeddings=tied,
        rope_theta=5000.0, rms_norm_eps=1e-4,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    weights = {
        name: rng.normal(0.5 if value.ndim == 1 else 0.0, 0.2, value.shape).astype(np.float32)
        for name, value in tree_flatten(model.parameters())
    }
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    values = {k: v for k, v in config_to_hf(config).items() if k not in ("torch_dtype", "architectures")}
    oracle = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values)).eval()
    missing, unexpected = oracle.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if tied else set())
    oracle.tie_weights()
    tokens = rng.integers(0, 97, (2, 33))
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(np.array(model(mx.array(tokens))), expected, atol=1e-4)


def test_presets_have_the_stated_parameter_count():
    for name in preset_names():
        config = load_preset(name)
        if config.parameter_count() < 20e6:
            arrays = tree_flatten(Decoder(config).parameters())
            assert sum(a.size for _, a in arrays) == config.parameter_count()


def test_initialization_depends_on_the_seed_alone():
    first, second, other = (dict(tree_flatten(make(seed)[0].parameters())) for seed in (1, 1, 2))
    for name in first:
        assert mx.array_equal(first[name], second[name])
    assert not mx.array_equal(first["lm_head.weight"], other["lm_head.weight"])
    deviation = 0.5 / 48**0.5
    assert abs(mx.std(first["lm_head.weight"]).item() / deviation - 1) < 0.1
    assert abs(mx.std(first["model.layers.0.mlp.down_proj.weight"]).item() / (deviation / 6**0.5) - 1) < 0.1


def test_longrope_factors_of_a_cache():
    """Pieces of one text have one kind of positions, wherever it is cut."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model, config = make(rope_scaling={**scaling, "original_max_position_embeddings": 16})
    assert config.longrope_original_length == model.longrope_original_length == 16
    tokens = mx.array(np.random.default_rng(0).integers(0, 97, (1, 20)))

    def in_pieces(length, long_factors):
        cache = make_cache(model)
        for layer in cache:
            layer.long_factors = long_factors
        ends = [0, 5, 12, length]
        return mx.concatenate([model(tokens[:, a:b], cache) for a, b in itertools.pairwise(ends)], axis=1)

    long, short = np.array(model(tokens)), np.array(model(tokens[:, :16]))
    assert np.abs(long[:, :16] - short).max() > 1e-2
    np.testing.assert_allclose(np.array(in_pieces(20, True)), long, atol=2e-5)
    np.testing.assert_allclose(np.array(in_pieces(14, True)), long[:, :14], atol=2e-5)
    for factors in (False, None):
        np.testing.assert_allclose(np.array(in_pieces(14, factors)), short[:, :14], atol=2e-5)


numbers = st.floats(0, 3.5e38) | st.integers(0, 10**39) | st.sampled_from([1, 1.0, 2.0, 1e-300])
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor")


@settings(max_examples=80)
@given(
    kind=st.sampled_from(["linear", "dynamic", "llama3", "yarn", "longrope"]),
    fields=st.dictionaries(st.sampled_from([*SCALING, "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]), numbers),
    factors=st.lists(numbers, min_size=4, max_size=4),
    others=st.dictionaries(st.sampled_from(["rope_theta", "rms_norm_eps", "final_logit_softcapping"]), numbers),
)
def test_accepted_configurations_run(kind, fields, factors, others):
    usual = dict(zip(SCALING, (2.0, 1.0, 4.0, 8), strict=False))
    scaling = {**usual, "short_factor": factors, "long_factor": factors, **fields, "rope_type": kind}
    try:
        config = ModelConfig(**SIZES, max_position_embeddings=5, rope_scaling=scaling, **others)
    except ConfigError:
        return
    mx.eval(Decoder(config)(mx.zeros((1, 12), mx.int32)))


def test_alibi_slopes():
    np.testing.assert_allclose(np.array(alibi_slopes(8)), [2.0**-i for i in range(1, 9)])
    six = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    np.testing.assert_allclose(np.array(alibi_slopes(6)), six)


def test_norms_are_initialized_to_the_identity():
    model, _ = make(norm_unit_offset=True, qk_norm="head")
    assert (model.model.norm.weight == 0).all() and (model.model.norm.scale == 1).all()
    assert (model.layers[0].self_attn.q_norm.scale == 1).all()


@pytest.mark.parametrize("dtype, error", [(mx.float32, 1e-6), (mx.bfloat16, 2e-3)])
def test_gradient_of_the_embedding_is_rounded_once(dtype, error):
    """Also for tokens as frequent as in texts, of which the first is a fifth of all."""
    rng, size = np.random.default_rng(0), 256
    frequency = 1 / np.arange(1, size + 1)
    tokens = rng.choice(size, 20_000, p=frequency / frequency.sum())
    rows = mx.array(rng.standard_normal((len(tokens), 8))).astype(dtype)
    expected = np.zeros((size + 1, 8))  # the last token doesn't occur
    np.add.at(expected, tokens, np.array(rows.astype(mx.float32)))

    def gradient():
        table = mx.zeros(expected.shape, dtype)
        return mx.grad(lambda t: (lookup(t, mx.array(tokens.reshape(4, -1))) * rows.reshape(4, -1, 8)).sum())(table)

    found = gradient()
    assert (found == gradient()).all()
    difference = np.array(found.astype(mx.float32)) - expected
    assert np.linalg.norm(difference) < error * np.linalg.norm(expected)
    assert np.linalg.norm(difference[0]) < error * np.linalg.norm(expected[0]) and not difference[-1].any()


def test_fusing_keeps_no_freed_weights():
    model = Decoder(load_preset("1m"))
    mx.eval(model.parameters())
    mx.clear_cache()
    model.fuse()
    assert mx.get_cache_memory() < 1 << 16

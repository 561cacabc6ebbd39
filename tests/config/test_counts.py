"""Counts of parameters, FLOPs and cache bytes equal those of real arrays and caches."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.config import ModelConfig
from mlxlm.config.components import QK_NORMS
from mlxlm.config.counts import count_parameters, matrix_parameters, mean_attended_keys
from mlxlm.families import load_preset
from mlxlm.utils.errors import ConfigError

GROUP_OF_MODULE = {
    "embed_tokens": "embedding", "embed_positions": "positions", "q_proj": "query", "k_proj": "key",
    "v_proj": "value", "o_proj": "output", "gate_proj": "feed_forward", "up_proj": "feed_forward",
    "down_proj": "feed_forward", "lm_head": "head",
}  # fmt: skip


@st.composite
def configs(draw):
    """Any small decoder."""
    kv = draw(st.sampled_from([1, 2, 3]))
    parallel = draw(st.booleans())
    return ModelConfig(
        hidden_size=draw(st.sampled_from([12, 24])),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=kv * draw(st.sampled_from([1, 2, 4])),
        num_key_value_heads=kv,
        head_dim=draw(st.sampled_from([4, 6, 10])),
        intermediate_size=draw(st.integers(1, 40)),
        vocab_size=draw(st.integers(2, 60)),
        max_position_embeddings=draw(st.integers(1, 30)),
        attention_bias=draw(st.booleans()),
        attention_out_bias=draw(st.sampled_from([None, True, False])),
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_placement="pre" if parallel else draw(st.sampled_from(["pre", "post", "output", "both"])),
        parallel_residual=parallel,
        shared_norm=parallel and draw(st.booleans()),
        positions=draw(st.sampled_from(["rope", "learned", "sinusoidal", "alibi", "none"])),
        position_offset=draw(st.sampled_from([0, 2])),
        qk_norm=draw(st.sampled_from([None, *QK_NORMS])),
        mlp_gated=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 3])),
    )


@settings(max_examples=30)
@given(configs())
def test_parameters_by_group_are_those_of_the_arrays(config):
    from mlxlm.backend.mlx import tree_flatten
    from mlxlm.model import Decoder

    found = dict.fromkeys(count_parameters(config), 0)
    for name, array in tree_flatten(Decoder(config).parameters()):
        *_, module, kind = name.split(".")
        part = "norms" if module not in GROUP_OF_MODULE else "biases" if kind == "bias" else GROUP_OF_MODULE[module]
        found[part] += array.size
    assert count_parameters(config) == found
    assert config.parameter_count() == sum(found.values())


@settings(max_examples=30)
@given(configs(), st.integers(1, 9))
def test_flops_are_those_of_the_products(config, context_length):
    """Each weight of a matrix once, and H·D·context numbers twice, 2 operations each."""
    products = matrix_parameters(config) + config.hidden_size * (config.vocab_size)
    seen = min(context_length, config.sliding_window or context_length)
    scores = 2 * config.num_attention_heads * config.head_dim * seen * config.num_hidden_layers
    assert config.flops_per_token(context_length) == 2 * products + 2 * scores
    assert config.flops_per_token(context_length, training=True) == 3 * config.flops_per_token(context_length)
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # keys and values
    assert config.kv_bytes_per_token(3) == 3 * values


@given(st.integers(1, 40), st.sampled_from([None, 1, 3, 64]))
def test_mean_attended_keys(length, window):
    config = ModelConfig(8, 2, 2, 8, 8, sliding_window=window)
    by_row = [min(row, window or row) for row in range(1, length + 1)]
    assert mean_attended_keys(config, length) == pytest.approx([sum(by_row) / length] * 2)


@pytest.mark.parametrize("name", ["0.3m", "1m"])
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_cache_is_as_large_as_planned(name, bits):
    from mlxlm.backend.mlx import mx
    from mlxlm.cache import KVOptions, make_cache
    from mlxlm.model import Decoder
    from mlxlm.plan.inference import Serving, cache_bytes

    config = load_preset(name)
    model = Decoder(config)
    cache = make_cache(model, KVOptions(key_bits=bits, value_bits=bits))
    mx.eval(model(mx.zeros((2, 20), mx.int32), cache))
    held = sum(
        array.nbytes // array.shape[2] * 20 for layer in cache for side in layer._buffers
        for array in side.arrays
    )  # fmt: skip
    floats = "cpu"  # 32 bits, as this model has them on any device
    assert held == cache_bytes(config, Serving(num_sequences=2, context_length=20, kv_bits=bits or 32, device=floats))


def test_a_window_bounds_the_cache():
    from mlxlm.plan.inference import Serving, cache_bytes

    config = ModelConfig(64, 4, 4, 128, 100, sliding_window=10, layer_types=["sliding_attention", "full_attention"] * 2)
    assert cache_bytes(config, Serving(context_length=100)) == 2 * 64 * 2 * 4 * 100
    assert cache_bytes(config, Serving(context_length=999)) == 2 * 64 * 2 * (2 * (10 + 64 + 64) + 2 * 999)
    with pytest.raises(ConfigError, match="a cache of head dim 16 can't be quantized"):
        cache_bytes(config, Serving(context_length=100, kv_bits=4))


@pytest.mark.parametrize("window", [10, 600])
def test_a_cache_with_a_window_is_as_large_as_planned(window):
    from mlxlm.backend.mlx import mx
    from mlxlm.cache import KVCache
    from mlxlm.cache.policies import SlidingWindow
    from mlxlm.plan.inference import Serving, cache_bytes

    config = ModelConfig(8, 1, 1, 8, 8, sliding_window=window)
    cache = KVCache(window=SlidingWindow.of(window))
    for _ in range(4):  # a prompt in pieces, and tokens until they have moved
        cache.update_and_fetch(*[mx.zeros((1, 1, window, 8))] * 2)
    while cache.offset < 7 * window or cache.offset < 400:
        cache.update_and_fetch(*[mx.zeros((1, 1, 1, 8))] * 2)
    assert cache.nbytes == cache_bytes(config, Serving(context_length=cache.offset, kv_bits=32))


@pytest.mark.parametrize(
    ("bits", "dtype", "size_of_float"), [(4, "bfloat16", 2), (8, "bfloat16", 2), (4, "float32", 4)]
)
def test_quantized_weights_are_as_large_as_planned(bits, dtype, size_of_float):
    """Beside the arrays of MLX's own quantization of the whole model."""
    from mlxlm.backend.mlx import mx, nn, tree_flatten
    from mlxlm.model import Decoder
    from mlxlm.plan.inference import Serving, weight_bytes

    config = load_preset("0.3m").with_changes(intermediate_size=200, tie_word_embeddings=False, mlp_bias=True)
    model = Decoder(config)
    model.apply(lambda x: x.astype(getattr(mx, dtype)))
    divides = {64: lambda width: width % 64 == 0, 32: lambda width: width % 64 and width % 32 == 0}
    for size, fits in divides.items():
        nn.quantize(
            model, size, bits,
            class_predicate=lambda _name, module, fits=fits: hasattr(module, "to_quantized")
            and fits(module.weight.shape[-1]),
        )  # fmt: skip
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    device = "cpu" if size_of_float == 4 else "cuda"
    assert weight_bytes(config, Serving(bits=bits, device=device)) == held
    assert weight_bytes(config, Serving()) == 2 * config.parameter_count()

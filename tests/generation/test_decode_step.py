"""Compiled decoding steps: against the model itself, against themselves without compilation, and their memory."""

import gc
import platform

import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.cache import KVOptions, make_cache
from mlxlm.config import ModelConfig
from mlxlm.generation.decode_step import DecodeStep, LayerStep, _Positions
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 700,
}
MODELS = {
    "llama": {},
    "qwen 2": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen 3": {"qk_norm": "head", "head_dim": 64},  # for which a GPU has MLX's attention
    "olmo 2": {"qk_norm": "projection", "norm_placement": "output"},
    "phi": {"qk_norm": "layer"},
    "stablelm": {"qk_norm": "layer_per_head"},
    "llama 4": {
        "qk_norm": "l2", "rope_layers": (True, False), "attn_scale": 0.7, "floor_scale": 5, "attention_chunk_size": 9,
        "layer_types": ("chunked_attention", "full_attention"), "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "router": "input_sigmoid", "shared_expert_intermediate_size": 32,
    },
    "ministral 3": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7,
        }
    },
    "gemma 2": {
        "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention"), "norm_placement": "both",
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "norm_unit_offset": True,
        "hidden_act": "gelu_pytorch_tanh", "embedding_multiplier": 8.0, "query_pre_attn_scalar": 24.0,
    },
    "gemma 4": {
        "num_hidden_layers": 4, "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention") * 2,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16, "layer_scalar": True,
        "global_head_dim": 64, "value_norm": True, "qk_norm": "head", "norm_placement": "both",
        "hidden_act": "gelu_pytorch_tanh", "embedding_multiplier": 8.0, "query_pre_attn_scalar": 24.0,
        "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25}, "rope_local_base_freq": 50.0,
    },
    "gemma 4 with experts": {
        "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention"), "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "global_head_dim": 64, "value_norm": True, "qk_norm": "head",
        "norm_placement": "both", "enable_moe_block": True, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "gpt-oss": {
        "attention_sinks": True, "sliding_window": 9, "layer_types": ("sliding_attention", "full_attention"),
        "attention_bias": True, "mlp_bias": True, "swiglu_limit": 0.2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "router_bias": True,
    },
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "gpt-2": {"positions": "learned", "norm": "layer", "mlp_gated": False, "hidden_act": "gelu_new"},
    "transformer": {"positions": "sinusoidal", "norm": "layer", "norm_placement": "post"},
    "neox": {"partial_rotary_factor": 0.5, "parallel_residual": True, "norm": "layer"},
    "bloom": {"positions": "alibi", "embedding_norm": True, "norm": "layer"},
    "lfm 2": {"layer_types": ("conv", "full_attention", "conv"), "num_hidden_layers": 3, "conv_bias": True},
    "llama 3": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "deepseek": {
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24, "v_head_dim": 28,
        "qk_rope_head_dim": 32, "attention_bias": True,
    },
    "deepseek lite": {
        "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "v_head_dim": 28, "qk_rope_head_dim": 32,
    },
}  # fmt: skip
CACHES = {
    "default": KVOptions(),
    "rotating": KVOptions(size=24, keep=2),
    "8 bits": KVOptions(key_bits=8, value_bits=8),
    "8 and 4 bits": KVOptions(key_bits=8, value_bits=4),
    "8-bit keys, rotating": KVOptions(size=24, keep=2, key_bits=8),
}


def make(**changes):
    model = Decoder(ModelConfig(**{**SIZES, **changes}))
    model.init_weights(0)
    # Larger queries and keys than fresh ones: who is seen must matter.
    for layer in (layer for layer in model.layers if "self_attn" in layer):
        for name in ("q_proj", "k_proj", "q_b_proj", "kv_a_proj_with_mqa"):
            if name in layer.self_attn:
                layer.self_attn[name].weight = layer.self_attn[name].weight * 3
        if model.config.kv_lora_rank is not None:
            continue
        if "sinks" in layer.self_attn:  # fresh ones are all zeros
            layer.self_attn.sinks = mx.linspace(-1, 4, layer.self_attn.heads)
        if "k_norm" in layer.self_attn:  # fresh weights are all ones
            weight = layer.self_attn.k_norm.weight
            layer.self_attn.k_norm.weight = weight + mx.sin(mx.arange(weight.size))
    model.eval()
    return model


def tokens_of(rows, n, seed=0):
    return mx.array(np.random.default_rng(seed).integers(0, 97, (rows, n)), mx.int32)


def prefilled(model, options, tokens, padding=None):
    caches = make_cache(model, options)
    if padding:
        for cache in caches:
            cache.set_left_padding(padding)
    mx.eval(model(tokens, cache=caches))
    return caches


def assert_close(found, wanted, atol=2e-5):
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=atol, rtol=0)


def compiles(step, caches):
    return step._can_compile(caches)


class Trio:
    """The same caches three times: for a compiled step, for one without compilation, and for the model itself."""

    def __init__(self, model, caches):
        self.model, self.steps = model, (DecodeStep(model), DecodeStep(model))
        self.caches = [caches, *([cache.copy() for cache in caches] for _ in range(2))]

    def change(self, change):
        self.caches = [[change(cache) for cache in caches] for caches in self.caches]

    def decode(self, count, seed=0, atol=2e-5):
        rows = self.caches[0][0].rows
        for token in mx.split(tokens_of(rows, count, seed), count, axis=1):
            assert compiles(self.steps[0], self.caches[0])
            found = self.steps[0](token, self.caches[0])
            mx.disable_compile()
            try:
                uncompiled = self.steps[1](token, self.caches[1])
                mx.eval(uncompiled)
            finally:
                mx.enable_compile()
            expected = self.model(token, cache=self.caches[2])[:, -1]
            assert_close(found, expected, atol)
            if ON_CPU and platform.machine() == "x86_64":  # elsewhere compilers contract products and sums
                assert np.array_equal(np.array(found), np.array(uncompiled))
        states = [[np.array(x) for cache in caches for x in cache.state] for caches in self.caches]
        for one, other, plain in zip(*states, strict=True):
            if ON_CPU and platform.machine() == "x86_64":
                assert np.array_equal(one, other)
            if plain.dtype == np.float32:
                assert_close(one, plain, atol)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_each_architecture(kind):
    model = make(**MODELS[kind])
    trio = Trio(model, prefilled(model, KVOptions(), tokens_of(2, 8), padding=[0, 3]))
    trio.decode(20, atol=1e-4)


@pytest.mark.parametrize("model", ["llama", "deepseek"])
@pytest.mark.parametrize("kind", CACHES)
def test_each_kind_of_cache(kind, model):
    model = make(**MODELS[model])
    # A quantized key that rounds to another code moves a logit by more than rounding does.
    trio = Trio(model, prefilled(model, CACHES[kind], tokens_of(1, 5)))
    trio.decode(60, atol=2e-5 if "bits" not in kind else 1e-2)


@pytest.mark.parametrize(("kind", "cache"), [*((kind, "default") for kind in MODELS), *(("llama", c) for c in CACHES)])
def test_several_tokens_of_a_row(kind, cache):
    """Like the model, which reads them at once; with a last token that is trimmed, as after a rejected draft."""
    model = make(**MODELS[kind])
    caches, step = prefilled(model, CACHES[cache], tokens_of(1, 5)), DecodeStep(model)
    expected_caches = [cache.copy() for cache in caches]
    for seed, count in enumerate([3, 2, 4, 4, 4, 4, 1, 4]):  # the fourth of a size is compiled
        count = min(count, getattr(caches[0], "max_update_size", None) or count)
        tokens = tokens_of(1, count, seed)
        assert step._can_compile(caches, count) == (kind != "lfm 2" or count == 1)
        found, expected = step(tokens, caches), model(tokens, cache=expected_caches)[0]
        assert_close(found, expected, 1e-4 if "bits" not in cache else 1e-2)
        if cache == "default" and count > 1:
            for one in (*caches, *expected_caches):
                one.trim(1)


def test_hundreds_of_tokens_with_growth_trim_merge_select_and_row():
    model = make(sliding_window=40, layer_types=("sliding_attention", "full_attention"))
    trio = Trio(model, prefilled(model, KVOptions(), tokens_of(1, 200)))
    trio.decode(120)
    trio.change(lambda cache: cache.trim(50) and cache)
    trio.decode(10, 1)
    others = prefilled(model, KVOptions(), tokens_of(2, 30), padding=[0, 11])
    mx.eval([cache.state for cache in others])
    trio.caches = [[old.merge([old, new]) for old, new in zip(c, others, strict=True)] for c in trio.caches]
    trio.decode(40, 2)
    trio.change(lambda cache: cache.select([2, 1]) or cache)
    trio.decode(260, 3)
    trio.change(lambda cache: cache.row(1))
    trio.decode(5, 4)


def test_ranges_are_the_keys_of_the_mask():
    """A Metal kernel reads the range, MLX's operations the mask: both relative to the part that attention reads."""
    shared = _Positions(2, 1, mx.array([700, 90, 701, 0, 612], mx.int32))
    step = LayerStep(shared, (0, 512, 768, 1024, None, None, None), [])
    positions = np.arange(512, 768)
    expected = np.stack([positions <= 701, (positions >= 612) & (positions <= 701)])
    for heads in (1, 3):
        for row, window in ((expected, None), (expected & (positions > 681), 20)):
            assert np.array_equal(np.array(step.mask(window, heads)), np.stack([row[:, None]] * heads, axis=1))
    inside = [(np.arange(256) >= first) & (np.arange(256) < end) for first, end in step.ranges.tolist()]
    assert np.array_equal(inside, expected)
    assert np.array_equal(np.array(step.distances), positions - 701)


def test_one_trace_until_the_buffers_grow(monkeypatch):
    model, traced = make(), []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, *args: traced.append(1) or decode(self, *args))
    step, caches = DecodeStep(model), prefilled(model, KVOptions(), tokens_of(1, 5))
    for _ in range(251):  # up to position 256
        mx.eval(step(mx.array([[1]], mx.int32), caches))
    assert len(traced) == 1
    mx.eval(step(mx.array([[1]], mx.int32), caches))
    assert len(traced) == 2


def test_a_batch_is_traced_when_it_has_stayed_the_same(monkeypatch):
    model, traced = make(), []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, *args: traced.append(1) or decode(self, *args))
    step, caches = DecodeStep(model), prefilled(model, KVOptions(), tokens_of(2, 5))
    for count in (1, 2, 3, 4, 4, 4):  # three without a trace, the trace, and then without Python
        mx.eval(step(mx.array([[1], [2]], mx.int32), caches))
        assert len(traced) == count


@pytest.mark.skipif(not ON_CPU, reason="addresses of arrays are seen on a CPU")
@pytest.mark.parametrize("kind", ["default", "8 bits", "8 and 4 bits"])
def test_a_token_is_written_in_place(kind):
    model = make()
    step, caches = DecodeStep(model), prefilled(model, CACHES[kind], tokens_of(1, 5))

    def addresses():
        arrays = [x for cache in caches for buffer in cache.buffers for x in buffer.arrays]
        return [np.array(x, copy=False).__array_interface__["data"][0] for x in arrays]

    moved, before = -1, None
    for _ in range(60):
        logits = step(mx.array([[1]], mx.int32), caches)
        following = mx.argmax(logits, axis=-1)
        mx.async_eval(following)
        mx.eval(following, [buffer.arrays for cache in caches for buffer in cache.buffers])
        now = addresses()
        moved += now != before
        before = now
    assert moved <= 1  # where the buffers of the prompt grow


def test_a_copy_keeps_its_tokens():
    model = make()
    step, caches = DecodeStep(model), prefilled(model, KVOptions(), tokens_of(1, 5))
    mx.eval(step(mx.array([[1]], mx.int32), caches))
    copies = [cache.copy() for cache in caches]
    before = [np.array(x) for cache in copies for x in cache.state]
    mx.eval(step(mx.array([[2]], mx.int32), caches))
    assert all(np.array_equal(x, y) for x, y in zip(before, (x for c in copies for x in c.state), strict=True))
    found, expected = step(mx.array([[3]], mx.int32), copies), step(mx.array([[3]], mx.int32), caches)
    assert not np.allclose(np.array(found), np.array(expected), atol=1e-4)


def test_new_weights_and_modules_are_used():
    model = make()
    step, caches = DecodeStep(model), prefilled(model, KVOptions(), tokens_of(1, 5))
    token = mx.array([[1]], mx.int32)

    def check():
        expected = model(token, cache=[cache.copy() for cache in caches])[:, -1]
        assert_close(step(token, caches), expected)
        return np.array(expected)

    first = check()
    attention, mlp = model.layers[1].self_attn, model.layers[0].mlp
    attention.v_proj.weight = attention.v_proj.weight * 5
    second = check()
    assert np.abs(first - second).max() > 0.01
    model.layers[1].mlp.up_proj = nn.Linear(64, 96, bias=False)
    check()
    mlp.up_proj = nn.Sequential(mlp.up_proj, lambda x: x + 1)  # can't be fused, like an adapter
    check()


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights(bits):
    model = make(num_key_value_heads=4)
    nn.quantize(model, 32, bits, class_predicate=lambda path, module: isinstance(module, nn.Linear))
    trio = Trio(model, prefilled(model, KVOptions(), tokens_of(1, 4)))
    trio.decode(5, atol=1e-4)


def test_fused_weights_take_no_memory_and_keep_their_values():
    model = make()
    before = {name: np.array(x) for name, x in tree_flatten(model.parameters())}
    model.fuse()
    after = dict(tree_flatten(model.parameters()))
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    assert all(np.array_equal(np.array(after[name]), x) for name, x in before.items())
    q, k = (np.array(model.layers[0].self_attn[name].weight, copy=False) for name in ("q_proj", "k_proj"))
    if ON_CPU:  # one follows the other in memory
        address, following = (x.__array_interface__["data"][0] for x in (q, k))
        assert following - address == q.nbytes


def test_training_does_not_keep_the_fused_weights():
    model = make(hidden_size=256, intermediate_size=512)
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    mx.eval(DecodeStep(model)(mx.array([[1]], mx.int32), prefilled(model, KVOptions(), tokens_of(1, 5))))
    gc.collect()
    assert mx.get_active_memory() < before * 1.1
    model.train()
    model.update(tree_map(lambda x: x + 1, model.parameters()))  # as an optimizer does
    mx.eval(model.parameters())
    gc.collect()
    assert mx.get_active_memory() < before * 1.1


class Foreign(nn.Module):
    """A model of another library: one embedding as logits, and no caches of ours."""

    def __init__(self):
        super().__init__()
        self.table = mx.random.normal((97, 97), key=mx.random.key(0))

    def __call__(self, tokens, cache=None):
        return self.table[tokens]


def test_others_run_the_model_itself():
    foreign, token = Foreign(), mx.array([[3], [4]], mx.int32)
    assert np.array_equal(np.array(DecodeStep(foreign)(token, [None])), np.array(foreign.table[token[:, 0]]))
    model = make()
    step, caches = DecodeStep(model), make_cache(model)
    assert not compiles(step, caches)  # nothing says the number of key heads and the dtype yet
    expected = model(token, cache=make_cache(model))[:, -1]
    assert_close(step(token, caches), expected)
    assert compiles(step, caches)
    model.train()
    assert not compiles(step, caches)
    dynamic = make(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert not compiles(DecodeStep(dynamic), prefilled(dynamic, KVOptions(), tokens_of(1, 3)))


def test_a_position_beyond_the_table_is_an_error():
    model = make(positions="learned", max_position_embeddings=6)
    step, caches = DecodeStep(model), prefilled(model, KVOptions(), tokens_of(1, 5))
    mx.eval(step(mx.array([[1]], mx.int32), caches))
    with pytest.raises(GenerationError, match="position 7 is beyond"):
        step(mx.array([[1]], mx.int32), caches)

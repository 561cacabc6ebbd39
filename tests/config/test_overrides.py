"""Overrides by name: what each sets, and the error for those that can't work."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.config import ModelConfig
from mlxlm.config.overrides import OVERRIDE_NAMES, apply_overrides, infer_field, parse_overrides
from mlxlm.families import config_from_hf, config_to_hf, resolve_model_type
from mlxlm.utils.errors import ConfigError

BASE = ModelConfig(64, 4, 8, 96, 300, num_key_value_heads=2, max_position_embeddings=128)


def changed(*overrides, base=BASE):
    """The fields that overrides change, without model_type."""
    found = resolve_model_type(apply_overrides(base, parse_overrides(overrides)))
    return {
        f.name: getattr(found, f.name)
        for f in dataclasses.fields(found)
        if f.name != "model_type" and getattr(found, f.name) != getattr(base, f.name)
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {}),
        (["norm=layer"], {"norm": "layer"}),
        (["norm-placement=post"], {"norm_placement": "post"}),
        (["positions = alibi"], {"positions": "alibi"}),
        (["positions=sinusoidal"], {"positions": "sinusoidal", "embedding_multiplier": 8.0}),
        (["positions=sinusoidal", "hidden_size=128", "embedding_multiplier=1"], {"positions": "sinusoidal",
                                                                                "hidden_size": 128, "head_dim": 16}),
        (["feed_forward=relu"], {"mlp_gated": False, "hidden_act": "relu"}),
        (["feed_forward=gelu"], {"mlp_gated": False, "hidden_act": "gelu"}),
        (["feed_forward=silu"], {"mlp_gated": False}),
        (["feed_forward=glu"], {"hidden_act": "sigmoid"}),
        (["feed_forward=reglu"], {"hidden_act": "relu"}),
        (["feed_forward=geglu"], {"hidden_act": "gelu"}),
        (["feed_forward=swiglu"], {}),
        (["biases=all"], {"attention_bias": True, "mlp_bias": True}),
        (["head=tied"], {"tie_word_embeddings": True}),
        (["attention=multi-head"], {"num_key_value_heads": 8}),
        (["attention=multi-query"], {"num_key_value_heads": 1}),
        (
            ["attention=grouped-query", "num_attention_heads=16"],
            {"num_attention_heads": 16, "head_dim": 4, "num_key_value_heads": 4},
        ),
        (["kv_heads=4"], {"num_key_value_heads": 4}),
        (["hidden_size=128"], {"hidden_size": 128, "head_dim": 16}),
        (["hidden_size=100", "head_dim=8"], {"hidden_size": 100}),
        (["window=32"], {"sliding_window": 32}),
        (
            ["window=32", "layer_types=alternating"],
            {"sliding_window": 32, "layer_types": ("sliding_attention", "full_attention") * 2},
        ),
        (["window=32", "layer_types=all"], {"sliding_window": 32}),
        (
            ["layer_types=linear_attention:2", "linear_value_head_dim=16", "linear_num_value_heads=16"],
            {"layer_types": ("linear_attention", "full_attention") * 2, "linear_num_value_heads": 16,
             "linear_num_key_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
        ),
        (
            ["layer_types=mamba:4", "mamba_d_state=16"],
            {"layer_types": ("mamba",) * 3 + ("full_attention",), "mamba_n_heads": 2, "mamba_d_head": 64,
             "mamba_d_state": 16},
        ),
        (["rope_layers=2"], {"rope_layers": (True, False, True, False)}),
        (["rope_layers=[true, true, true, false]"], {"rope_layers": (True, True, True, False)}),
        (["softcap=20", "qk_norm=head"], {"attn_logit_softcapping": 20.0, "qk_norm": "head"}),
        (["layer_types=" + json.dumps(["full_attention"] * 4)], {}),
        (["hidden_size=1.28e2"], {"hidden_size": 128, "head_dim": 16}),
        (["rope_scaling=linear:4"], {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (["rope_scaling=dynamic:2"], {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (
            ["rope_scaling=yarn:4:32"],
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
        (
            ["rope_scaling=llama3:8"],
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128,
                              "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        ),
        (['rope_scaling={"rope_type": "linear", "factor": 2}'], {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
        (["rope_scaling=ntk:16", "rope_theta=1000"], {"rope_theta": 1000 * 16 ** (8 / 6)}),
        (["tie_word_embeddings=true", "rms_norm_eps=1e-6"], {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}),
    ],
)  # fmt: skip
def test_overrides(overrides, expected):
    assert changed(*overrides) == expected


@pytest.mark.parametrize(("kind", "heads"), [("multi-head", 16), ("grouped-query", 4), ("multi-query", 1)])
def test_attention_with_another_number_of_heads(kind, heads):
    """The base has a key-value head for each head."""
    base = BASE.with_changes(num_key_value_heads=8)
    found = changed("num_attention_heads=16", f"attention={kind}", base=base)
    assert found == {"num_attention_heads": 16, "head_dim": 4, "num_key_value_heads": heads}
    assert changed("hidden_size=128", f"attention={kind}", base=base)["head_dim"] == 16


def test_latent_attention_in_the_proportions_of_deepseek():
    base = BASE.with_changes(num_key_value_heads=2)
    found = changed("attention=latent", "kv_lora_rank=20", base=base)
    assert found == {
        "num_key_value_heads": 8, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "head_dim": 12,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nrom=layer"], "unknown override 'nrom' .try: norm"),
        (["foo=1"], "unknown override 'foo' .try: one of alibi_scaled, attention, .*, window"),
        (["norm=batch"], "norm is 'batch', it must be one of rms, layer"),
        (["positions"], "'positions' sets nothing .try: NAME=VALUE"),
        (["positions="], "sets nothing"),
        (["norm=rms", "norm=layer"], "norm is set to both rms and layer"),
        (["feed_forward=elu"], "feed_forward is 'elu' .try: one of relu, relu2, gelu, silu, glu, reglu, geglu, swiglu"),
        (["attention=linear"], "attention is 'linear' .try: one of multi-head, grouped-query, multi-query"),
        (["kv_heads=2", "attention=multi-query"], "attention and another override both set num_key_value_heads"),
        (["feed_forward=relu", "hidden_act=gelu"], "another override both set hidden_act"),
        (["hidden_size=wide"], "hidden_size is 'wide' .try: a whole number"),
        (["softcap=x"], "softcap is 'x' .try: a number or none"),
        (["head=maybe"], "head is 'maybe' .try: one of tied, untied"),
        (["mlp_bias=1"], "mlp_bias is '1' .try: true or false"),
        (["positions=none", "rope_theta=100"], "rope_theta has no effect on none positions .try: positions=rope"),
        (["positions=alibi", "rope_scaling=yarn:4"], "rope_scaling has no effect on alibi positions"),
        (["rope_scaling=yarn"], "rope_scaling is 'yarn' .try: none, a JSON object, or such as linear:4"),
        (["rope_scaling=linear:4:128"], "rope_scaling is 'linear:4:128'"),
        (["rope_scaling=spline:4"], "rope_scaling is 'spline:4'"),
        (["rope_layers=0"], "rope_layers is '0' .try: all, a number, or a JSON list"),
        (["rope_layers=[true]"], "rope_layers has 1 entries, one for each of 4 layers is needed"),
        (["rope_local_base_freq=100"], "for layers with a sliding window, but sliding_window is null"),
        (["layer_types=alternating"], "sliding_window is null"),
        (["num_attention_heads=7", "kv_heads=7"], "not a multiple of num_attention_heads 7"),
        (["model_type=gpt2"], "model_type can't be overridden .try: the comp"),
        (["vocab_size=9"], "vocab_size can't be overridden .try: --vocab-size"),
        (["dropout=0.1"], "dropout can't be overridden .try: the training"),
        (["hidden_size=1_000"], "hidden_size is '1_000' .try: a whole number"),
        (["hidden_size=٣٢"], "hidden_size is '٣٢' .try: a whole number"),
        (["hidden_size=1.5"], "hidden_size is '1.5' .try: a whole number"),
        (["window=128"], "sliding_window 128 has no effect on 128 tokens of context"),
        (["window=9", "layer_types=" + json.dumps(["full_attention"] * 4)], "sliding_window 9 .* no layer has it"),
        (["num_attention_heads=1", "attention=grouped-query"], "1 heads can't be grouped"),
    ],
)
def test_errors_are_one_line(overrides, message):
    with pytest.raises(ConfigError, match=message) as found:
        apply_overrides(BASE, parse_overrides(overrides), {"vocab_size": "--vocab-size"})
    assert "\n" not in str(found.value)


def test_experts_are_together_as_wide_as_the_feed_forward():
    """Where all layers have them, the model is a Mixtral, which other programs open."""
    two = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 48}
    assert changed("experts=8") == two
    four = {**two, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "intermediate_size": 24}
    assert changed("num_experts_per_tok=4", "experts=8") == four
    dense_first = ("dense", "sparse", "sparse", "sparse")
    assert changed("experts=8", "mlp_layer_types=1") == {
        **{name: two[name] for name in two if name != "intermediate_size"}, "mlp_layer_types": dense_first,
    }  # fmt: skip
    mixture = apply_overrides(BASE, {"experts": "8"})
    assert resolve_model_type(mixture).model_type == "mixtral"
    assert mixture.active_parameter_count() - BASE.parameter_count() == 4 * 8 * 64  # the routers
    assert changed("experts=none", "intermediate_size=96", base=mixture) == {
        "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None, "intermediate_size": 96,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="experts is 'many' .try: a whole number"):
        apply_overrides(BASE, {"experts": "many"})


def test_ntk_stretches_the_longest_wavelength_by_the_factor():
    """(bloc97 2023): the last pair of dimensions as if positions were divided, the first as before."""
    base = changed("rope_scaling=ntk:4")["rope_theta"]
    assert np.isclose((base / 10_000) ** (6 / 8), 4)  # of 8 dimensions; 10000^(6/8) is the longest wave over 2 pi


def test_fields_that_positions_dont_read_are_reset():
    """Most families can't represent them: BLOOM has no rope_theta."""
    rotary = BASE.with_changes(rope_theta=5e5, rope_scaling={"rope_type": "linear", "factor": 2.0})
    overrides = [
        "norm=layer",
        "positions=alibi",
        "embedding_norm=true",
        "biases=all",
        "head=tied",
        "attention=multi-head",
    ]
    overrides += [
        "mlp_gated=false",
        "hidden_act=gelu_pytorch_tanh",
        "intermediate_size=256",
        "max_position_embeddings=2048",
    ]
    bloom = resolve_model_type(apply_overrides(rotary, parse_overrides(overrides)))
    assert (bloom.model_type, bloom.rope_theta, bloom.rope_scaling) == ("bloom", 10_000.0, None)
    none = resolve_model_type(apply_overrides(rotary, {"positions": "none"}))
    rotary = apply_overrides(none, {"positions": "rope"})
    assert (none.model_type, rotary.rope_theta, rotary.rope_scaling) == ("granitemoehybrid", 10_000.0, None)


def test_infer_field():
    assert infer_field("alibi") == {"positions": "alibi"} and infer_field("post") == {"norm_placement": "post"}
    assert infer_field("geglu") == {"feed_forward": "geglu"} and infer_field("multi-query") == {
        "attention": "multi-query"
    }
    assert infer_field("none") is None and infer_field("wide") is None  # ambiguous, unknown


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(OVERRIDE_NAMES),
        st.sampled_from(
            ["1", "2", "7", "9", "64", "0.5", "1e-5", "true", "none", "rms", "layer", "post", "alibi", "sinusoidal"]
        )
        | st.sampled_from(["gelu", "glu", "all", "tied", "yarn:4", "ntk:4", "alternating", "multi-query", "head"])
        | st.text(min_size=1, max_size=6),
        min_size=1,
        max_size=4,
    )
)
def test_random_overrides_are_a_configuration_or_an_error(overrides):
    try:
        found = resolve_model_type(apply_overrides(BASE, overrides))
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert found == resolve_model_type(found) and config_from_hf(config_to_hf(found)) == found

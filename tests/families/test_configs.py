"""Configurations as the hub has them, mostly written by transformers 4; there and back; and what is refused."""

import json
import re
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization
from mlxlm.families import (
    FAMILIES,
    MLXLM_MODEL_TYPE,
    compatibility_warning,
    config_from_hf,
    config_to_hf,
    family_config,
    normalize_tensor_name,
    resolve_model_type,
    unrepresentable_fields,
    unsupported_feature,
)
from mlxlm.utils.errors import ConfigError

# What decides in published configurations, and how many parameters these models have.
PUBLISHED = {
    "SmolLM2-135M": (
        134_515_008,
        {
            "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
            "rope_theta": 100000, "rope_scaling": None, "rms_norm_eps": 1e-5, "attention_bias": False,
            "hidden_act": "silu", "max_position_embeddings": 8192, "rope_interleaved": False,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        {
            "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
            "tie_word_embeddings": True, "rope_theta": 500000.0, "max_position_embeddings": 131072,
            "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "eos_token_id": [128001, 128008, 128009],
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "sliding_window": 4096,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        },
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
            "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
            "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 24, "use_mrope": False,
            "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
            "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None, "rope_theta": 1000000,
        },
    ),
    "gemma-2b": (
        2_506_172_416,
        {
            "model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000,
            "hidden_act": "gelu", "hidden_activation": None, "rope_scaling": None, "rope_theta": 10000.0,
        },
    ),
    "gemma-2-2b": (
        2_614_341_888,
        {
            "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
        },
    ),
    "Phi-3-mini-128k": (
        3_821_079_552,
        {
            "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 262144,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
            "rope_scaling": {"type": "su", "short_factor": [1.05] * 48, "long_factor": [2.5] * 48},
        },
    ),
    "gpt2": (
        124_439_808,
        {
            "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
            "vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        },
    ),
    "pythia-70m": (
        70_426_624,
        {
            "model_type": "gpt_neox", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6,
            "num_attention_heads": 8, "vocab_size": 50304, "rotary_pct": 0.25, "rotary_emb_base": 10000,
            "use_parallel_residual": True, "tie_word_embeddings": False, "hidden_act": "gelu",
        },
    ),
    "opt-125m": (
        125_239_296,
        {
            "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "dropout": 0.1,
            "num_attention_heads": 12, "vocab_size": 50272, "word_embed_proj_dim": 768, "do_layer_norm_before": True,
            "_remove_final_layer_norm": False, "max_position_embeddings": 2048, "activation_function": "relu",
        },
    ),
    "falcon-7b": (
        6_921_720_704,
        {
            "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
            "vocab_size": 65024, "multi_query": True, "parallel_attn": True, "bias": False, "alibi": False,
            "new_decoder_architecture": False, "apply_residual_connection_post_layernorm": False,
        },
    ),
    "falcon-rw-1b": (
        1_311_625_216,
        {
            "model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
            "vocab_size": 50304, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True,
        },
    ),
    "bloom-560m": (
        559_214_592,
        {
            "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "n_inner": None,
            "vocab_size": 250880, "layer_norm_epsilon": 1e-5, "apply_residual_connection_post_layernorm": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    count, values = PUBLISHED[name]
    config = config_from_hf(values, name)
    assert config.parameter_count() == count
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def read(name, **changes):
    return config_from_hf({**PUBLISHED[name][1], **changes}, name)


def test_what_they_say():
    llama, mistral, qwen = read("Llama-3.2-1B"), read("Mistral-7B-v0.1"), read("Qwen2.5-0.5B")
    assert llama.rope_scaling["rope_type"] == "llama3" and llama.rope_theta == 500000.0
    assert llama.eos_ids == {128001, 128008, 128009}
    assert mistral.sliding_window == mistral.window(31) == 4096
    assert read("Mistral-7B-v0.1", sliding_window=None).sliding_window is None
    assert qwen.sliding_window is None and qwen.attention_bias and qwen.attention_out_bias is False
    phi = read("Phi-3-mini-128k")
    assert phi.rope_scaling["rope_type"] == "longrope"
    assert phi.rope_scaling["original_max_position_embeddings"] == 4096
    assert read("gemma-2b").hidden_act == "gelu_pytorch_tanh"
    assert read("pythia-70m").rotary_dims == 16
    falcon = read("falcon-7b")
    assert (falcon.num_key_value_heads, falcon.parallel_residual, falcon.shared_norm) == (1, True, True)
    assert read("bloom-560m").intermediate_size == 4096


def test_families_of_files_without_a_model_type():
    """They name the class; one that names neither could be any family."""
    values = {k: v for k, v in PUBLISHED["Mistral-7B-v0.1"][1].items() if k != "model_type"}
    named = config_from_hf({**values, "architectures": ["MistralForCausalLM"]}, "file")
    assert (named.model_type, named.sliding_window) == ("mistral", 4096)
    assert unsupported_feature({**values, "architectures": ["OtherForCausalLM"]}) == "model_type 'OtherForCausalLM'"
    for classes in ({}, {"architectures": []}, {"architectures": [5]}, {"architectures": 5}):
        assert unsupported_feature({**values, **classes}) is None
        with pytest.raises(ConfigError, match="file: missing model_type .try: one of llama, mistral"):
            config_from_hf({**values, **classes}, "file")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("SmolLM2-135M", {"hidden_act": "swish"}, "silu"),
        ("pythia-70m", {"hidden_act": "gelu_fast"}, "gelu_pytorch_tanh"),
        ("pythia-70m", {"hidden_act": "gelu_python"}, "gelu"),
        ("gpt2", {"activation_function": "gelu_accurate"}, "gelu_pytorch_tanh"),
        ("gemma-2b", {"hidden_act": "gelu", "hidden_activation": "relu"}, "relu"),
        ("gemma-2b", {"hidden_act": "relu", "hidden_activation": None}, "relu"),
        ("gemma-2b", {"hidden_act": "relu", "hidden_activation": "gelu"}, "gelu_pytorch_tanh"),
    ],
)
def test_activations(name, change, expected):
    config = read(name, **change)
    assert config.hidden_act == expected
    assert config_from_hf(config_to_hf(config)) == config


def test_the_original_length_of_phi3_is_the_outer_one():
    inner = {**PUBLISHED["Phi-3-mini-128k"][1]["rope_scaling"], "original_max_position_embeddings": 8192}
    assert read("Phi-3-mini-128k", rope_scaling=inner).rope_scaling["original_max_position_embeddings"] == 4096
    alone = read("Phi-3-mini-128k", rope_scaling=inner, original_max_position_embeddings=None)
    assert alone.rope_scaling["original_max_position_embeddings"] == 8192


def test_layers_without_number_are_no_list():
    values = {**PUBLISHED["gemma-2-2b"][1], "num_hidden_layers": 10**7}
    tracemalloc.start()
    with pytest.raises(ConfigError, match="num_hidden_layers is 10000000, at most 10000"):
        config_from_hf(values, "file")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_heads_of_their_own_size_need_not_divide_the_width():
    """Mistral and Qwen 3 of transformers run so too."""
    config = read("Qwen3-0.6B", hidden_size=1000, num_attention_heads=16, head_dim=64)
    assert config.parameter_count() > 0 and config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ConfigError, match="hidden_size 1000 is not a multiple of num_attention_heads 16 .1008 is."):
        read("Llama-3.2-1B", hidden_size=1000, num_attention_heads=16, head_dim=None)


def test_windows_by_layer():
    gemma = read("gemma-2-2b", num_hidden_layers=3)
    assert [gemma.window(i) for i in range(3)] == [4096, None, 4096]
    sliding = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
    qwen = read("Qwen2.5-0.5B", **sliding, max_window_layers=2)
    assert [qwen.window(i) for i in range(3)] == [None, None, 8]
    assert read("Qwen2.5-0.5B", **sliding, max_window_layers=0).layer_types is None
    assert read("Qwen2.5-0.5B", **sliding, max_window_layers=3).sliding_window is None
    listed = read("Qwen2.5-0.5B", **sliding, layer_types=["sliding_attention", "full_attention", "full_attention"])
    assert listed.window(0) == 8 and listed.window(1) is None
    per_layer = 4 * 14 * 64
    assert qwen.flops_per_token(100) - qwen.flops_per_token(0) == per_layer * (100 + 100 + 8)


@pytest.mark.parametrize(
    ("name", "change", "phrase"),
    [
        ("gpt2", {"model_type": "mixtral"}, "model_type 'mixtral'"),
        ("gpt2", {"model_type": None}, "model_type None"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type ['gpt2']"),
        ("SmolLM2-135M", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("opt-125m", {"activation_function": "relu2"}, "activation_function 'relu2'"),
        ("gemma-2b", {"hidden_activation": "relu2"}, "hidden_act 'relu2'"),
        ("SmolLM2-135M", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 in a llama"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("SmolLM2-135M", {"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
        ("SmolLM2-135M", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters for each"),
        ("SmolLM2-135M", {"rope_traditional": True}, "rope_traditional"),
        ("SmolLM2-135M", {"layer_types": ["sliding_attention"] * 30}, "layer_types with sliding_attention"),
        ("SmolLM2-135M", {"quantization_config": {"quant_method": "awq"}}, "quantization by 'awq'"),
    ],
)
def test_what_is_left_to_others(name, change, phrase):
    values = {**PUBLISHED[name][1], **change}
    assert phrase in unsupported_feature(values)
    with pytest.raises(ConfigError, match="file: this decoder has no "):
        config_from_hf(values, "file")


def test_errors_name_the_field_of_the_file():
    with pytest.raises(ConfigError, match="file: missing n_embd, n_head, n_inner"):
        config_from_hf({"model_type": "gpt2", "n_layer": 2, "vocab_size": 5}, "file")
    with pytest.raises(ConfigError, match="file: rope_parameters is 5, it must be an object"):
        read_with = {**PUBLISHED["SmolLM2-135M"][1], "rope_parameters": 5}
        config_from_hf(read_with, "file")


def test_what_a_family_has_no_word_for():
    config = read("SmolLM2-135M").with_changes(positions="alibi")
    assert unrepresentable_fields(config) == ["positions 'alibi'"]
    with pytest.raises(ConfigError, match="a llama model can't represent positions 'alibi'"):
        family_config(config)
    values = config_to_hf(config)
    assert values["model_type"] == "mlxlm" and values["positions"] == "alibi"
    assert config_from_hf(json.loads(json.dumps(values))) == config.with_changes(model_type="mlxlm")
    plan = {"bits": 4, "group_size": 64, "model.layers.0.self_attn.q_proj": False}
    with pytest.raises(ConfigError, match="qkv_proj fuses .*, which are quantized differently"):
        config_to_hf(read("Phi-3-mini-128k").with_changes(quantization=plan))


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"sliding_window": 9}, "mistral"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"qk_norm": "head", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}, "qwen3"),
        ({"attention_bias": True, "attention_out_bias": False}, "qwen2"),
        ({"partial_rotary_factor": 0.5}, "phi3"),
        ({"qk_norm": "projection", "norm_placement": "output"}, "olmo2"),
        ({"norm": "layer", "mlp_gated": False, "attention_bias": True, "mlp_bias": True}, "gpt_neox"),
        (
            {
                "norm": "layer", "mlp_gated": False, "attention_bias": True, "mlp_bias": True, "positions": "learned",
                "position_offset": 2, "norm_placement": "post",
            },
            "opt",
        ),
        ({"qk_norm": "head", "positions": "none"}, "mlxlm"),
    ],
)  # fmt: skip
def test_the_family_is_what_the_configuration_is(changes, family):
    config = ModelConfig(32, 2, 4, 128, 97, **changes)
    found = resolve_model_type(config)
    assert found.model_type == family == config_to_hf(config)["model_type"]
    assert found == config.with_changes(model_type=family) and resolve_model_type(found) == found
    # What goes back to a family's parts goes back to its format.
    assert resolve_model_type(found.with_changes(model_type="mlxlm")).model_type == family


def test_a_head_of_odd_size_has_no_family_but_ours():
    config = ModelConfig(14, 2, 2, 16, 97, positions="alibi")
    assert config.head_dim == 7 and config_to_hf(config)["model_type"] == "mlxlm"
    assert "nearest family, llama, has no positions 'alibi'" in compatibility_warning(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"hidden_act": "gelu"}, "mlx_lm opens .* its llama computes silu, this model uses gelu"),
        ({"norm": "layer", "mlp_gated": False, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, None),
        (
            {"positions": "none", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 500},
            "no positions 'none', no such layer_types$",
        ),
    ],
)
def test_what_other_tools_make_of_it(changes, said):
    layers = len(changes.get("layer_types", "ab"))
    found = compatibility_warning(ModelConfig(32, layers, 4, 128, 97, **changes))
    assert found is None if said is None else re.search(said, found)


def test_quantized_modules_have_the_names_of_the_decoder():
    """mlx_lm's fused projections stand for three of ours, and GPT-2's modules have other names."""
    plan = {"bits": 4, "group_size": 64, "model.h.3.attn.c_attn": {"bits": 8, "group_size": 32}, "model.wte": False}
    config = read("gpt2", quantization=plan)
    found = config.quantization
    assert module_quantization(found, "model.embed_tokens") is None
    assert module_quantization(found, "model.layers.3.self_attn.k_proj") == {
        "bits": 8,
        "group_size": 32,
        "mode": "affine",
    }
    assert module_quantization(found, "model.layers.2.self_attn.k_proj") == {
        "bits": 4,
        "group_size": 64,
        "mode": "affine",
    }
    assert config_to_hf(config)["quantization"] == plan


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("gpt2", "transformer.h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt2", "h.0.ln_1.weight", "h.0.ln_1.weight"),
        ("gpt2", "h.0.attn.bias", None),
        ("gpt2", "lm_head.weight", None),
        ("gpt2", "model.h.0.ln_1.weight", "model.h.0.ln_1.weight"),
        ("opt-125m", "decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("opt-125m", "layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("bloom-560m", "word_embeddings.weight", "transformer.word_embeddings.weight"),
        ("SmolLM2-135M", "layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        ("SmolLM2-135M", "model.layers.1.self_attn.rotary_emb.inv_freq", None),
        ("Mistral-7B-v0.1", "lm_head.weight", "lm_head.weight"),
        ("pythia-70m", "lm_head.weight", "embed_out.weight"),
        ("pythia-70m", "gpt_neox.layers.0.attention.masked_bias", None),
        ("gpt2", "score.weight", "score.weight"),
    ],
)
def test_names_in_files(name, given, wanted):
    assert normalize_tensor_name(read(name), given) == wanted


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({field for _, values in PUBLISHED.values() for field in values} | {"layer_types", "quantization"})


@settings(max_examples=400)
@given(st.sampled_from(list(PUBLISHED)), st.dictionaries(st.sampled_from(FIELDS), junk, min_size=1, max_size=3))
def test_junk_is_one_error_or_a_configuration(name, changes):
    try:
        config = read(name, **changes)
    except ConfigError as error:
        assert name in str(error) and "\n" not in str(error)
    else:
        assert config.parameter_count() > 0 and config.flops_per_token(10) > 0


SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "yarn", "factor": 4.0, "beta_fast": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


@st.composite
def configs(draw):
    """A configuration of any family, by random values of the fields that the family has."""
    family = draw(st.sampled_from([name for name in FAMILIES if name != MLXLM_MODEL_TYPE]))
    heads = draw(st.sampled_from([1, 2, 4]))
    choices = {
        "hidden_size": st.just(16 * heads), "num_hidden_layers": st.integers(1, 3), "vocab_size": st.integers(10, 99),
        "num_attention_heads": st.just(heads), "intermediate_size": st.integers(1, 99),
        "max_position_embeddings": st.integers(1, 9999), "tie_word_embeddings": st.booleans(),
        "num_key_value_heads": st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]),
        "rms_norm_eps": st.floats(1e-9, 1e-3), "head_dim": st.sampled_from([8, 16]), "rope_theta": st.floats(2, 1e7),
        "attention_bias": st.booleans(), "mlp_bias": st.booleans(), "sliding_window": st.none() | st.integers(1, 99),
        "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh", "relu"]),
        "final_logit_softcapping": st.none() | st.floats(1, 99), "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
        "parallel_residual": st.booleans(), "eos_token_id": st.none() | st.integers(0, 9) | st.just([1, 2]),
    }  # fmt: skip
    values = {"model_type": family}
    for name, strategy in choices.items():
        names = FAMILIES[family].hf_names(name)
        if names:
            values[names[0]] = draw(strategy)
    if family.startswith("qwen"):
        values |= {"use_sliding_window": draw(st.booleans()), "max_window_layers": draw(st.integers(0, 4))}
    if FAMILIES[family].hf_names("rope_theta") and family != "phi3":
        values["rope_scaling"] = draw(st.none() | st.sampled_from(SCALINGS))
    if family == "falcon":
        flags = ("alibi", "bias", "multi_query", "parallel_attn", "new_decoder_architecture")
        values |= {name: draw(st.booleans()) for name in flags}
    if draw(st.booleans()):
        values["quantization"] = {"bits": 4, "group_size": 32, "model.layers.0.mlp.down_proj": draw(st.booleans())}
    return config_from_hf(values)


@settings(max_examples=200)
@given(configs())
def test_there_and_back(config):
    values = json.loads(json.dumps(family_config(config)))
    assert unsupported_feature(values) is None
    assert config_from_hf(values) == config
    assert config_to_hf(config) == values

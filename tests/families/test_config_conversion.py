"""config.json to ModelConfig and back, for published and random configurations; presets; tensor names."""

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
    load_config,
    load_preset,
    normalize_tensor_name,
    preset_names,
    resolve_model_type,
    unsupported_feature,
)
from mlxlm.families.config_conversion import unrepresentable_fields
from mlxlm.utils.errors import ConfigError
from tests.families.published import PUBLISHED, read_published

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    count, values = PUBLISHED[name]
    config = config_from_hf(values, name)
    assert config.parameter_count() == count
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


def test_fields_of_published_configurations():
    llama, mistral, qwen = map(read_published, ("Llama-3.2-1B", "Mistral-7B-v0.1", "Qwen2.5-0.5B"))
    assert llama.rope_scaling["rope_type"] == "llama3" and llama.rope_theta == 500000.0
    assert llama.eos_token_ids == {128001, 128008, 128009}
    assert mistral.sliding_window == mistral.window(31) == 4096
    assert read_published("Mistral-7B-v0.1", sliding_window=None).sliding_window is None
    assert qwen.sliding_window is None and qwen.attention_bias and qwen.attention_out_bias is False
    phi = read_published("Phi-3-mini-128k")
    assert phi.rope_scaling["rope_type"] == "longrope"
    assert phi.rope_scaling["original_max_position_embeddings"] == 4096
    assert read_published("gemma-2b").hidden_act == "gelu_pytorch_tanh"
    assert read_published("pythia-70m").rotary_dims() == 16
    falcon = read_published("falcon-7b")
    assert (falcon.num_key_value_heads, falcon.parallel_residual, falcon.shared_norm) == (1, True, True)
    assert read_published("bloom-560m").intermediate_size == 4096


def test_architectures_replace_a_missing_model_type():
    """They name the class; one that names neither could be any family."""
    values = {k: v for k, v in PUBLISHED["Mistral-7B-v0.1"][1].items() if k != "model_type"}
    named = config_from_hf({**values, "architectures": ["MistralForCausalLM"]}, "file")
    assert (named.model_type, named.sliding_window) == ("mistral", 4096)
    assert unsupported_feature({**values, "architectures": ["OtherForCausalLM"]}) == "model_type 'OtherForCausalLM'"
    for classes in ({}, {"architectures": []}, {"architectures": [5]}, {"architectures": 5}):
        assert unsupported_feature({**values, **classes}) is None
        with pytest.raises(ConfigError, match="file: missing model_type .try: one of llama, mistral"):
            config_from_hf({**values, **classes}, "file")


def test_missing_fields_are_named():
    with pytest.raises(ConfigError, match="x.json: missing num_hidden_layers, vocab_size"):
        config_from_hf({k: v for k, v in LLAMA.items() if k not in ("num_hidden_layers", "vocab_size")}, "x.json")


def test_errors_name_the_field_of_the_file():
    with pytest.raises(ConfigError, match="file: missing n_embd, n_head, n_inner"):
        config_from_hf({"model_type": "gpt2", "n_layer": 2, "vocab_size": 5}, "file")
    with pytest.raises(ConfigError, match="file: rope_parameters is 5, it must be an object"):
        read_with = {**PUBLISHED["SmolLM2-135M"][1], "rope_parameters": 5}
        config_from_hf(read_with, "file")


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
    config = read_published(name, **change)
    assert config.hidden_act == expected
    assert config_from_hf(config_to_hf(config)) == config


def test_rope_theta_of_old_and_new_transformers():
    assert config_from_hf({**LLAMA, "rope_theta": 5e5}).rope_theta == 5e5
    new = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert config_from_hf(new).rope_theta == 5e5
    with pytest.raises(ConfigError, match="x.json: mlxlm's decoder has no rope_type 'spiral'"):
        config_from_hf({**LLAMA, "rope_scaling": {"rope_type": "spiral", "factor": 4}}, "x.json")


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"rope_scaling": 5}, "rope_scaling is 5, it must be an object"),
        ({"rope_parameters": {"rope_type": 5}}, "rope_type is 5, it must be a string"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "whose rope_theta 50.0 would be lost"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 50.0}}}, "layer types that aren't in use"),
    ],
)
def test_rope_settings_that_contradict_each_other(change, phrase):
    values = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, **change}
    with pytest.raises(ConfigError, match=f"x.json: .*{phrase}"):
        config_from_hf(values, "x.json")


def test_phi3_reads_the_original_length_outside_rope_scaling():
    inner = {**PUBLISHED["Phi-3-mini-128k"][1]["rope_scaling"], "original_max_position_embeddings": 8192}
    assert (
        read_published("Phi-3-mini-128k", rope_scaling=inner).rope_scaling["original_max_position_embeddings"] == 4096
    )
    alone = read_published("Phi-3-mini-128k", rope_scaling=inner, original_max_position_embeddings=None)
    assert alone.rope_scaling["original_max_position_embeddings"] == 4096  # as in transformers


def test_a_huge_number_of_layers_takes_no_memory():
    values = {**PUBLISHED["gemma-2-2b"][1], "num_hidden_layers": 10**7}
    tracemalloc.start()
    with pytest.raises(ConfigError, match="num_hidden_layers is 10000000, at most 10000"):
        config_from_hf(values, "file")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_heads_with_an_explicit_head_dim_need_not_divide_the_width():
    """Mistral and Qwen 3 of transformers run so too."""
    config = read_published("Qwen3-0.6B", hidden_size=1000, num_attention_heads=16, head_dim=64)
    assert config.parameter_count() > 0 and config_from_hf(config_to_hf(config)) == config
    with pytest.raises(ConfigError, match="hidden_size 1000 is not a multiple of num_attention_heads 16 .1008 is."):
        read_published("Llama-3.2-1B", hidden_size=1000, num_attention_heads=16, head_dim=None)


def test_layers_with_a_sliding_window():
    gemma = read_published("gemma-2-2b", num_hidden_layers=3)
    assert [gemma.window(i) for i in range(3)] == [4096, None, 4096]
    sliding = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 3}
    qwen = read_published("Qwen2.5-0.5B", **sliding, max_window_layers=2)
    assert [qwen.window(i) for i in range(3)] == [None, None, 8]
    assert read_published("Qwen2.5-0.5B", **sliding, max_window_layers=0).layer_types is None
    assert read_published("Qwen2.5-0.5B", **sliding, max_window_layers=3).sliding_window is None
    listed = read_published(
        "Qwen2.5-0.5B", **sliding, layer_types=["sliding_attention", "full_attention", "full_attention"]
    )
    assert listed.window(0) == 8 and listed.window(1) is None
    per_layer = 4 * 14 * 64
    assert qwen.flops_per_token(100) - qwen.flops_per_token(0) == per_layer * (100 + 100 + 8)


def test_bos_and_eos_beyond_the_vocabulary_are_dropped():
    """transformers saves GPT-2's 50256 whatever the vocabulary is."""
    values = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 99}
    left = config_from_hf({**values, "bos_token_id": 50256, "eos_token_id": [50256, 3]})
    assert left.bos_token_id is None and left.eos_token_id == [3]
    assert config_from_hf({**values, "eos_token_id": 50256}).eos_token_id is None
    for damaged in (2**40, -5, "3"):
        with pytest.raises(ConfigError, match="bos_token_id is"):
            config_from_hf({**values, "bos_token_id": damaged})


@pytest.mark.parametrize(
    ("name", "change", "phrase"),
    [
        ("gpt2", {"model_type": "mamba"}, "model_type 'mamba'"),
        ("gpt2", {"model_type": None}, "model_type None"),
        ("gpt2", {"model_type": ["gpt2"]}, "model_type ['gpt2']"),
        ("SmolLM2-135M", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ("opt-125m", {"activation_function": "xielu"}, "activation_function 'xielu'"),
        ("gemma-2b", {"hidden_activation": "xielu"}, "hidden_act 'xielu'"),
        ("SmolLM2-135M", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 in a llama"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("SmolLM2-135M", {"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
        (
            "Qwen3-0.6B",
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}, "layer_types": ["full_attention"] * 28},
            "rope_parameters for each",
        ),
        ("SmolLM2-135M", {"rope_traditional": True}, "rope_traditional"),
        ("SmolLM2-135M", {"layer_types": ["sliding_attention"] * 30}, "layer_types with sliding_attention"),
        ("SmolLM2-135M", {"quantization_config": {"quant_method": "hqq"}}, "quantization by 'hqq'"),
    ],
)
def test_unsupported_features(name, change, phrase):
    values = {**PUBLISHED[name][1], **change}
    assert phrase in unsupported_feature(values)
    with pytest.raises(ConfigError, match="file: mlxlm's decoder has no "):
        config_from_hf(values, "file")


def test_unrepresentable_fields():
    config = read_published("SmolLM2-135M").with_changes(positions="alibi")
    assert unrepresentable_fields(config) == ["positions 'alibi'"]
    with pytest.raises(ConfigError, match="a llama model can't represent positions 'alibi'"):
        family_config(config)
    values = config_to_hf(config)
    assert values["model_type"] == "mlxlm" and values["positions"] == "alibi"
    assert config_from_hf(json.loads(json.dumps(values))) == config.with_changes(model_type="mlxlm")
    plan = {"bits": 4, "group_size": 64, "model.layers.0.self_attn.q_proj": False}
    with pytest.raises(ConfigError, match="qkv_proj fuses .*, which are quantized differently"):
        config_to_hf(read_published("Phi-3-mini-128k").with_changes(quantization=plan))


def test_quantized_modules_get_the_names_of_the_decoder():
    """mlx_lm's fused projections stand for three of ours, and GPT-2's modules have other names."""
    plan = {"bits": 4, "group_size": 64, "model.h.3.attn.c_attn": {"bits": 8, "group_size": 32}, "model.wte": False}
    config = read_published("gpt2", quantization=plan)
    result = config.quantization
    assert module_quantization(result, "model.embed_tokens") is None
    for layer, chosen in ((3, {"bits": 8, "group_size": 32}), (2, {"bits": 4, "group_size": 64})):
        found = module_quantization(result, f"model.layers.{layer}.self_attn.k_proj")
        assert found == {**chosen, "mode": "affine"}
    assert config_to_hf(config)["quantization"] == plan


any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


FIELDS = sorted({field for _, values in PUBLISHED.values() for field in values} | {"layer_types", "quantization"})


@settings(max_examples=60)
@given(st.sampled_from(list(PUBLISHED)), st.dictionaries(st.sampled_from(FIELDS), any_json, min_size=1, max_size=3))
def test_random_values_are_an_error_or_a_configuration(name, changes):
    try:
        config = read_published(name, **changes)
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
        "max_position_embeddings": st.integers(1, 9999),
        "tie_word_embeddings": st.just(False) if family == "phi" else st.booleans(),  # its head has a bias
        "num_key_value_heads": st.sampled_from([n for n in (1, 2, 4) if heads % n == 0]),
        "rms_norm_eps": st.floats(1e-9, 1e-3), "head_dim": st.sampled_from([8, 16]), "rope_theta": st.floats(2, 1e7),
        "attention_bias": st.booleans(), "mlp_bias": st.booleans(), "sliding_window": st.none() | st.integers(1, 99),
        "hidden_act": st.sampled_from(["silu", "gelu_pytorch_tanh", "relu"]),
        "final_logit_softcapping": st.none() | st.floats(1, 99), "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
        "parallel_residual": st.booleans(), "eos_token_id": st.none() | st.integers(0, 9) | st.just([1, 2]),
        "num_experts": st.integers(3, 9), "num_experts_per_tok": st.integers(1, 3), "norm_topk_prob": st.booleans(),
        "moe_intermediate_size": st.integers(1, 99), "routed_scaling_factor": st.floats(0.1, 9),
        "shared_expert_intermediate_size": st.integers(1, 99), "clip_qkv": st.none() | st.floats(0.1, 9),
        "swiglu_limit": st.floats(0.1, 9), "swiglu_alpha": st.floats(0.1, 9),
    }  # fmt: skip
    values = {"model_type": family, "block_auto_adjust_ff_dim": False}  # of LFM2: two thirds of a small width are 0
    for name, strategy in choices.items():
        names = FAMILIES[family].hf_names(name)
        if names:
            values[names[0]] = draw(strategy)
    if family.endswith("_moe"):
        values["num_hidden_layers"] = draw(st.integers(2, 4))
        values |= {"mlp_only_layers": draw(st.sampled_from([[], [0]])), "decoder_sparse_step": draw(st.integers(1, 2))}
        values["num_dense_layers"] = draw(st.integers(0, 1))
    is_latent = family in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    if is_latent:
        values["num_key_value_heads"] = heads
    if family.endswith("_moe") or is_latent:
        values |= {"first_k_dense_replace": draw(st.integers(0, values["num_hidden_layers"] - 1))}
        values |= {"n_shared_experts": draw(st.integers(0, 2)), "n_group": 1, "topk_group": 1}
    if "linear_num_key_heads" in FAMILIES[family].fields:
        values["hidden_act"] = "silu"
        values["full_attention_interval"] = draw(st.integers(1, values["num_hidden_layers"]))
    if family.startswith("lfm2"):
        values["full_attn_idxs"] = [draw(st.integers(0, values["num_hidden_layers"] - 1))]
    if family == "granitemoehybrid":
        types = [draw(st.sampled_from(["mamba", "attention"])) for _ in range(values["num_hidden_layers"] - 1)]
        values |= {
            "hidden_act": "silu", "layer_types": [*types, "full_attention"], "mamba_n_heads": 2 * heads,
            "mamba_d_head": draw(st.sampled_from([16, "auto"])), "num_local_experts": draw(st.sampled_from([0, 3])),
            "mamba_n_groups": draw(st.integers(1, 2)), "shared_intermediate_size": draw(st.integers(1, 99)),
            "position_embedding_type": draw(st.sampled_from([None, "rope"])),
            "time_step_limit": draw(st.sampled_from([(0.0, {"__float__": "Infinity"}), (0.1, 2.0), (0.1, 1e39)])),
        }  # fmt: skip
    if family == "nemotron_h":
        blocks = [draw(st.sampled_from(["M", "M-", "ME", "*", "*-", "*E"])) for _ in range(draw(st.integers(0, 4)))]
        values |= {"hybrid_override_pattern": "*" + "".join(blocks), "n_group": 1, "topk_group": 1}
        values |= {"time_step_limit": draw(st.sampled_from([(0.0, {"__float__": "Infinity"}), (0.1, 2.0)]))}
    if family.startswith("qwen"):
        values |= {"use_sliding_window": draw(st.booleans()), "max_window_layers": draw(st.integers(0, 4))}
    if FAMILIES[family].hf_names("rope_theta") and family != "phi3":
        local = FAMILIES[family].has_local_rope  # of these, transformers doesn't read "type"
        known = [scaling for scaling in SCALINGS if "rope_type" in scaling or not local]
        values["rope_scaling"] = draw(st.none() | st.sampled_from(known))
    if family == "falcon":
        flags = ("alibi", "bias", "multi_query", "parallel_attn", "new_decoder_architecture")
        values |= {name: draw(st.booleans()) for name in flags}
    if draw(st.booleans()):
        values["quantization"] = {"bits": 4, "group_size": 32, "model.layers.0.mlp.down_proj": draw(st.booleans())}
    return config_from_hf(values)


@settings(max_examples=40)
@given(configs())
def test_round_trip(config):
    values = json.loads(json.dumps(family_config(config)))
    assert unsupported_feature(values) is None
    assert config_from_hf(values) == config
    assert config_to_hf(config) == values


def test_presets_span_the_range_and_are_named_by_their_size():
    counts = [load_preset(name).parameter_count() for name in preset_names()]
    assert counts == sorted(counts)
    assert counts[0] < 0.4e6 and counts[-1] > 1e9
    for name, count in zip(preset_names(), counts, strict=True):
        stated = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert stated / 1.2 < count < stated * 1.2


def test_every_preset_quantizes_in_every_layer():
    for name in preset_names():
        c = load_preset(name)
        assert c.hidden_size % 32 == 0 and c.intermediate_size % 32 == 0
        assert c.num_attention_heads * c.head_dim % 32 == 0


def test_unknown_preset_lists_the_presets():
    with pytest.raises(ConfigError, match="no preset '2m'.*0.3m, 1m"):
        load_preset("2m")


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"hidden_size": 1e999}'])
def test_malformed_config_is_one_error(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="config.json"):
        load_config(tmp_path / "config.json")


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
        (
            {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
             "quantization": {"bits": 4, "group_size": 64}},
            "mlxlm",
        ),
    ],
)  # fmt: skip
def test_resolve_model_type(changes, family):
    config = ModelConfig(32, 2, 4, 128, 97, **changes)
    resolved = resolve_model_type(config)
    assert resolved.model_type == family == config_to_hf(config)["model_type"]
    assert resolved == config.with_changes(model_type=family) and resolve_model_type(resolved) == resolved
    # What goes back to a family's parts goes back to its format.
    assert resolve_model_type(resolved.with_changes(model_type="mlxlm")).model_type == family


def test_no_family_has_an_odd_head_dim():
    config = ModelConfig(14, 2, 2, 16, 97, positions="alibi")
    assert config.head_dim == 7 and config_to_hf(config)["model_type"] == "mlxlm"
    assert "nearest family, llama, has no positions 'alibi'" in compatibility_warning(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"hidden_act": "gelu"}, "mlx_lm can.t run .* its llama computes silu, this model uses gelu"),
        ({"norm": "layer", "mlp_gated": False, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, None),
        (
            {"positions": "none", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 500},
            "no positions 'none'",
        ),
    ],
)
def test_compatibility_warning(changes, message):
    layers = len(changes.get("layer_types", "ab"))
    result = compatibility_warning(ModelConfig(32, layers, 4, 128, 97, **changes))
    assert result is None if message is None else re.search(message, result)


@pytest.mark.parametrize(
    ("name", "name_in_file", "expected"),
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
def test_normalize_tensor_name(name, name_in_file, expected):
    assert normalize_tensor_name(read_published(name), name_in_file) == expected

"""Architectures that mlx_lm runs, as transformers 5 saves them: the logits are those of transformers, or loading fails
with the field that mlx_lm doesn't implement.
"""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.cache import make_cache
from mlxlm.checkpoint.load import load_model
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.utils.errors import CheckpointError
from tests.small_models import change_config

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
transformers_oracle = pytest.importorskip("tests.transformers_oracle", reason="the oracle is transformers")
pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
logits_of = transformers_oracle.logits_of

VOCABULARY, LENGTH = 97, 45
TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (2, LENGTH))
BASE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
}  # fmt: skip
SMALL = {"hidden_size": 32, "num_hidden_layers": 2}
HALF = {**BASE, "hidden_size": 64, "rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5}}
WINDOWS = {**BASE, "num_hidden_layers": 4, "sliding_window": 12, "head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 123.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 123.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 123.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 3.5, 4.5],
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip

CASES = {
    "phimoe": {**BASE, **EXPERTS, "attention_bias": True, "lm_head_bias": True},
    "minicpm3": {**BASE, **LATENT, "tie_word_embeddings": False},
    "exaone_moe": {**WINDOWS, **EXPERTS},
    "nemotron": HALF,
    "mamba": {**SMALL, "state_size": 8, "time_step_rank": 4},
    "mamba2": {**SMALL, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "apertus": BASE,
    "hunyuan_v1_dense": {**BASE, "head_dim": 8},
    "granitemoe": {**BASE, **EXPERTS},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "falcon_mamba": {**SMALL, "state_size": 8, "time_step_rank": 4},
    "gemma3n_text": {
        **{name: value for name, value in WINDOWS.items() if name != "rope_parameters"}, "num_hidden_layers": 10,
        "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": None, "tie_word_embeddings": True,
    },
    "glm_moe_dsa": {**BASE, **LATENT, **ROUTED, "index_topk": 64, "index_head_dim": 8, "index_n_heads": 2},
    "nanochat": BASE,
    "olmo_hybrid": {
        **BASE, "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "solar_open": {**BASE, **ROUTED, "head_dim": 8, "first_k_dense_replace": 0},
}  # fmt: skip
FORMS_OF_GELU = {"gpt_bigcode"}


def saved(folder, model_type, changes=()):
    oracle = transformers_oracle.make_oracle(model_type, {**CASES[model_type], **dict(changes)}, VOCABULARY, "eager")
    oracle.save_pretrained(folder)
    return oracle


def logits(model, tokens=TOKENS, **options):
    return np.array(model(mx.array(tokens), **options).astype(mx.float32))


def error(found, wanted):
    return float(np.abs(found - wanted).max() / wanted.std())


@pytest.mark.parametrize("model_type", CASES)
def test_logits_are_those_of_transformers(model_type, tmp_path):
    wanted = logits_of(saved(tmp_path, model_type), TOKENS)
    model, _ = load_model(tmp_path)
    limit = 2e-3 if model_type in FORMS_OF_GELU else 5e-4
    assert error(logits(model), wanted) < limit
    step, caches, first = DecodeStep(model), make_cache(model), TOKENS[:1]
    found = [logits(model, first[:, :20], cache=caches)]
    found += [np.array(step(mx.array(first[:, i : i + 1]), caches))[:, None] for i in (20, 21)]
    assert error(np.concatenate(found, axis=1), wanted[:1, :22]) < 2 * limit


OTHERS = {
    "what mlx_lm ignores": ("exaone_moe", {"rope_parameters": YARN}),
    "growing": ("granitemoe", {"max_position_embeddings": 20, "rope_parameters": {**YARN, "rope_type": "dynamic"}}),
    "HunYuan's": ("hunyuan_v1_dense", {"rope_parameters": {**YARN, "rope_type": "dynamic", "alpha": 50.0}}),
    "one form of longrope": ("granitemoe", {"rope_parameters": {**LONGROPE, "long_factor": LONGROPE["short_factor"]}}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_rope_scaling(name, tmp_path):
    model_type, changes = OTHERS[name]
    oracle = saved(tmp_path, model_type, changes)
    assert error(logits(load_model(tmp_path)[0]), logits_of(oracle, TOKENS)) < 5e-4


@pytest.mark.parametrize("model_type", ["granitemoe", "exaone_moe"])
def test_greedy_tokens_with_a_cache(model_type, tmp_path):
    oracle = saved(tmp_path, model_type)
    prompt = torch.from_numpy(TOKENS[:1, :18])
    with torch.no_grad():
        wanted = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    found = greedy_tokens(DecodeStep(load_model(tmp_path)[0]), TOKENS[0, :18].tolist(), 16)
    assert list(found) == wanted[0, 18:].tolist()


@pytest.mark.parametrize("model_type", ["granitemoe", "exaone_moe"])
def test_folders_that_mlx_quantized(model_type, tmp_path):
    oracle = saved(tmp_path, model_type, {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64})
    model, _ = load_model(tmp_path)
    wanted = logits_of(oracle, TOKENS)
    plan = {"group_size": 32, "bits": 8}
    nn.quantize(model, **plan, class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization": plan}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    found = logits(load_model(tmp_path)[0])
    assert error(found, logits(model)) < 1e-4
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.98  # a token of another expert aside


LIMITS = {
    "longrope": ("granitemoe", {"rope_parameters": LONGROPE}, 16),
    "longrope, of Phi": ("phimoe", {"rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.4}}, 16),
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_only_longer_texts_would_show_is_a_limit_of_the_context(name, tmp_path):
    model_type, changes, limit = LIMITS[name]
    oracle = saved(tmp_path, model_type, changes)
    model, config = load_model(tmp_path)
    assert config.max_position_embeddings == limit
    short, longer = TOKENS[:, :limit], TOKENS[:, : limit + 2]
    assert error(logits(model, short), logits_of(oracle, short)) < 5e-4
    assert error(logits(model, longer), logits_of(oracle, longer)) > 0.01


REFUSED = {
    "granitemoe": (
        {"rope_parameters": {**BASE["rope_parameters"], "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5, .* rotates whole heads",
    ),
    "mamba2": ({"n_groups": 2}, "n_groups is 2"),
    "mamba": ({"layer_norm_epsilon": 1e-3}, "layer_norm_epsilon is 0.001"),
    "nanochat": ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001"),
    "glm_moe_dsa": ({"indexer_types": ["full", "shared"]}, "indexer_types has shared indexers"),
    "minicpm3": ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "nemotron": ({"hidden_act": "silu"}, "hidden_act is 'silu', mlx_lm's nemotron computes relu2"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_mlx_lm_ignores_is_refused(model_type, tmp_path):
    changes, expected = REFUSED[model_type]
    saved(tmp_path, model_type, changes)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: .*{expected}"):
        load_model(tmp_path)


NATIVE_REFUSED = {
    "qwen2_moe": ({**EXPERTS, "norm_topk_prob": True}, "norm_topk_prob is True"),
    "glm4_moe": ({**ROUTED, "n_group": 2}, "n_group is 2"),
    "gpt_oss": ({**WINDOWS, **EXPERTS, "swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    "deepseek_v3": ({**LATENT, **ROUTED, "rope_interleave": False}, "rope_interleave is False"),
}


@pytest.mark.parametrize("model_type", NATIVE_REFUSED)
def test_what_mlx_lm_ignores_is_refused_of_families_of_the_decoder(model_type, tmp_path):
    """If the decoder lacks their RoPE, mlx_lm would run them."""
    changes, expected = NATIVE_REFUSED[model_type]
    oracle = transformers_oracle.make_oracle(model_type, {**BASE, "head_dim": 8, **changes}, VOCABULARY, "eager")
    oracle.save_pretrained(tmp_path)
    change_config(tmp_path, rope_parameters={"rope_type": "telechat3-yarn", "rope_theta": 1e4}, rope_scaling=None)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: .*{expected}"):
        load_model(tmp_path)

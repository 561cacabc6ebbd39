"""Every family against transformers: logits, greedy tokens, and folders that it opens again."""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.cache import make_cache
from mlxlm.checkpoint.huggingface import write, write_checkpoint
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.counts import recurrent_state_bytes
from mlxlm.config.overrides import apply_overrides, parse_overrides
from mlxlm.families import FAMILIES, MLXLM_MODEL_TYPE, config_from_hf, config_to_hf, resolve_model_type, weight_mappings
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model import Decoder

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install transformers)")
transformers_oracle = pytest.importorskip("tests.transformers_oracle")
logits_of = transformers_oracle.logits_of

VOCABULARY, LENGTH = 97, 45
HF_FAMILIES = [name for name in FAMILIES if name != MLXLM_MODEL_TYPE]
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
OPT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
    "max_position_embeddings": 128, "word_embed_proj_dim": 32,
}  # fmt: skip
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
RW_FALCON = {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
QUERY_SCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}
QUERY_SCALE["original_max_position_embeddings"] = 10
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.0, 4.0],
    "partial_rotary_factor": 0.75,
}  # fmt: skip
WINDOWS = {**LLAMA, "num_hidden_layers": 4, "sliding_window": 12, "head_dim": 8}
TWO_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 200.0},
}
CONVOLUTIONS = {**LLAMA, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"]}
LINEAR = {  # with the usual epsilon, the norm of small outputs makes the error of either float32 model 3e-4
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
MAMBA = {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 4, "mamba_n_groups": 2,
    "mamba_d_head": 16, "mamba_d_state": 12,
}  # fmt: skip
NEMOTRON = {
    **LLAMA, "head_dim": 12, "mamba_num_heads": 4, "n_groups": 2, "mamba_head_dim": 16, "ssm_state_size": 12,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GLM_EXPERTS = {"head_dim": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 20}

LATENT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
LLAMA4 = {
    **LLAMA, "num_hidden_layers": 4, "head_dim": 12, "intermediate_size": 20, "intermediate_size_mlp": 36,
    "num_local_experts": 6,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}
GEMMA4 = {
    **WINDOWS, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_E2B = {
    **GEMMA4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA4_31B = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_26B = {
    **GEMMA4_31B, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 20,
}  # fmt: skip

CASES = {
    "llama": ("llama", LLAMA),
    "llama tied, biased": ("llama", {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3.1": ("llama", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama linear": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama dynamic": (
        "llama",
        {**LLAMA, "max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    ),
    "llama yarn": ("llama", {**LLAMA, "rope_parameters": YARN}),
    "llama yarn, tempered": (
        "llama",
        {**LLAMA, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}},
    ),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 12, "head_dim": 12}),
    "mistral without window": ("mistral", {**LLAMA, "sliding_window": None}),
    "qwen2": ("qwen2", LLAMA),
    "qwen2 sliding": (
        "qwen2",
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 12}),
    "qwen3 of odd width": ("qwen3", {**LLAMA, "hidden_size": 30, "head_dim": 12}),
    "phi3 with wide heads": (
        "phi3",
        {**LLAMA, "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "olmo2 with wide heads": ("olmo2", {**LLAMA, "head_dim": 12}),
    "gemma": ("gemma", {**LLAMA, "head_dim": 12}),
    "gemma2": (
        "gemma2",
        {
            **LLAMA,
            "head_dim": 12,
            "sliding_window": 12,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi": ("phi", LLAMA),
    "phi, qk-norm": ("phi", {**LLAMA, "qk_layernorm": True}),
    "phi3": ("phi3", {**LLAMA, "sliding_window": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "phi3 longrope, short": ("phi3", {**LLAMA, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "phi3 longrope, long": ("phi3", {**LLAMA, "original_max_position_embeddings": 16, "rope_parameters": LONGROPE}),
    "olmo2": ("olmo2", LLAMA),
    "gpt2": ("gpt2", GPT2),
    "gpt2 wide": ("gpt2", {**GPT2, "n_inner": 40, "activation_function": "relu"}),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox sequential": ("gpt_neox", {**NEOX, "use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", OPT),
    "opt without biases": ("opt", {**OPT, "enable_bias": False}),
    "opt 350m": ("opt", {**OPT, "do_layer_norm_before": False}),
    "falcon 7b": ("falcon", FALCON),
    "falcon 40b": ("falcon", NEW_FALCON),
    "falcon 11b": ("falcon", {**NEW_FALCON, "num_ln_in_parallel_attn": 1}),
    "falcon rw": ("falcon", RW_FALCON),
    "smollm3": ("smollm3", {**LLAMA, "num_hidden_layers": 4}),
    "gemma3": ("gemma3_text", WINDOWS | {"num_hidden_layers": 6, "rope_parameters": TWO_ROPES}),
    "gemma3 without windows": ("gemma3_text", {**WINDOWS, "layer_types": ["full_attention"] * 4}),
    "gemma4 E2B": ("gemma4_text", GEMMA4_E2B),
    "gemma4 31B": ("gemma4_text", GEMMA4_31B),
    "gemma4 26B-A4B": ("gemma4_text", GEMMA4_26B),
    "olmo": ("olmo", {**LLAMA, "clip_qkv": 0.4}),
    "olmo3": ("olmo3", WINDOWS),
    "olmo3 yarn": ("olmo3", {**WINDOWS, "rope_parameters": {**TWO_ROPES, "full_attention": YARN}}),
    "granite": (
        "granite",
        {
            **LLAMA,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": ("starcoder2", {**LLAMA, "sliding_window": 12}),
    "starcoder2 without biases": ("starcoder2", {**LLAMA, "use_bias": False}),
    "stablelm": ("stablelm", {**LLAMA, "hidden_size": 64, "use_qkv_bias": True}),
    "stablelm, qk-norm": ("stablelm", {**LLAMA, "hidden_size": 64, "qk_layernorm": True}),
    "stablelm parallel": ("stablelm", {**LLAMA, "hidden_size": 64, "use_parallel_residual": True}),
    "ministral": ("ministral", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "ministral3": ("ministral3", {**LLAMA, "head_dim": 12, "rope_parameters": QUERY_SCALE}),
    "ministral3 with windows": ("ministral3", {**WINDOWS, "rope_parameters": QUERY_SCALE}),
    "cwm": ("cwm", {**WINDOWS, "rope_parameters": LLAMA3}),
    "exaone4": ("exaone4", WINDOWS),
    "exaone4 without windows": ("exaone4", {**WINDOWS, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "seed_oss": ("seed_oss", {**LLAMA, "head_dim": 12, "attention_out_bias": True}),
    "arcee": ("arcee", {**LLAMA, "mlp_bias": True}),
    "cohere": ("cohere", {**LLAMA, "logit_scale": 0.3}),
    "cohere, qk-norm": ("cohere", {**LLAMA, "hidden_size": 48, "use_qk_norm": True}),
    "cohere2": ("cohere2", WINDOWS),
    "cohere2 without windows": ("cohere2", {**WINDOWS, "layer_types": ["full_attention"] * 4}),
    "glm": ("glm", {**LLAMA, "head_dim": 16}),
    "glm4": ("glm4", {**LLAMA, "head_dim": 16, "attention_bias": True}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 6, "sliding_window": 12, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {**LLAMA, "head_dim": 12, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, some layers": (
        "qwen3_moe",
        {
            **WINDOWS,
            **EXPERTS,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "attention_bias": True,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {**LLAMA, **EXPERTS, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 36},
    ),
    "olmoe": ("olmoe", {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.4}),
    "glm4_moe": ("glm4_moe", {**LLAMA, **GLM_EXPERTS, "n_routed_experts": 6, "use_qk_norm": True}),
    "glm4_moe, groups": (
        "glm4_moe",
        {
            **LLAMA,
            **GLM_EXPERTS,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.7,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3 without q_lora_rank": (
        "deepseek_v3",
        {
            **LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": MSCALE,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **LATENT,
            "topk_method": "group_limited_greedy",
            "rope_parameters": MSCALE,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
        },
    ),
    "deepseek_v2, greedy": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_shared_experts": 1}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {**LATENT, "num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "lfm2": ("lfm2", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2, biased": ("lfm2", {**CONVOLUTIONS, "conv_bias": True, "conv_L_cache": 5, "tie_word_embeddings": False}),
    "lfm2_moe": ("lfm2_moe", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.7}),
    "qwen3_next": (
        "qwen3_next",
        {**LLAMA, **EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 36, "attention_bias": True},
    ),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 12,
            "floor_scale": 10,
            "attn_scale": 0.7,
            "no_rope_layer_interval": 3,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4, other layers": (
        "llama4_text",
        {
            **LLAMA4,
            "num_experts_per_tok": 2,
            "attention_chunk_size": 9,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "use_qk_norm": False,
            "layer_types": ["full_attention", "chunked_attention", "full_attention", "chunked_attention"],
        },
    ),
    "llama4 without experts": (
        "llama4_text",
        {
            **LLAMA4,
            "moe_layers": [],
            "attention_chunk_size": None,
            "no_rope_layers": [1] * 4,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": ("ernie4_5", {**LLAMA, "head_dim": 12, "use_bias": True}),
    "helium": ("helium", {**LLAMA, "head_dim": 8}),
    "exaone": ("exaone", {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "dots1": (
        "dots1",
        {
            **WINDOWS,
            **GLM_EXPERTS,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "max_window_layers": 2,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": True,
        },
    ),
    "minimax_m2": (
        "minimax_m2",
        {
            **LLAMA,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": ("qwen3_5_text", {**LLAMA, **LINEAR, "head_dim": 16, "attention_bias": True}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**LLAMA, **EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 36},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **LLAMA,
            **MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 36,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 3.0,
        },
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {
            **LLAMA,
            **MAMBA,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "attention_bias": True,
            "time_step_limit": (1.0, 1.5),
        },
    ),
    "granitemoehybrid without mamba": (
        "granitemoehybrid",
        {
            **LLAMA,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "ME*MEM-*",
            "moe_intermediate_size": 20,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_shared_expert_intermediate_size": 24,
            "routed_scaling_factor": 1.7,
        },
    ),
    "nemotron_h, dense": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "use_bias": True, "mlp_bias": True},
    ),
    "gpt_oss": ("gpt_oss", {**WINDOWS, **EXPERTS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt_oss, other limits": (
        "gpt_oss",
        {
            **LLAMA,
            "head_dim": 12,
            "num_local_experts": 6,
            "swiglu_limit": 0.4,
            "swiglu_alpha": 1.3,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "bloom": ("bloom", BLOOM),
    "bloom of 6 heads": ("bloom", {**BLOOM, "hidden_size": 48, "n_head": 6}),
}

ATTENTION = {"gemma2": "eager"}  # the default leaves out the soft cap there; Falcon's eager one adds ALiBi twice


def make_oracle(model_type, sizes):
    return transformers_oracle.make_oracle(model_type, sizes, VOCABULARY, ATTENTION.get(model_type))


@pytest.fixture(scope="module", params=list(CASES), ids=lambda name: name.replace(" ", "-"))
def case(request, tmp_path_factory):
    oracle = make_oracle(*CASES[request.param])
    folder = tmp_path_factory.mktemp("model")
    oracle.save_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    return oracle, *load_checkpoint(checkpoint), checkpoint.tensors


TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (2, LENGTH))


def test_every_family_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(HF_FAMILIES)


def test_logits(case):
    oracle, model, _, _ = case
    expected = logits_of(oracle, TOKENS)
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4 * max(1, expected.std()))


# One of each family, and those whose positions depend on the length of the text.
DISTINCT = list({family: name for name, (family, _) in reversed(CASES.items())}.values())
DISTINCT += ["gemma4 31B", "gemma4 26B-A4B", "llama dynamic", "phi3 longrope, long", "opt 350m", "falcon rw"]
distinct_cases = pytest.mark.parametrize("case", DISTINCT, indirect=True)


@distinct_cases
def test_greedy_tokens(case):
    """16 tokens with caches on both sides."""
    oracle, model, _, _ = case
    prompt = torch.from_numpy(TOKENS[:1, :18])
    with torch.no_grad():
        expected = oracle.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    found = greedy_tokens(DecodeStep(model), TOKENS[0, :18].tolist(), 16, prefill_step_size=5)
    assert list(found) == expected[0, 18:].tolist()


@pytest.mark.parametrize(("prompt", "new"), [(12, 5), (17, 5), (14, 8), (16, 99)], ids=["short", "long", "across", "n"])
def test_longrope_while_a_text_grows(prompt, new):
    """Up to 16 tokens a text has the short factors, whatever it may become; the 17th has the whole text read again."""
    kind, sizes = CASES["phi3 longrope, long"]
    oracle = make_oracle(kind, {**sizes, "sliding_window": None})
    config = config_from_hf(oracle.config.to_dict())
    assert config.longrope_original_length == 16
    model = Decoder(config)
    weights = {name: lazy_tensor(mx.array(value.numpy())) for name, value in oracle.state_dict().items()}
    modules = to_decoder_weights(weight_mappings(config), weights, "oracle")
    model.load_weights([(name, tensor.read()) for name, tensor in modules.items()])
    wanted = oracle.generate(
        torch.from_numpy(TOKENS[:1, :prompt]), max_new_tokens=min(new, 8), do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    seen = []

    class Recording(DecodeStep):
        def __call__(self, tokens, caches):
            seen.append(super().__call__(tokens, caches))
            return seen[-1]

    tokens = greedy_tokens(Recording(model), TOKENS[0, :prompt].tolist(), new, prefill_step_size=5)
    found = [next(tokens) for _ in wanted.logits]
    assert found == wanted.sequences[0, prompt:].tolist()
    np.testing.assert_allclose(
        np.array(mx.concatenate(seen[: len(found)])), np.array([row[0] for row in wanted.logits]), atol=1e-4
    )


SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 8},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 8},
    "opt": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "ffn_dim": 96},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8},
    "gpt_neox": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 96},
}
SIZES["stablelm"] = {**SIZES["gpt_neox"], "num_key_value_heads": 8}
SIZES |= dict.fromkeys(("glm4_moe", "glm4_moe_lite", "helium", "phi"), SIZES["stablelm"])
LINEAR_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
SIZES |= dict.fromkeys(("deepseek_v3", *LINEAR_FAMILIES), {**SIZES["stablelm"], "num_hidden_layers": 4})
SIZES["dots1"] = {**SIZES["stablelm"], "n_routed_experts": 4, "num_experts_per_tok": 2}
SIZES["deepseek_v2"] = {**SIZES["stablelm"], "num_experts_per_tok": 2}
SIZES["granitemoehybrid"] = {**SIZES["stablelm"], "layer_types": ["linear_attention", "full_attention", "mamba"]}
SIZES["opt"]["word_embed_proj_dim"] = 64
USUAL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 32, "intermediate_size": 96}


@pytest.mark.parametrize("model_type", [*HF_FAMILIES, "gemma4_unified_text"])
def test_defaults_are_those_of_transformers(model_type):
    sizes = {"vocab_size": 99, **SIZES.get(model_type, USUAL)}
    whole = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    own = config_from_hf({"model_type": model_type, **sizes})
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert own == config_from_hf({"model_type": model_type, **whole}).with_changes(**no_tokens)


def test_saved_models_open_in_transformers(case, tmp_path):
    oracle, _, config, tensors = case
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    stored = {name: tensor.read() for name, tensor in to_file_weights(weight_mappings(config), tensors).items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), stored, metadata={"format": "pt"})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again.set_attn_implementation(oracle.config._attn_implementation)
    assert type(again) is type(oracle)
    for name, value in oracle.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    np.testing.assert_array_equal(logits_of(again, TOKENS), logits_of(oracle, TOKENS))
    assert config_from_hf(again.config.to_dict()) == config


@distinct_cases
def test_counts_are_those_of_the_arrays(case):
    _, model, config, _ = case
    arrays = dict(tree_flatten(model.parameters()))
    assert config.parameter_count() == sum(value.size for value in arrays.values())
    tables = ("embed_tokens.weight", "embed_positions.weight", "embed_tokens_per_layer.weight")
    stacks = {name for name, value in arrays.items() if "switch_mlp" in name and value.ndim == 3}
    others = {*stacks, *(name for name in arrays if name.endswith((*tables, ".bias")))}
    matrices = [value.size for name, value in arrays.items() if value.ndim > 1 and name not in others]
    experts = [arrays[name].size // len(arrays[name]) for name in stacks]
    matrices += [(config.num_experts_per_tok or 0) * size for size in experts]
    head = VOCABULARY * config.hidden_size if config.tie_word_embeddings else 0
    state = sum(mixer.state_flops for mixer, *_ in config.layer_sublayers)
    assert config.flops_per_token(0) == 2 * (sum(matrices) + head) + state
    cache = make_cache(model)
    model(mx.array(TOKENS[:1]), cache)
    cached = sum(part.nbytes for layer in cache for part in layer.state)
    assert config.kv_bytes_per_token(4) * LENGTH + recurrent_state_bytes(config, 4) == cached


LAYER = "norm=layer feed_forward=gelu biases=all attention=multi-head"
OVERRIDES = {
    "swiglu, multi-query": ("attention=multi-query", "llama"),
    "glu": ("feed_forward=glu head=tied", "llama"),
    "geglu, ntk": ("feed_forward=geglu rope_scaling=ntk:4", "llama"),
    "reglu, biased": ("feed_forward=reglu biases=all", "llama"),
    "linear": ("rope_scaling=linear:4", "llama"),
    "dynamic": ("rope_scaling=dynamic:2 max_position_embeddings=20", "llama"),
    "llama3": ("rope_scaling=llama3:8:32", "llama"),
    "yarn": ("rope_scaling=yarn:4:32", "llama"),
    "window": ("window=7", "mistral"),
    "alternating windows": ("window=7 layer_types=alternating qk_norm=head", "qwen3"),
    "norms of outputs": ("norm_placement=output qk_norm=projection", "olmo2"),
    "half of a head": ("partial_rotary_factor=0.5", "phi3"),
    "alternating windows, caps": (
        "window=7 layer_types=alternating softcap=2 final_logit_softcapping=3 query_pre_attn_scalar=5 "
        f"norm_placement=both norm_unit_offset=true hidden_act=gelu_pytorch_tanh embedding_multiplier={32**0.5}",
        "gemma2",
    ),
    "learned": (f"{LAYER} positions=learned head=tied", "gpt2"),
    "post-norm": (f"{LAYER} positions=learned position_offset=2 norm_placement=post".replace("gelu", "relu"), "opt"),
    "layer norms": (LAYER, "gpt_neox"),
    "alibi": (f"{LAYER} positions=alibi alibi_scaled=true head=tied", "falcon"),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_that_a_family_can_represent_open_in_transformers(name, tmp_path):
    """A model made by overrides and saved as the family that can represent it."""
    overrides, family = OVERRIDES[name]
    base = ModelConfig(32, 2, 4, 128, VOCABULARY, num_key_value_heads=2, max_position_embeddings=64)
    config = resolve_model_type(apply_overrides(base, parse_overrides(overrides.split())))
    assert config.model_type == family
    model, rng = Decoder(config), np.random.default_rng(0)
    weights = {
        name: lazy_tensor(mx.array(rng.normal(0.5 * (value.ndim == 1), 0.25, value.shape).astype(np.float32)))
        for name, value in tree_flatten(model.parameters())
    }
    model.load_weights([(name, tensor.read()) for name, tensor in weights.items()])
    write(tmp_path, {}, config, weights, None)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=ATTENTION.get(family), dtype=torch.float32
    )
    expected = logits_of(oracle.eval(), TOKENS)
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4 * max(1, np.abs(expected).max()))


def test_gemma_3_with_the_defaults_left_out(tmp_path):
    """As in the hub's files of the models with pictures."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"sliding_attention": plain, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    oracle = make_oracle("gemma3_text", {**CASES["gemma3"][1], "rope_parameters": rope})
    oracle.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"):
        values.pop(name, None)
    values["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model, _ = load_checkpoint(open_checkpoint(tmp_path))
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), logits_of(oracle, TOKENS), atol=1e-4)


@pytest.mark.parametrize(
    "prefixes", [("model.", "model."), ("language_model.model.", "model.language_model.")], ids=str
)
def test_the_language_model_of_a_model_with_images(tmp_path, prefixes):
    """With transformers' default sizes left out, and tensors by the names of transformers 4 and 5."""
    sizes = CASES["gemma3"][1] | {"num_attention_heads": 8, "num_key_value_heads": 4}
    text = {name: value for name, value in sizes.items() if "heads" not in name}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config={**sizes, "vocab_size": VOCABULARY}, vision_config=vision, mm_tokens_per_image=4
    )
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval().float()
    oracle.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"] = {"model_type": "gemma3_text", "vocab_size": VOCABULARY, **text}
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = mx.load(str(tmp_path / "model.safetensors"))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), {name.replace(*prefixes): value for name, value in weights.items()}
    )
    checkpoint = open_checkpoint(tmp_path)
    model, _ = load_checkpoint(checkpoint)
    with torch.no_grad():
        expected = oracle(input_ids=torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(np.array(model(mx.array(TOKENS))), expected, atol=1e-4)
    assert checkpoint.hf_config["model_type"] == "gemma3_text" and "vision_config" not in checkpoint.hf_config


VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
          "image_size": 16, "patch_size": 4}  # fmt: skip
PROJECTOR = {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}


@pytest.mark.parametrize(
    ("model_type", "case", "vision"),
    [
        ("mistral3", "ministral3", {"model_type": "pixtral"}),
        ("llama4", "llama4", PROJECTOR),
        ("gemma4", "gemma4 E2B", {"num_key_value_heads": 2, "head_dim": 8}),
        ("gemma4_unified", "gemma4 31B", {"mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 32}),
    ],  # fmt: skip
)
def test_language_models_of_models_with_images(tmp_path, model_type, case, vision):
    kind, sizes = CASES[case]
    kind = "gemma4_unified_text" if model_type == "gemma4_unified" else kind
    parts = {
        "text_config": {"model_type": kind, "vocab_size": VOCABULARY, **sizes},
        "vision_config": {**VISION, **vision},
        "tie_word_embeddings": case.startswith("gemma4"),
    }
    oracle = transformers_oracle.make_oracle(model_type, parts, VOCABULARY)
    oracle.save_pretrained(tmp_path)
    found = np.array(load_checkpoint(open_checkpoint(tmp_path))[0](mx.array(TOKENS)))
    wanted = logits_of(oracle, TOKENS)
    np.testing.assert_allclose(found, wanted, atol=1e-4 * max(1, wanted.std()))


LANGUAGE_MODELS = {
    "qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip


@pytest.mark.parametrize("model_type", LANGUAGE_MODELS)
def test_language_models_of_qwen_vl(tmp_path, model_type):
    """What is written has the same logits in transformers."""
    rope = {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [1, 1, 2]}
    experts = EXPERTS if "_moe" in model_type else {}
    linear = {**LINEAR, **EXPERTS} if model_type.startswith("qwen3_5") else experts
    text = {**LLAMA, "head_dim": 8, "vocab_size": VOCABULARY, "rope_parameters": rope, **linear}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "deepstack_visual_indexes": []}
    oracle = transformers_oracle.make_oracle(
        model_type, {"text_config": text, "vision_config": vision}, VOCABULARY, with_images=True
    )
    oracle.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.model_type == LANGUAGE_MODELS[model_type]
    expected = logits_of(oracle, TOKENS)
    found = np.array(load_checkpoint(checkpoint)[0](mx.array(TOKENS)))
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1, expected.std()))
    (tmp_path / "text").mkdir()
    write_checkpoint(tmp_path / "text", checkpoint)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    np.testing.assert_allclose(logits_of(again, TOKENS), expected, atol=1e-4)
    assert open_checkpoint(tmp_path / "text").config == checkpoint.config

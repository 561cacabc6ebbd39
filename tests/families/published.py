"""The deciding fields of published configurations, mostly as transformers 4 wrote them, and their parameter counts."""

from mlxlm.families import config_from_hf

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
    "LFM2-1.2B": (
        1_170_340_608,
        {
            "model_type": "lfm2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 65536, "max_position_embeddings": 128000, "rope_theta": 1000000.0,
            "norm_eps": 1e-5, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False,
            "block_dim": 2048, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": True, "tie_embedding": True,
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
    "phi-2": (
        2_779_683_840,
        {
            "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
            "num_attention_heads": 32, "vocab_size": 51200, "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new", "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000,
            "max_position_embeddings": 131072, "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "gemma-4-E2B (text)": (
        4_628_569_379,
        {
            "model_type": "gemma4_text", "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
            "vocab_size": 262144, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "sliding_window": 512,
        },
    ),
    "gemma-4-26B-A4B (text)": (
        25_233_141_790,
        {
            "model_type": "gemma4_text", "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "vocab_size": 262144,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "sliding_window": 1024, "final_logit_softcapping": 30.0,
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
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        {
            "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
            "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
            "num_experts_per_tok": 6, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
            "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
        },
    ),
    "Qwen3.5-35B-A3B": (
        34_660_610_688,
        {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "attn_output_gate": True,
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "mtp_num_hidden_layers": 1, "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            },
        },
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
            "topk_group": 4, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
            "topk_method": "noaux_tc", "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
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


def read_published(name, **changes):
    """The ModelConfig of a published configuration with changes to its config.json."""
    return config_from_hf({**PUBLISHED[name][1], **changes}, name)

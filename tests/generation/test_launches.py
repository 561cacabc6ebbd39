"""Budgets: how many kernels a GPU launches for a token (see docs/benchmarks.md for what a launch costs)."""

import pytest

from mlxlm.cache import KVOptions
from mlxlm.config import ModelConfig
from mlxlm.generation import GenerationOptions
from tests.launches import decode_launches, sampler_launches

LLAMA = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
QWEN3 = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "qk_norm": "head"}
QUANTIZED = {"key_bits": 4, "value_bits": 4}
MIXTURE = {**QWEN3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 256,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "router_bias": True,
    "attention_sinks": True, "attention_bias": True, "mlp_bias": True, "swiglu_limit": 7.0,
}  # fmt: skip
LAYERS = {  # rows; launches of a layer, and of all that is outside of the layers
    "llama": (LLAMA, {}, 1, 11, 8),
    "llama, quantized cache": (LLAMA, QUANTIZED, 1, 22, 10),
    "llama, batch": (LLAMA, {}, 8, 11, 9),
    "qwen 3": (QWEN3, {}, 1, 11, 8),
    "qwen 3, quantized cache": (QWEN3, QUANTIZED, 1, 18, 10),
    "qwen 3, batch": (QWEN3, {}, 8, 11, 9),
    "qwen 3 with experts": (MIXTURE, {}, 1, 21, 8),
    "latent attention": (LATENT, {}, 1, 25, 8),
    "latent attention, quantized cache": (LATENT, QUANTIZED, 1, 32, 8),
    "latent attention, batch": (LATENT, {}, 8, 27, 8),
    "gpt-oss": (GPT_OSS, {}, 1, 27, 8),
    "gpt-oss, quantized cache": (GPT_OSS, QUANTIZED, 1, 38, 10),
}
SAMPLERS = {  # of a token, with a vocabulary of 128k
    "greedy": ({"temperature": 0.0}, 3),
    "temperature": ({}, 5),
    "top-k": ({"top_k": 40}, 7),
    "top-p": ({"top_p": 0.9}, 10),
    "min-p": ({"min_p": 0.05}, 5),
    "typical": ({"typical_p": 0.9}, 12),
    "XTC": ({"xtc_probability": 1.0}, 9),
    "top-k, top-p": ({"top_k": 40, "top_p": 0.9}, 12),
    "min-p, top-p": ({"min_p": 0.05, "top_p": 0.9}, 10),
    "all filters": ({"top_k": 40, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.9, "xtc_probability": 1.0}, 25),
    "logit bias": ({"logit_bias": {3: 1.0}}, 6),
    "repetition penalty": ({"repetition_penalty": 1.1}, 12),
    "presence, frequency penalty": ({"presence_penalty": 0.5, "frequency_penalty": 0.5}, 8),
    "DRY": ({"dry_multiplier": 0.8, "dry_sequence_breakers": ()}, 16),
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_metal(simulated_gpu):
    if simulated_gpu.device.backend != "metal":
        pytest.skip("counts are those of Metal")


@pytest.mark.parametrize("name", LAYERS)
def test_launches_of_a_decoding_step(name):
    sizes, cache, rows, layer, rest = LAYERS[name]
    counts = [
        decode_launches(
            ModelConfig(**sizes, num_hidden_layers=layers, intermediate_size=512, vocab_size=512),
            KVOptions(**cache),
            rows=rows,
        )
        for layers in (1, 2)
    ]
    one, two = (count.total() for count in counts)
    assert (two - one, 2 * one - two) == (layer, rest), counts[1] - counts[0]


LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip


MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64}


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"), [("conv", {}, 8), ("linear_attention", LINEAR, 21), ("mamba", MAMBA, 19)]
)
def test_launches_of_a_recurrent_layer(kind, sizes, expected):
    one, two = (
        decode_launches(
            ModelConfig(
                **LLAMA, **sizes, num_hidden_layers=1 + n, intermediate_size=512, vocab_size=512,
                layer_types=("full_attention", *[kind] * n),
            )
        )
        for n in (1, 2)
    )  # fmt: skip
    assert two.total() - one.total() == expected, two - one


@pytest.mark.parametrize("name", SAMPLERS)
def test_launches_of_a_draw(name):
    options, budget = SAMPLERS[name]
    counts = sampler_launches(GenerationOptions(**{"temperature": 0.7, **options}), 128_256)
    assert counts.total() <= budget, counts

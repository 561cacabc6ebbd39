"""FLOPs and cache bytes, by hand."""

from mlxlm.config import ModelConfig

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_flops_and_cache_bytes():
    c = ModelConfig(**SIZES, num_key_value_heads=2)
    matmul = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 100
    assert c.flops_per_token(10) == 2 * matmul + 2 * (4 * 64 * 10)
    assert c.flops_per_token(10, training=True) == 3 * c.flops_per_token(10)
    assert c.kv_bytes_per_token(2) == 2 * 2 * (2 * 16) * 2

"""The quantization of each module."""

from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_quantization_of_a_module():
    plan = {
        "bits": 4, "group_size": 32, "mode": "mxfp4",
        "lm_head": False, "a": True, "b": {"bits": 8}, "c": {"mode": "nvfp4"},
    }  # fmt: skip
    config = ModelConfig(**SIZES, quantization=plan)
    assert module_quantization(config.quantization, "lm_head") is None
    assert module_quantization(config.quantization, "a") == module_quantization(config.quantization, "other")
    assert module_quantization(config.quantization, "a") == {"bits": 4, "group_size": 32, "mode": "mxfp4"}
    assert module_quantization(config.quantization, "b") == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert module_quantization(config.quantization, "c") == {"bits": 4, "group_size": 16, "mode": "nvfp4"}

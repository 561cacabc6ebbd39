"""StarCoder 2: LayerNorm and biases, and a feed-forward without a gate."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import COMMON_FIELDS, GPT_VALUES, Family, HFConfig, read_bool, same_names


def _read(values: HFConfig) -> dict[str, Any]:
    bias = read_bool(values, "use_bias", True)
    return {"attention_bias": bias, "mlp_bias": bias}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_bias": config.attention_bias}


STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    COMMON_FIELDS
    | same_names("num_key_value_heads", "hidden_act", "rope_theta", "sliding_window")
    | {"rms_norm_eps": "norm_epsilon"},
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    fixed_values=GPT_VALUES,
    read_extra=_read,
    write_extra=_write,
    layer_modules={"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"},
)

"""Which model_type a configuration is saved as, and what other tools can't open."""

import re

import pytest

from mlxlm.config import ModelConfig
from mlxlm.families import compatibility_warning, config_to_hf, resolve_model_type


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
        ({"hidden_act": "gelu"}, "mlx_lm opens .* its llama computes silu, this model uses gelu"),
        ({"norm": "layer", "mlp_gated": False, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}, None),
        (
            {"positions": "none", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 500},
            "no positions 'none', no such layer_types$",
        ),
    ],
)
def test_compatibility_warning(changes, message):
    layers = len(changes.get("layer_types", "ab"))
    result = compatibility_warning(ModelConfig(32, layers, 4, 128, 97, **changes))
    assert result is None if message is None else re.search(message, result)

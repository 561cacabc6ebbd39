"""Configurations in mlx_lm's names."""

from mlxlm.checkpoint.mlx_lm.config_fields import to_mlx_lm_config


def test_llama4_with_empty_no_rope_layers():
    values = {"num_hidden_layers": 4, "no_rope_layers": [], "model_type": "llama4_text"}
    assert to_mlx_lm_config(values) == to_mlx_lm_config({**values, "no_rope_layers": None}) | {"no_rope_layers": []}

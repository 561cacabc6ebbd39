"""Scaling changes nothing that is computed, and rounding loses less after it."""

from functools import partial

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import Format
from mlxlm.quantize import awq
from mlxlm.quantize.calibrate import InputStats
from mlxlm.quantize.gptq import row_errors
from mlxlm.quantize.rtn import quantize_rtn
from tests.small_models import random_decoder

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 2},
    "all heads": {"num_key_value_heads": 4},
    "qwen2": {"model_type": "qwen2", "attention_bias": True, "attention_out_bias": False},
    "gemma2": {
        "model_type": "gemma2", "norm_unit_offset": True, "norm_placement": "both", "hidden_act": "gelu_pytorch_tanh",
    },
    "olmo2": {"model_type": "olmo2", "norm_placement": "output", "qk_norm": "projection"},
    "opt": {
        "model_type": "opt", "norm": "layer", "positions": "learned", "position_offset": 2, "mlp_gated": False,
        "hidden_act": "relu", "attention_bias": True, "mlp_bias": True,
    },
    "gpt2": {
        "model_type": "gpt2", "norm": "layer", "positions": "learned", "mlp_gated": False, "hidden_act": "gelu_new",
        "attention_bias": True, "mlp_bias": True,
    },
    "falcon": {
        "model_type": "falcon", "norm": "layer", "parallel_residual": True, "shared_norm": True, "mlp_gated": False,
        "hidden_act": "gelu", "num_key_value_heads": 1,
    },
}  # fmt: skip


def outliers(width: int) -> np.ndarray:
    """Moments of inputs with a few channels thirty times as large as the others, as in trained models."""
    rng = np.random.default_rng(0)
    size = np.where(np.arange(width) % 17 == 3, 30.0, 1.0)
    inputs = rng.normal(size=(500, width)) * size
    return (inputs.T @ inputs).astype(np.float32)


STREAM = mx.random.normal((1, 12, 64), key=mx.random.key(2))


def run(block):
    """The block's output; like the layers of calibration."""
    residual, hidden_states = block(STREAM, None)
    return residual if hidden_states is None else residual + hidden_states


def groups_of(block):
    return awq.find_scale_groups(block, partial(run, block))


def scaled(block, chosen, dtype, size=1):
    """Scale a block for inputs with outliers; returns the names of what was changed."""
    groups = groups_of(block)
    next_layers = {name for group in groups for name in group.next_layers}
    widths = {name: awq.get_submodule(block, name).weight.shape[1] for name in next_layers}
    inputs = {name: InputStats(size * outliers(width)) for name, width in widths.items()}
    return awq.apply_best_scales(block, groups, inputs, dict.fromkeys(next_layers, chosen), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_scaled_block_computes_the_same(family):
    config = ModelConfig(**{**SIZES, **FAMILIES[family]})
    model = random_decoder(config)
    block = model.layers[0]
    for name, value in tree_flatten(block.parameters()):
        if value.ndim == 1:
            owner, _, parameter = name.rpartition(".")
            awq.get_submodule(block, owner)[parameter] = value + mx.random.normal(
                value.shape, scale=0.1, key=mx.random.key(1)
            )
    before = list(block(STREAM, None))
    assert scaled(block, Format(3, 32), mx.float32)
    for old, new in zip(before, block(STREAM, None), strict=True):
        assert mx.abs(old - new).max().item() < 2e-4 * max(1.0, mx.abs(old).max().item())


def test_scale_groups_of_families():
    sources = {}
    for name, changes in FAMILIES.items():
        model = random_decoder(ModelConfig(**{**SIZES, **changes}))
        before = dict(tree_flatten(model.parameters()))
        groups = groups_of(model.layers[0])
        sources[name] = {group.source for group in groups}
        assert all(group.offset == ("norm" in group.source and name == "gemma2") for group in groups)
        assert all(mx.array_equal(value, before[key]) for key, value in tree_flatten(model.parameters()))
    assert sources["llama"] == {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"}
    assert sources["all heads"] == sources["llama"] | {"self_attn.v_proj"}
    assert "pre_feedforward_layernorm" in sources["gemma2"] and "post_attention_layernorm" not in sources["gemma2"]
    assert not any("norm" in source for source in sources["olmo2"])
    assert "mlp.up_proj" in sources["opt"] and "mlp.up_proj" not in sources["gpt2"]
    assert sources["falcon"] == {"input_layernorm"}


def test_scaling_reduces_the_error_of_outliers():
    config = ModelConfig(**{**SIZES, **FAMILIES["llama"]})
    model = random_decoder(config)
    block, chosen, own = model.layers[0], Format(3, 32), outliers(64)
    name = "self_attn.q_proj"
    source = np.array(awq.get_submodule(block, name).weight)
    plain = row_errors(source, quantize_rtn(mx.array(source).astype(mx.float16), chosen), chosen, InputStats(own)).sum()
    scaled(block, chosen, mx.float16)
    weight = awq.get_submodule(block, name).weight
    scale = (np.array(weight) / source).mean(axis=0)
    after = InputStats(own / scale / scale[:, None])
    errors = row_errors(np.array(weight), quantize_rtn(weight.astype(mx.float16), chosen), chosen, after)
    assert errors.sum() < 0.3 * plain


def test_clipping_reduces_the_error():
    weight = mx.random.normal((16, 64), key=mx.random.key(0)).astype(mx.float16)
    weight[:, 5] *= 6
    chosen = Format(2, 64)
    moments = outliers(64)
    source = np.array(weight.astype(mx.float32))
    clipped, plain = (
        row_errors(source, packed, chosen, InputStats(moments))
        for packed in (awq.quantize_clipped("v_proj", weight, moments, chosen), quantize_rtn(weight, chosen))
    )
    assert (clipped <= plain * 1.001).all() and clipped.sum() < 0.95 * plain.sum()
    kept = awq.quantize_clipped("self_attn.q_proj", weight, moments, chosen)
    assert mx.array_equal(kept.weight, quantize_rtn(weight, chosen).weight)


def test_next_layers_compensate_for_a_rounded_norm():
    """A norm that is stored less one has few bits left where its gain is small."""
    config = ModelConfig(**{**SIZES, **FAMILIES["gemma2"]})
    model = random_decoder(config)
    block = model.layers[0]
    norm, reader = block.input_layernorm, block.self_attn.q_proj
    norm.weight = mx.random.normal((64,), scale=0.3, key=mx.random.key(3)).astype(mx.bfloat16).astype(mx.float32)
    before = (1 + norm.weight) * reader.weight
    scaled(block, Format(3, 32), mx.bfloat16, size=1000)
    for weight in (norm.weight, reader.weight):
        assert mx.array_equal(weight.astype(mx.bfloat16).astype(mx.float32), weight)
    after = (1 + norm.weight) * reader.weight
    assert (1 + norm.weight).min() < 0.4  # what has few bits is there
    assert not mx.array_equal(after, before)
    assert (mx.abs(after - before) <= 1.01 * 2**-8 * mx.abs(before)).all()

"""Loading models from folders."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, load_submodule, load_weights, open_checkpoint, save_weights
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError
from tests.quantized_weights import quantized_weights


def test_missing_files_are_named(tmp_path, model_dir):
    with pytest.raises(MlxlmError, match="there is no model folder .*nowhere"):
        load_model(tmp_path / "nowhere")
    (model_dir / "model.safetensors").rename(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="has no model.*safetensors"):
        load_model(model_dir)
    (model_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load_model(model_dir)


def test_tied_model_may_also_store_its_head(model_dir):
    weights = load_weights(model_dir)
    (model_dir / "model.safetensors").rename(model_dir.parent / "before.safetensors")
    save_weights(model_dir, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 1})
    load_model(model_dir)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("[1]", "a configuration is a JSON object"),
        ('{"model_type": "mamba"}', "config.json lacks vocab_size, .*which mlx_lm's mamba needs"),
        ('{"quantization": {"bits": 4}}', "missing"),
    ],
)
def test_malformed_configs_are_errors(model_dir, change, expected):
    (model_dir / "config.json").write_text(change)
    with pytest.raises(MlxlmError, match=expected):
        load_model(model_dir)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mismatched_quantized_parts_are_one_error(tmp_path, tiny_config, data):
    """Missing parts, other bits, other groups: an error that names the layer, or a model that loads."""
    model = Decoder(tiny_config)
    weights, original_plan = quantized_weights(model, 4, 32)
    total_count = len(weights)
    bits, group_size = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([32, 64]))
    plan = {**original_plan, "bits": bits, "group_size": group_size}
    for name in data.draw(st.lists(st.sampled_from(sorted(weights)), max_size=2)):
        weights.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(tiny_config), "quantization": plan}))
    save_weights(tmp_path, weights)
    try:
        loaded, _ = load_model(tmp_path)
        mx.eval(loaded.parameters())
        assert plan == original_plan
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
        assert len(weights) < total_count or plan != original_plan


def test_load_submodule(model_dir, tiny_config):
    checkpoint = open_checkpoint(model_dir)
    block = Decoder(tiny_config).layers[0]
    load_submodule(block, checkpoint.tensors, "model.layers.1")
    layer = load_model(model_dir)[0].layers[1]
    for (name, value), (_, expected) in zip(
        tree_flatten(block.parameters()), tree_flatten(layer.parameters()), strict=True
    ):
        assert mx.array_equal(value, expected), name
    assert not block.training

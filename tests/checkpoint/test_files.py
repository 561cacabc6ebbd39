"""Folders and safetensors: whole or refused."""

import json
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint import load_model, load_weights, save_weights
from mlxlm.checkpoint.safetensors import file_tensors
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError
from mlxlm.utils.files import atomic_new_folder
from tests.quantized_weights import quantized_weights


@pytest.fixture
def model_dir(tmp_path, tiny_config):
    model = Decoder(tiny_config)
    model.init_weights(0)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_hf(tiny_config)))
    save_weights(folder, dict(tree_flatten(model.parameters())))
    return folder


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_new_folder(tmp_path / "a") as folder:
        (folder / "x").write_text("x")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with atomic_new_folder(tmp_path / "deep/a") as folder:
        (folder / "x").write_text("x")
        assert not (tmp_path / "deep/a").exists()
    assert (tmp_path / "deep/a/x").read_text() == "x"
    with pytest.raises(CheckpointError, match="already exists"), atomic_new_folder(tmp_path / "deep/a"):
        pass


def test_shards_have_an_index_and_load_back(tmp_path):
    weights = {f"w{i}": mx.random.normal((10, 10), key=mx.random.key(i)) for i in range(7)}
    save_weights(tmp_path, weights, shard_bytes=1000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2800 and len(set(index["weight_map"].values())) == 4
    found = load_weights(tmp_path)
    assert found.keys() == weights.keys() and all(mx.array_equal(found[k], weights[k]) for k in weights)


def test_an_index_can_not_point_outside(tmp_path):
    (tmp_path / "in").mkdir()
    save_weights(tmp_path, {"w": mx.zeros((2, 2))})
    index = {"weight_map": {"w": "../model.safetensors"}}
    (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="points outside"):
        load_weights(tmp_path / "in")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_weights_are_one_error_or_load(model_dir, data):
    """Cut, overwritten or lengthened files end in a CheckpointError that names the file, never in a crash."""
    path = model_dir / "model.safetensors"
    original = path.read_bytes()
    header = 8 + struct.unpack("<Q", original[:8])[0]
    mutated = bytearray(original)
    kind = data.draw(st.sampled_from(["cut", "header", "length"]))
    if kind == "cut":
        mutated = mutated[: data.draw(st.integers(0, len(original) - 1))]
    elif kind == "length":
        mutated[:8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            mutated[data.draw(st.integers(8, header - 1))] = data.draw(st.integers(32, 126))
    try:
        path.write_bytes(bytes(mutated))
        try:
            model, _ = load_model(model_dir)
            mx.eval(model.parameters())
        except CheckpointError as error:
            assert str(model_dir) in str(error) and "\n" not in str(error)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.*is missing"),
        ({"num_hidden_layers": 1}, "model.layers.1.*is not part of this model"),
        ({"vocab_size": 301}, r"embed_tokens.weight is \[300, 32\], the configuration says \[301, 32\]"),
    ],
)
def test_a_config_that_disagrees_with_the_weights(model_dir, tiny_config, change, expected):
    (model_dir / "config.json").write_text(json.dumps(config_to_hf(tiny_config.with_changes(**change))))
    with pytest.raises(CheckpointError, match=expected):
        load_model(model_dir)


def test_missing_things_are_named(tmp_path, model_dir):
    with pytest.raises(MlxlmError, match="there is no model folder .*nowhere"):
        load_model(tmp_path / "nowhere")
    (model_dir / "model.safetensors").rename(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="has no model.*safetensors"):
        load_model(model_dir)
    (model_dir / "config.json").unlink()
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load_model(model_dir)


def test_a_pickle_is_never_opened(model_dir):
    (model_dir / "model.safetensors").write_bytes(b"\x80\x04\x95" + b"cos\nsystem\n" * 10)
    with pytest.raises(CheckpointError, match="its header is cut off"):
        load_model(model_dir)


def test_file_tensors_has_all_names(model_dir, tiny_config):
    wanted = {name for name, _ in tree_flatten(Decoder(tiny_config).parameters())}
    assert set(file_tensors(model_dir / "model.safetensors")) == wanted


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantized_weights_load_back_close(tmp_path, bits):
    config = ModelConfig(
        hidden_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=50,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(0)
    packed, plan = quantized_weights(model, bits, 64)
    assert plan["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(config), "quantization": plan}))
    save_weights(tmp_path, packed)
    loaded, _ = load_model(tmp_path)
    if ON_CPU:
        original = dict(tree_flatten(model.parameters()))
        for name, value in tree_flatten(loaded.parameters()):
            span = np.ptp(np.array(original[name]))
            assert value.dtype == mx.float32
            assert mx.abs(value - original[name]).max().item() <= span / (2**bits - 1) + 1e-3


def test_another_architecture_loads_through_mlx_lm(tmp_path):
    cohere = pytest.importorskip("mlx_lm.models.cohere")
    values = {
        "model_type": "cohere", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 77,
        "eos_token_id": [3, 4],
    }  # fmt: skip
    original = cohere.Model(cohere.ModelArgs.from_dict(values))
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_weights(tmp_path, dict(tree_flatten(original.parameters())))
    model, config = load_model(tmp_path)
    tokens = mx.array([[1, 2, 3, 4]])
    np.testing.assert_allclose(np.array(model(tokens)), np.array(original(tokens)), atol=1e-5)
    assert (config.model_type, config.eos_ids, config.max_position_embeddings) == ("cohere", {3, 4}, 77)
    halves = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(original.parameters())}
    save_weights(tmp_path, halves)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    model, config = load_model(tmp_path)
    types = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert types == {mx.float32 if ON_CPU else mx.bfloat16} and config.eos_ids == {3, 4, 5}
    odd = {**values, "eos_token_id": "x", "vocab_size": 50}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match="eos_token_id is 'x', it must be a token id"):
        load_model(tmp_path)


def test_a_tied_model_may_also_store_its_head(model_dir):
    weights = load_weights(model_dir)
    (model_dir / "model.safetensors").rename(model_dir.parent / "before.safetensors")
    save_weights(model_dir, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 1})
    load_model(model_dir)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("[1]", "a configuration is a JSON object"),
        ('{"model_type": "mamba"}', "config.json lacks vocab_size, .*which mlx_lm's mamba needs"),
        ('{"quantization": {"bits": 4}}', "missing|group_size is None"),
    ],
)
def test_a_config_of_another_shape(model_dir, change, expected):
    (model_dir / "config.json").write_text(change)
    with pytest.raises(MlxlmError, match=expected):
        load_model(model_dir)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_quantized_folders_that_disagree_are_one_error(tmp_path, tiny_config, data):
    """Missing parts, other bits, other groups: an error that names the layer, or a model that loads."""
    model = Decoder(tiny_config)
    weights, made = quantized_weights(model, 4, 32)
    whole = len(weights)
    bits, group_size = data.draw(st.sampled_from([2, 4, 8])), data.draw(st.sampled_from([32, 64]))
    plan = {**made, "bits": bits, "group_size": group_size}
    for name in data.draw(st.lists(st.sampled_from(sorted(weights)), max_size=2)):
        weights.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps({**config_to_hf(tiny_config), "quantization": plan}))
    save_weights(tmp_path, weights)
    try:
        loaded, _ = load_model(tmp_path)
        mx.eval(loaded.parameters())
        assert plan == made
    except CheckpointError as error:
        assert str(tmp_path) in str(error)
        assert len(weights) < whole or plan != made

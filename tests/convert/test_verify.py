"""What verification catches: errors in what was written."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import huggingface
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.config import ModelConfig
from mlxlm.convert import convert
from mlxlm.convert import verify as module
from mlxlm.convert.verify import verify
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, TokenizerError


@pytest.fixture
def model(tiny_config):
    model = Decoder(tiny_config.with_changes(num_hidden_layers=3))
    model.init_weights(0)
    return model


def no_tokenizer():
    raise TokenizerError("no tokenizer")


def checkpoint(model: Decoder, config: ModelConfig | None = None, **changed) -> Checkpoint:
    arrays = dict(tree_flatten(model.parameters())) | changed
    tensors = {name: lazy_tensor(value) for name, value in arrays.items()}
    return Checkpoint("here", "safetensors", {}, tensors, no_tokenizer, config or model.config)


NAME = "model.layers.1.self_attn.q_proj.weight"


def swapped(value: mx.array) -> mx.array:
    return mx.concatenate([value[1:2], value[:1], value[2:]])


def test_equal_to_the_bit(model):
    checks = verify(checkpoint(model), checkpoint(model), "out")
    assert [(check.name, check.result) for check in checks] == [
        ("tensors", "equal"), ("tokenizer", "skipped"), ("configuration", "equal"), ("logits", "equal"),
        ("greedy tokens", "equal"),
    ]  # fmt: skip


def test_two_rows_in_each_others_place_are_named(model):
    value = dict(tree_flatten(model.parameters()))[NAME]
    with pytest.raises(CheckpointError, match=f"out: {NAME} differs"):
        verify(checkpoint(model), checkpoint(model, **{NAME: swapped(value)}), "out")


def test_a_writer_that_swaps_two_rows_leaves_nothing(model, tmp_path, tiny_tokenizer, monkeypatch):
    from mlxlm.checkpoint import save_weights
    from mlxlm.utils.json_files import write_json

    source = tmp_path / "source"
    source.mkdir()
    save_weights(source, dict(tree_flatten(model.parameters())))
    write_json(source / "config.json", config_to_hf(model.config))
    tiny_tokenizer.save(source)
    write = huggingface.write

    def faulty(folder, values, config, tensors, tokenizer):
        write(folder, values, config, {**tensors, NAME: tensors[NAME].transform(swapped)}, tokenizer)

    monkeypatch.setattr(huggingface, "write", faulty)
    with pytest.raises(CheckpointError, match=f"out: {NAME} differs from"):
        convert(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_tensors_that_are_not_on_both_sides(model):
    whole, part = checkpoint(model), checkpoint(model)
    del part.tensors["model.norm.weight"]
    for a, b in ((whole, part), (part, whole)):
        with pytest.raises(CheckpointError, match="model.norm.weight is in only one"):
            verify(a, b, "out")


def test_a_layer_that_computes_otherwise_is_named(model, monkeypatch):
    other = model.config.with_changes(rope_theta=500.0)
    with pytest.raises(CheckpointError, match="out: the configuration's rope_theta is 500.0 and was 10000.0 in here"):
        verify(checkpoint(model), checkpoint(model, other), "out")
    monkeypatch.setattr(module, "check_metadata", lambda *_: [])
    with pytest.raises(CheckpointError, match=r"logits differ from the source's, from model.layers.0 on \(KL"):
        verify(checkpoint(model), checkpoint(model, other), "out")


def test_rounding_is_no_error_and_more_than_rounding_is(model):
    arrays = dict(tree_flatten(model.parameters()))
    half = {name: value.astype(mx.float16) for name, value in arrays.items()}
    checks = verify(checkpoint(model), checkpoint(model, **half), "out")
    assert checks[0].result == "within rounding" and checks[0].detail == "rounded to float16"
    with pytest.raises(CheckpointError, match=NAME):
        verify(checkpoint(model), checkpoint(model, **(half | {NAME: half[NAME] * 1.001})), "out")


@pytest.mark.parametrize(("kind", "steps"), [("Q8_0", 127), ("Q4_0", 8)])
def test_the_bound_of_a_block(kind, steps):
    """llama.cpp's own rounding passes, and the next step beside it doesn't."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(8, 32)).astype(np.float32) * 10.0 ** rng.integers(-6, 2, (8, 1))
    largest = np.take_along_axis(weights, np.abs(weights).argmax(-1)[:, None], -1)
    scale = (np.abs(largest) / 127 if kind == "Q8_0" else largest / -8).astype(np.float16).astype(np.float32)
    steps_of = np.round(np.divide(weights, scale, where=scale != 0, out=np.zeros_like(weights)))
    low, high = (-127, 127) if kind == "Q8_0" else (-8, 7)
    value = scale * np.clip(steps_of, low, high)
    source = lazy_tensor(mx.array(weights))

    def written(array):
        tensor = lazy_tensor(mx.array(array))
        return type(tensor)(tensor.shape, tensor.dtype, kind, tensor.nbytes, tensor.read)

    assert module._changed(source, written(value)) == kind
    worse = value.copy()
    worse[:, 3] += 2 * scale[:, 0]
    assert module._changed(source, written(worse)) is None


def test_a_model_too_large_is_compared_layer_by_layer_only(model, monkeypatch):
    monkeypatch.setattr(module, "_too_large", lambda checkpoint: "too large")
    a = checkpoint(model)
    found = {check.name: check.result for check in verify(a, a, "out", ("mlx_lm",))}
    skipped = dict.fromkeys(("tokenizer", "greedy tokens", "mlx_lm"), "skipped")
    assert found == {"tensors": "equal", "configuration": "equal", "logits": "equal", **skipped}

"""What verification catches: errors in what was written."""

from dataclasses import replace

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.k_quants import K_QUANTS, USE_IMPORTANCE, quantize_k
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.convert import verify as module
from mlxlm.convert.verify import verify
from mlxlm.utils.errors import CheckpointError
from tests.small_models import arrays_of, in_memory, random_decoder


@pytest.fixture
def model(tiny_config):
    return random_decoder(tiny_config.with_changes(num_hidden_layers=3))


NAME = "model.layers.1.self_attn.q_proj.weight"


def swapped(value: mx.array) -> mx.array:
    return mx.concatenate([value[1:2], value[:1], value[2:]])


def test_equal_to_the_bit(model):
    checks = verify(in_memory(model), in_memory(model), "out")
    assert [(check.name, check.result) for check in checks] == [
        ("tensors", "equal"), ("tokenizer", "skipped"), ("configuration", "equal"), ("logits", "equal"),
    ]  # fmt: skip


def test_two_rows_in_each_others_place_are_named(model):
    value = arrays_of(model)[NAME]
    with pytest.raises(CheckpointError, match=f"out: {NAME} differs"):
        verify(in_memory(model), in_memory(model, **{NAME: swapped(value)}), "out")


def test_tensors_that_are_not_on_both_sides(model):
    whole, part = in_memory(model), in_memory(model)
    del part.tensors["model.norm.weight"]
    for a, b in ((whole, part), (part, whole)):
        with pytest.raises(CheckpointError, match="model.norm.weight is in only one"):
            verify(a, b, "out")


def test_a_layer_that_computes_otherwise_is_named(model, monkeypatch):
    other = model.config.with_changes(rope_theta=500.0)
    with pytest.raises(CheckpointError, match="out: the configuration's rope_theta is 500.0 and was 10000.0 in here"):
        verify(in_memory(model), in_memory(model, config=other), "out")
    monkeypatch.setattr(module, "check_metadata", lambda *_: [])
    with pytest.raises(CheckpointError, match=r"logits differ from the source's, from model.layers.0 on \(KL"):
        verify(in_memory(model), in_memory(model, config=other), "out")


def test_rounding_is_no_error_and_more_than_rounding_is(model):
    arrays = arrays_of(model)
    half = {name: value.astype(mx.float16) for name, value in arrays.items()}
    checks = verify(in_memory(model), in_memory(model, **half), "out")
    assert checks[0].result == "within rounding" and checks[0].detail == "rounded to float16"
    with pytest.raises(CheckpointError, match=NAME):
        verify(in_memory(model), in_memory(model, **(half | {NAME: half[NAME] * 1.001})), "out")


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


@pytest.mark.parametrize("kind", USE_IMPORTANCE)
def test_rounding_with_importance_weights_passes_and_other_rows_dont(kind):
    rng = np.random.default_rng(0)
    weights = (rng.normal(size=(64, 512)) * rng.uniform(0.1, 10, (64, 1))).astype(np.float32)
    importance = np.broadcast_to(rng.uniform(0, 1, 512).astype(np.float32) ** 8, weights.shape)
    cases = [(True, importance)] + [(False, None)] * (kind in K_QUANTS)
    for has_importance, given in cases:
        value = dequantize(quantize_k(weights, kind, given), GGMLQuantizationType[kind])
        for rows, expected in ((value, kind), (value[::-1].copy(), None)):
            tensor = replace(lazy_tensor(mx.array(rows)), stored_dtype=kind)
            assert module._changed(lazy_tensor(mx.array(weights)), tensor, has_importance) == expected


def test_two_models_that_do_not_fit_in_memory(model, monkeypatch):
    assert module._too_large(in_memory(model)) is None
    monkeypatch.setattr("mlxlm.backend.platform.total_memory", lambda: 100_000)
    assert "the two models need" in module._too_large(in_memory(model))

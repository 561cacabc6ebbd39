"""Rounding to nearest while tensors are read."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_weights
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import write_shards
from mlxlm.config.quantization import Format
from mlxlm.quantize.quantization_plan import matrices, uniform
from mlxlm.quantize.rtn import PackedMatrix, dequantized, lazy_quantize, quantize_rtn
from mlxlm.quantize.source import cast_to_16bit, output_dtype
from mlxlm.utils.errors import CheckpointError


def test_headers_match_the_arrays(model):
    checkpoint = open_checkpoint(model)
    for chosen in (Format(3, 32), Format.of("mxfp8")):
        plan = uniform(matrices(checkpoint), chosen)
        made = lazy_quantize(checkpoint.tensors, plan)
        for name, tensor in made.items():
            value = tensor.read()
            assert (tensor.shape, tensor.dtype, tensor.nbytes) == (value.shape, value.dtype, value.nbytes), name
        total = sum(t.nbytes for n, t in made.items() if n.rpartition(".")[0] in plan.formats)
        assert total == plan.nbytes()


def test_each_matrix_is_read_once():
    reads = []

    def tensor(name: str) -> LazyTensor:
        def read() -> mx.array:
            reads.append(name)
            return mx.random.normal((64, 64), key=mx.random.key(0)).astype(mx.float16)

        return LazyTensor((64, 64), mx.float16, "F16", 64 * 64 * 2, read)

    tensors = {f"{name}.weight": tensor(name) for name in "abc"}
    plan = type("Plan", (), {"formats": dict.fromkeys("abc", Format(4))})
    made = lazy_quantize(tensors, plan)
    packed_first = sorted(made, key=lambda name: not name.endswith("weight"))
    parts = {name: made[name].read() for name in packed_first}
    assert sorted(reads) == ["a", "b", "c"]
    values = mx.dequantize(parts["b.weight"], parts["b.scales"], parts["b.biases"], group_size=64, bits=4)
    assert mx.abs(values - mx.random.normal((64, 64), key=mx.random.key(0))).max().item() < 0.3


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_scales_of_microscaling_formats_have_the_smallest_error(mode):
    chosen, rng = Format.of(mode), np.random.default_rng(0)
    weight = rng.normal(size=(40, 96)) * np.exp(rng.normal(size=(40, 1)) * 5)
    weight[3], weight[4, :32], weight[5, 7] = 0, 2.0**-120, 1000 * weight[5, 7]
    weight[6] = 6 * 2.0 ** rng.integers(-9, 9, 96)  # exact, and with ties
    weight = weight.astype(np.float32)
    packed = quantize_rtn(mx.array(weight), chosen)
    values = np.array(dequantized(packed, chosen))
    # Every value of the format, with any power of two as scale.
    codes = mx.arange(256, dtype=mx.uint8)
    grid = mx.from_fp8(codes, dtype=mx.float32) if mode == "mxfp8" else mx.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = np.unique(np.nan_to_num(np.abs(np.array(grid))))
    best = np.full((40, 3), np.inf)
    for exponent in range(-125, 30):
        scaled = np.abs(weight) * 2.0**-exponent
        at = np.clip(np.searchsorted((grid[1:] + grid[:-1]) / 2, scaled), 0, len(grid) - 1)
        best = np.minimum(best, np.square((grid[at] - scaled) * 2.0**exponent).reshape(40, 3, 32).sum(-1))
    errors = np.square((values - weight).astype(np.float64)).reshape(40, 3, 32).sum(-1)
    np.testing.assert_allclose(errors, best, rtol=1e-5, atol=1e-30)
    assert (values[3] == 0).all() and packed.scales.dtype == mx.uint8 and packed.weight.dtype == mx.uint32
    theirs = PackedMatrix(*mx.quantize(mx.array(weight), **chosen.to_dict()))
    squares = np.square(np.array(dequantized(theirs, chosen)) - weight).reshape(40, 3, 32).sum(-1)
    assert (errors <= squares * (1 + 1e-5)).all() and errors.sum() < 0.98 * squares.sum()


def test_scales_of_nvfp4_have_almost_the_smallest_error():
    chosen, rng = Format.of("nvfp4"), np.random.default_rng(0)
    weight = rng.normal(size=(120, 64)) * np.exp(rng.uniform(-7, 7, size=(120, 1)))
    weight[3], weight[4, :16], weight[5] = 0, 1e-9, 1e5
    weight = weight.astype(np.float32)
    packed = quantize_rtn(mx.array(weight), chosen)
    values = np.array(dequantized(packed, chosen))
    grid, best = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), np.full((120, 4), np.inf)
    for scale in np.array(mx.from_fp8(mx.arange(1, 127, dtype=mx.uint8), dtype=mx.float32)).astype(np.float64):
        scaled = np.abs(weight) / scale
        at = np.searchsorted((grid[1:] + grid[:-1]) / 2, scaled)
        best = np.minimum(best, np.square((grid[at] - scaled) * scale).reshape(120, 4, 16).sum(-1))
    errors = np.square((values - weight).astype(np.float64)).reshape(120, 4, 16).sum(-1)
    assert (errors >= best * (1 - 1e-5)).all() and (errors <= 1.2 * best + 1e-30).all()
    relative = best > 0
    assert (errors[relative] / best[relative]).mean() < 1.001
    assert (values[3] == 0).all() and (values[5] == 6 * 448).all()
    theirs = PackedMatrix(*mx.quantize(mx.array(weight), **chosen.to_dict()))
    squares = np.square((np.array(dequantized(theirs, chosen)) - weight).astype(np.float64)).reshape(120, 4, 16).sum(-1)
    assert (errors <= squares * (1 + 1e-5)).all()
    assert packed.scales.shape == (120, 4) and packed.scales.dtype == mx.uint8


@pytest.mark.parametrize("chosen", [Format(4, 64), Format.of("mxfp4")], ids=str)
def test_written_matrices_are_freed(tmp_path, chosen):
    side, count, alive = 256, 20, []

    def tensor(seed: int) -> LazyTensor:
        def read() -> mx.array:
            alive.append(mx.get_active_memory())
            return mx.random.normal((side, side), key=mx.random.key(seed)).astype(mx.float16)

        return LazyTensor((side, side), mx.float16, "F16", 2 * side * side, read)

    tensors = {f"m{i}.weight": tensor(i) for i in range(count)}
    plan = type("Plan", (), {"formats": {f"m{i}": chosen for i in range(count)}})
    write_shards(tmp_path, lazy_quantize(cast_to_16bit(tensors, mx.float16), plan))
    assert len(alive) == count and max(alive) - alive[0] < 2 * side * side
    written = load_weights(tmp_path)
    for i in (0, count - 1):
        weight = mx.random.normal((side, side), key=mx.random.key(i)).astype(mx.float16)
        for name, value in quantize_rtn(weight, chosen).parts(f"m{i}").items():
            assert mx.array_equal(written[name], value), name


def test_output_dtype():
    half, bfloat, single = (lazy_tensor(mx.ones((64, 64), dtype=d)) for d in (mx.float16, mx.bfloat16, mx.float32))
    assert output_dtype({"a": bfloat, "norm": lazy_tensor(mx.ones((64,)))}) == mx.bfloat16
    assert output_dtype({"a": half, "b": bfloat, "c": half}) == mx.float16
    assert output_dtype({"a": single}) == mx.float16
    assert output_dtype({"a": single, "b": lazy_tensor(mx.array([1e5]))}) == mx.bfloat16


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_an_error(value):
    broken = {"model.norm.weight": lazy_tensor(mx.array([1.0, value]))}
    with pytest.raises(CheckpointError, match="model.norm.weight has values that are not finite"):
        output_dtype(broken)
    with pytest.raises(CheckpointError, match="model.norm.weight has values that are not finite"):
        cast_to_16bit(broken, mx.bfloat16)["model.norm.weight"].read()


def test_values_out_of_range_are_an_error():
    with pytest.raises(CheckpointError, match="big has values up to 1e.06, too large for 16 bits"):
        cast_to_16bit({"big": lazy_tensor(mx.array([1e6]))}, mx.float16)["big"].read()

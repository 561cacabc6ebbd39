"""Packing to the bit, and GPTQ against rounding by what both are for: the outputs."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from mlxlm.backend.mlx import mx
from mlxlm.config.quantization import BITS, GROUP_SIZES, MODES, Format
from mlxlm.quantize.calibrate import InputStats
from mlxlm.quantize.gptq import GPTQ, output_error
from mlxlm.quantize.rtn import dequantized, pack, quantize_rtn
from mlxlm.utils.errors import CheckpointError


@given(
    bits=st.sampled_from(BITS), group=st.sampled_from(GROUP_SIZES), groups=st.integers(1, 3), rows=st.integers(1, 300),
    seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(max_examples=40)
def test_packed_values_come_back(bits, group, groups, rows, seed):
    values = np.random.default_rng(seed).integers(0, 2**bits, (rows, group * groups)).astype(np.uint8)
    packed = pack(values, bits)
    assert packed.shape == (rows, group * groups * bits // 32) and packed.dtype == mx.uint32
    ones, zeros = mx.ones((rows, groups)), mx.zeros((rows, groups))
    assert np.array_equal(np.array(mx.dequantize(packed, ones, zeros, group_size=group, bits=bits)), values)


def gptq(weight, moments, chosen, dxxt=None, transposed=False):
    return GPTQ().quantize("", weight, chosen, InputStats(moments, dxxt, transposed))


def relative_error(*arguments) -> float:
    *others, moments = arguments
    changed, size = output_error(*others, InputStats(moments))
    return (changed / size) ** 0.5


def problem(rows=48, width=128, tokens=2000, seed=0):
    """A matrix and the moments of correlated inputs, a quarter as many directions as channels."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(width // 4, width))
    inputs = rng.normal(size=(tokens, width // 4)) @ mixing + 0.3 * rng.normal(size=(tokens, width))
    weight = mx.array(rng.normal(size=(rows, width)) / width**0.5).astype(mx.float16)
    return weight, (inputs.T @ inputs).astype(np.float32)


FORMATS = [Format(bits, size) for bits in BITS for size in (32, 128)] + [Format.of(m) for m in MODES if m != "affine"]


@pytest.mark.parametrize("chosen", FORMATS, ids=str)
def test_less_than_half_the_error_of_rounding(chosen):
    weight, moments = problem()
    ours, plain = (
        relative_error(weight, p, chosen, moments)
        for p in (gptq(weight, moments, chosen), quantize_rtn(weight, chosen))
    )
    assert ours < 0.5 * plain


@pytest.mark.parametrize("transposed", [False, True])
def test_matches_the_textbook(transposed, monkeypatch):
    """The unblocked algorithm, with an explicit inverse at every column, gives the same numbers."""
    weight, moments = problem(rows=64, width=64)
    weight, chosen = weight.astype(mx.float32), Format(4, 32)
    monkeypatch.setattr("mlxlm.quantize.gptq.CLIP_RATIOS", (1.0,))
    packed = gptq(weight, moments, chosen, transposed=transposed)
    left = np.array(weight.T if transposed else weight).astype(np.float64)
    hessian = moments / np.mean(np.diag(moments)) + 0.01 * np.eye(64)
    result = np.empty_like(left)

    def ranges(groups):
        return map(np.array, mx.quantize(mx.array(groups, mx.float32), group_size=32, bits=4)[1:])

    for column in range(64):
        if transposed:
            scale, bias = (np.repeat(part, 32) for part in ranges(left[:, column][None]))
        elif column % 32 == 0:
            scale, bias = (part[:, 0] for part in ranges(left[:, column : column + 32]))
        inverse = np.linalg.inv(hessian[column:, column:])
        whole = np.clip(np.rint((left[:, column] - bias) / scale), 0, 15)
        result[:, column] = whole * scale + bias
        error = (left[:, column] - result[:, column]) / inverse[0, 0]
        left[:, column:] -= error[:, None] * inverse[0]
    found = np.array(dequantized(packed, chosen))
    same = np.isclose(found.T if transposed else found, result, atol=1e-3).mean()
    assert same > 0.98  # a value halfway between two may go either way


def test_matrices_of_heads():
    """Those that all heads' inputs are multiplied with from the left are calibrated, too."""
    _, moments = problem(width=96)
    weight = mx.random.normal((3, 96, 64), key=mx.random.key(0)).astype(mx.float16)
    chosen, inputs = Format(3, 32), InputStats(moments, transposed=True)
    weight[1] = mx.round(weight[1])[:, :1]  # one value in each row, which rounding represents
    rows = weight.reshape(-1, 64)
    ours = gptq(rows, moments, chosen, transposed=True)
    found, plain = (np.array(dequantized(p, chosen)).reshape(3, 96, 64) for p in (ours, quantize_rtn(rows, chosen)))
    errors = []
    for values in (found, plain):
        change = values - np.array(weight.astype(mx.float32))
        errors.append([np.trace(of_head.T @ moments @ of_head) for of_head in change])
    assert errors[0][0] < 0.5 * errors[1][0] and errors[0][2] < 0.5 * errors[1][2] and errors[0][1] == errors[1][1] == 0
    assert output_error(rows, ours, chosen, inputs)[0] == pytest.approx(sum(errors[0]), rel=1e-3)


def test_channels_without_input_are_rounded():
    weight, moments = problem()
    dead = np.arange(128) % 5 == 0
    moments[dead] = 0
    moments[:, dead] = 0
    chosen = Format(4, 64)
    ours = gptq(weight, moments, chosen)
    values = np.array(dequantized(ours, chosen))
    assert np.isfinite(values).all()
    largest = np.abs(np.array(weight)).max()
    assert np.abs(values - np.array(weight))[:, dead].max() < 0.4 * largest  # ranges go down to 0.65
    assert relative_error(weight, ours, chosen, moments) < 0.6 * relative_error(
        weight, quantize_rtn(weight, chosen), chosen, moments
    )
    silent = gptq(weight, np.zeros_like(moments), chosen)
    assert mx.array_equal(silent.weight, quantize_rtn(weight, chosen).weight)


def test_ill_conditioned_moments():
    weight, _ = problem()
    direction = np.linspace(-1, 1, 128, dtype=np.float32)
    moments = 1e12 * np.outer(direction, direction)
    packed = gptq(weight, moments, Format(4, 64))
    assert np.isfinite(np.array(dequantized(packed, Format(4, 64)))).all()


def test_groups_of_one_value_and_scales_that_underflow():
    weight = mx.concatenate([mx.zeros((4, 64)), mx.full((4, 64), 0.5), mx.full((4, 64), 6e-8)]).astype(mx.float16)
    values = dequantized(gptq(weight, np.eye(64, dtype=np.float32), Format(2, 32)), Format(2, 32))
    assert mx.allclose(values, weight.astype(mx.float32), atol=1e-6).item()


def test_infinite_inputs_are_an_error():
    weight, moments = problem()
    moments[3, 4] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        gptq(weight, moments, Format(4, 64))


def test_changed_inputs_are_compensated():
    """Inputs that are all 20 % too small."""
    weight, moments = problem()
    packed = gptq(weight, moments, Format(8, 32), dxxt=0.25 * moments)
    source, changed = np.array(weight.astype(mx.float32)), np.array(dequantized(packed, Format(8, 32)))
    grown = np.vdot(changed @ moments, source) / np.vdot(source @ moments, source)
    assert grown == pytest.approx(1.25, abs=0.005)

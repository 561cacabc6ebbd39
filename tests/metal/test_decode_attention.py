"""Decode attention on plain and quantized caches against float64 numpy, and its memory traffic."""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import QuantizedKV, dispatch, masked_attention, prepare_masked_attention, use_kernels
from mlxlm.kernels import decode_attention as module
from mlxlm.kernels.decode_attention import MAX_QUERIES, decode_attention
from tests import oracle
from tests.metal import harness
from tests.oracle import as64

# Largest error over the largest value, of which every output is a mean: a few roundings of the dtype.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 8e-4, mx.bfloat16: 6e-3}

few = settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Case:
    """The template arguments of a kernel. `quantized` is (group size, bits); `splits` runs the combining kernel."""

    D: int
    G: int
    T: int
    dtype: mx.Dtype
    quantized: tuple[int, int] | None = None
    window: bool = False
    softcap: bool = False
    slopes: bool = False
    sinks: bool = False
    splits: bool = False

    def __str__(self):
        options = [o for o in ("window", "softcap", "slopes", "sinks", "splits") if getattr(self, o)]
        kind = "q{1}g{0}".format(*self.quantized) if self.quantized else "plain"
        return "-".join([f"D{self.D}", f"G{self.G}", f"T{self.T}", str(self.dtype)[9:], kind, *options])


# Every head dim; up to 8 rows (4 of head dim 256) in registers, and more with tiles in threadgroup memory.
CASES = [
    Case(32, 1, 1, mx.float32),
    Case(48, 3, 1, mx.bfloat16, window=True),
    Case(64, 4, 1, mx.float16, splits=True),
    Case(64, 1, 8, mx.float32, window=True, softcap=True, slopes=True),
    Case(64, 32, 2, mx.float16, window=True, splits=True),
    Case(80, 2, 1, mx.float32, slopes=True, sinks=True, splits=True),
    Case(96, 5, 1, mx.bfloat16, softcap=True),
    Case(112, 6, 3, mx.float32, splits=True),
    Case(128, 8, 1, mx.bfloat16, window=True, splits=True),
    Case(128, 7, 5, mx.float16, slopes=True, sinks=True),
    Case(256, 2, 1, mx.float16, window=True, splits=True),
    Case(256, 8, 8, mx.bfloat16, softcap=True),
    Case(32, 4, 1, mx.float32, (32, 4)),
    Case(64, 1, 2, mx.float16, (64, 8), slopes=True, splits=True),
    Case(64, 8, 2, mx.float16, (32, 4), window=True, sinks=True),
    Case(96, 5, 1, mx.float32, (32, 4), window=True, softcap=True),
    Case(128, 8, 1, mx.float16, (64, 4), splits=True),
    Case(256, 4, 4, mx.float32, (32, 8)),
]


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def problem(case, B, kv_heads, S):
    """Queries, keys and values."""
    keys = (B, kv_heads, S, case.D)
    shapes = (B, kv_heads * case.G, case.T, case.D), keys, keys
    return [normal(i, *shape, dtype=case.dtype) for i, shape in enumerate(shapes)]


def options(case, heads, window=None):
    return {
        "window": window if case.window else None,
        "softcap": 2.5 if case.softcap else None,
        "slopes": mx.linspace(0.5, 0.01, heads) if case.slopes else None,
        "sinks": mx.linspace(2.0, -3.0, heads).astype(case.dtype) if case.sinks else None,
    }


def attend(case, q, k, v, scale, **options):
    """Return the output, and the keys and values in float64."""
    if case.quantized is None:
        return decode_attention(q, k, v, scale, **options), as64(k), as64(v)
    group_size, bits = case.quantized
    k, v = (mx.quantize(x, group_size=group_size, bits=bits) for x in (k, v))
    form = {"group_size": group_size, "key_bits": bits, "value_bits": bits}
    out = decode_attention(q, k, v, scale, **form, **options)
    return out, *(as64(dequantized(x, *case.quantized)) for x in (k, v))


def dequantized(x, group_size, bits):
    codes, scales, biases = x
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(codes, scales, biases, group_size=group_size, bits=bits)


def check(case, q, k, v, scale=None, tolerance=None, **options):
    scale = case.D**-0.5 if scale is None else scale
    out, k64, v64 = attend(case, q, k, v, scale, **options)
    assert (out.dtype, out.shape) == (q.dtype, q.shape)
    if options.get("slopes") is not None:
        options["slopes"] = as64(options["slopes"])
    if options.get("sinks") is not None:
        options["sinks"] = as64(options["sinks"])
    expected, _ = oracle.attention(as64(q), k64, v64, scale, **options)
    assert np.abs(as64(out) - expected).max() <= (tolerance or TOLERANCE[q.dtype]) * np.abs(v64).max()
    return out


def run_with(metal, seed):
    """In the harness, use another order of the threads and other layouts of the inputs."""
    return nullcontext() if metal is None else harness.use(seed)


def split_into(count):
    """Use another number of threadgroups per head than `_splits` returns, so that some have no keys."""
    return patch.object(module, "_splits", lambda *_: count)


@named(CASES)
@few
@given(data=st.data())
def test_output_equals_float64(metal, case, data):
    draw = data.draw
    S = draw(st.one_of(st.integers(1, MAX_QUERIES + 1), st.integers(10, 150)), "S")
    kv_heads = draw(st.integers(1, 2), "kv_heads")
    q, k, v = problem(case, draw(st.integers(1, 2), "B"), kv_heads, S)
    window = draw(st.one_of(st.integers(1, 20), st.integers(S - 1 or 1, S + 20)), "window") if case.window else None
    splits = draw(st.integers(2, 5), "splits") if case.splits else 1
    with run_with(metal, draw(st.integers(0, 1000), "seed")), split_into(splits):
        check(case, q, k, v, **options(case, q.shape[1], window))


@named([CASES[12], CASES[13]])
def test_a_single_key(metal, case):
    """Arrays of fewer than 8 elements have another address space; queries without keys give 0."""
    with split_into(2 if case.splits else 1):
        out = check(case, *problem(case, 1, 1, 1))
    assert not np.any(as64(out)[:, :, :-1])


def test_more_splits_than_lanes(metal):
    case = CASES[16]
    with split_into(40):
        check(case, *problem(case, 1, 1, 150))


@named([CASES[1], CASES[2]])
def test_strided_caches(metal, case):
    """Slices of a larger buffer, heads after positions, every second element, one broadcast head."""
    S, (q, k, v) = 37, problem(case, 2, 2, 50)
    given = options(case, q.shape[1], 30)
    with split_into(2 if case.splits else 1):
        check(case, q, k[:, :, 5 : S + 5], v[:, :, :S], **given)
        check(case, q.swapaxes(1, 2).reshape(2, case.T, -1, case.D).swapaxes(1, 2), k, v, **given)
        wide = mx.concatenate([k, v], axis=-1)
        check(case, q, wide[..., ::2], wide[..., 1::2], **given)
        turned = v.swapaxes(2, 3).reshape(v.shape[::-1]).transpose(3, 2, 1, 0)
        check(case, q, mx.broadcast_to(k[:, :1], k.shape), turned, **given)


@named([CASES[i] for i in (1, 2, 3, 7, 13, 14)])
def test_ranges_of_a_buffer(metal, case):
    """Each batch entry equals attention over its part alone; what is outside is never used."""
    q, k, v = problem(case, 2, 2, 90)
    given, parts = options(case, q.shape[1], 30), [(0, 41), (13, 90)]
    for row, (first, end) in enumerate(parts):
        for x in (k, v):
            x[row, :, :first], x[row, :, end:] = mx.nan, mx.nan
    with split_into(3 if case.splits else 1):
        out, k64, v64 = attend(case, q, k, v, 0.1, ranges=mx.array(parts), **given)
    if case.slopes:
        given["slopes"] = as64(given["slopes"])
    for row, (first, end) in enumerate(parts):
        own = (x[row : row + 1, :, first:end] for x in (k64, v64))
        expected, _ = oracle.attention(as64(q[row : row + 1]), *own, 0.1, **given)
        assert np.abs(as64(out[row : row + 1]) - expected).max() <= 5 * TOLERANCE[q.dtype]


class Ranges:
    """What a decoding step tells about visible keys."""

    def __init__(self, parts, S):
        self.ranges = mx.array(parts)
        self.distances = mx.arange(S) - parts[0][1] + 1  # ends are equal in a step

    def mask(self, window, heads=1):
        first, end = self.ranges[:, :1], self.ranges[:, 1:]
        index = mx.arange(self.distances.size)
        visible = (index >= first) & (index < end)
        visible = (visible if window is None else visible & (index >= end - window))[:, None, None]
        return mx.repeat(visible, heads, axis=1)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_masked_step_runs_the_kernel_where_it_is_chosen(metal, new_machine, monkeypatch, quantized):
    monkeypatch.setattr(import_module("mlxlm.kernels.masked_attention"), "ON_CPU", False)
    monkeypatch.setattr(dispatch, "_failure", lambda *_: None)  # without the check on first use
    q, k, v = problem(Case(32, 2, 1, mx.float32), 2, 2, 60)
    if quantized:
        k, v = (QuantizedKV.of(x, 8, 32) for x in (k, v))
    visible, given = Ranges([(0, 45), (20, 45)], 60), {"window": 30}
    if quantized:  # MLX's operations support these, too
        given |= {"softcap": 2.0, "slopes": mx.linspace(0.5, 0.1, 4)}
    outputs = []
    for mode in ("metal", "mlx"):
        launches = 0 if metal is None else len(metal.launches)
        form = {"group_size": 32, "key_bits": 8, "value_bits": 8} if quantized else {}
        with use_kernels(mode):
            assert prepare_masked_attention((32, 4, mx.float32), 2, tuple(given), **form)
            outputs.append(np.array(masked_attention(q, k, v, 0.2, visible, **given)))
        assert metal is None or (len(metal.launches) > launches) == (mode == "metal")
    np.testing.assert_allclose(*outputs, atol=2e-6)


@named([CASES[0], CASES[7], CASES[12]])
def test_scores_beyond_the_range_of_exp(metal, case):
    """Scores of 1e4 or -1e4 that differ by about 1 have errors of 1e-3 in float32, and their weights with them."""
    q, k, v = problem(case, 1, 1, 60)
    if not case.quantized:
        k[..., 0] = 1
    for score in (1e4, -1e4):
        q[..., 0] = score * case.D**0.5
        with split_into(3 if case.splits else 1):
            check(case, q, k, v, tolerance=5e-3, **options(case, q.shape[1]))


@pytest.mark.parametrize("parts", [1, 3])
def test_nan_is_not_hidden(metal, parts):
    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(0)) for shape in ((1, 1, 1, 32), (1, 1, 80, 32), (1, 1, 80, 32))
    )
    k[0, 0, 3, 0] = mx.nan
    with split_into(parts):
        assert mx.isnan(decode_attention(q, k, v, 0.1)).all()


@named([CASES[4], CASES[7], CASES[16]])
def test_order_of_threads_does_not_matter(needs_harness, case):
    q, k, v = problem(case, 1, 1, 90)
    results = []
    for seed in range(3):
        with harness.use(seed), split_into(3):
            results.append(np.array(attend(case, q, k, v, 0.1, **options(case, q.shape[1], 70))[0].view(mx.uint16)))
    assert all(np.array_equal(results[0], r) for r in results)


@named([CASES[i] for i in (2, 4, 7, 13, 16)])
def test_memory_traffic_is_near_the_minimum(metal, case):
    """At most 1.2 times the queries, the visible keys and values, and the output; nothing before a window."""
    window = 1050
    S = 3000 if case.window else window
    q, k, v = problem(case, 1, 1, S)
    check(case, q, k, v, **options(case, q.shape[1], window))
    if metal is not None:
        visible = window + case.T - 1 if case.window else S
        row = case.D * case.dtype.size
        if case.quantized:
            group_size, bits = case.quantized
            row = case.D * bits // 8 + 2 * case.D // group_size * case.dtype.size
        least = 2 * (visible * row + q.nbytes)
        assert least <= sum(launch.read + launch.written for launch in metal.launches) <= 1.2 * least

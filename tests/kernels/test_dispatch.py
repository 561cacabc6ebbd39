"""Dispatch: preferred paths, modes, measurements, and kernels that fail or are wrong."""

import json
import subprocess
import sys
import threading
import warnings

import pytest

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import QuantizedKV, attention, bench, dispatch, measurements, use_kernels
from mlxlm.kernels.attention import DECODE, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.bench import Timing, benchmark
from mlxlm.kernels.dispatch import Case, Choice, Operation
from mlxlm.utils.errors import ConfigError, PlatformError

pytestmark = pytest.mark.usefixtures("new_machine")

ATTENTION = sys.modules["mlxlm.kernels.attention"]  # the package has a function of this name

CASE = Case("double", "float32", ("N", "rows"), (8, 4))


def operation(metal=lambda x: 2 * x, order=("metal", "mlx"), unsupported_reason=lambda path, case: None):
    return Operation(
        "double",
        {"mlx": lambda x: x + x, "metal": metal},
        lambda case: (order, "it comes first"),
        lambda case: ([mx.arange(case.size("N"), dtype=mx.float32)], {}),
        lambda case: (case.with_sizes(rows=1),),
        unsupported_reason,
        differentiable=(0,),
    )


def test_first_available_path_is_used():
    assert dispatch.choose_path(operation(), CASE) == Choice("metal", "it comes first")
    other = CASE._replace(operation="other")
    assert dispatch.choose_path(operation(order=("mlx", "metal")), other).path == "mlx"


def test_unsupported_path_is_skipped_with_a_reason():
    unsupported = operation(
        unsupported_reason=lambda path, case: "it doesn't support N of 8" if path == "metal" else None
    )
    choice = dispatch.choose_path(unsupported, CASE)
    assert choice.path == "mlx" and "not metal: it doesn't support N of 8" in choice.why
    with use_kernels("metal"):  # wherever it exists
        assert dispatch.choose_path(unsupported, CASE).path == "mlx"


def test_without_metal_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    assert dispatch.choose_path(operation(), CASE).path == "mlx"
    with use_kernels("metal"), pytest.raises(PlatformError, match="no Metal"):
        dispatch.choose_path(operation(), CASE)


@mx.custom_function
def other_gradient(x):
    return 2 * x


@other_gradient.vjp
def _reversed(primals, cotangent, _output):
    return 2 * cotangent[::-1]


def not_compiled(x):
    raise RuntimeError("no such function:\n foo")


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda x: 2.01 * x, "wrong on this machine"),
        (lambda x: x * mx.nan, "wrong on this machine"),
        (lambda x: mx.stop_gradient(2 * x), "wrong on this machine"),
        (other_gradient, "wrong on this machine"),
        (not_compiled, "failed on this machine .*no such function: foo"),
    ],
)
def test_wrong_kernel_is_disabled_with_one_warning(broken, message):
    with pytest.warns(UserWarning, match=message) as caught:
        assert dispatch.choose_path(operation(broken), CASE).path == "mlx"
        # Another length is the same kernel: it is not tried again.
        assert dispatch.choose_path(operation(broken), CASE.with_sizes(rows=4096)).path == "mlx"
    assert len(caught) == 1
    with use_kernels("metal"), pytest.raises(PlatformError):
        dispatch.choose_path(operation(broken), CASE)


def test_kernel_is_checked_once_per_machine():
    calls = []

    def counted(x):
        calls.append(x)
        return 2 * x

    dispatch.choose_path(operation(counted), CASE)
    checked = len(calls)
    assert checked
    assert json.loads(measurements.cache_path().read_text())[measurements.device_key()]["verified"] == [
        "double float32 N=8 rows=1"
    ]
    dispatch._choices.clear()
    dispatch._failures.clear()
    measurements._read.cache_clear()
    assert dispatch.choose_path(operation(counted), CASE).path == "metal"
    assert len(calls) == checked


@pytest.mark.parametrize("transform", [mx.compile, mx.checkpoint, lambda f: mx.compile(mx.checkpoint(f))])
def test_first_use_inside_a_transformed_gradient(transform):
    double = operation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = transform(lambda x: double.implementation(CASE)(x).sum())
        assert mx.grad(f)(mx.ones(3)).tolist() == [2, 2, 2]
    assert dispatch._choices[CASE, "auto"].path == "metal"


def test_first_use_in_many_threads_is_checked_once():
    calls = []
    double = operation(lambda x: calls.append(x) or 2 * x)
    threads = [threading.Thread(target=dispatch.choose_path, args=(double, CASE)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once = len(calls)
    dispatch._choices.clear()
    dispatch._failures.clear()
    measurements.cache_path().unlink()
    measurements._read.cache_clear()
    dispatch.choose_path(double, CASE)
    assert len(calls) == 2 * once


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', "\xff"])
def test_malformed_record_is_ignored(content):
    measurements.cache_path().parent.mkdir(parents=True)
    measurements.cache_path().write_text(content, encoding="latin-1")
    assert dispatch.choose_path(operation(), CASE).path == "metal"
    assert measurements.fastest_path(str(CASE)) is None


def test_unwritable_record_is_ignored(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose_path(operation(), CASE).path == "metal"


def test_a_user_without_a_home(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", none)
    assert dispatch.choose_path(operation(), CASE).path == "metal"


def test_fastest_measured_path_is_used_if_preferred():
    measurements.save_measurement(str(CASE), {"fastest": "mlx"})
    assert dispatch.choose_path(operation(), CASE) == Choice("mlx", "measured fastest here")
    dispatch.clear_choices()
    assert dispatch.choose_path(operation(order=("metal",)), CASE).path == "metal"  # memory decides: mlx may not


def test_record_of_another_machine_is_kept_but_not_used(monkeypatch):
    measurements.save_measurement(str(CASE), {"fastest": "mlx"})
    monkeypatch.setattr(measurements, "device_key", lambda: "another")
    assert measurements.fastest_path(str(CASE)) is None
    measurements.save_measurement(str(CASE), {"fastest": "metal"})
    assert len(json.loads(measurements.cache_path().read_text())) == 2


def test_concurrent_writes_are_kept():
    assert measurements.fastest_path(str(CASE)) is None  # read before the other process writes
    code = f"from mlxlm.kernels import measurements; measurements.save_measurement({str(CASE)!r}, {{'fastest': 'mlx'}})"
    subprocess.run([sys.executable, "-c", code], check=True)
    measurements.save_verified("something else")
    assert measurements.fastest_path(str(CASE)) == "mlx" and measurements.is_verified("something else")


def test_modes(monkeypatch):
    with use_kernels("mlx"):
        assert dispatch.choose_path(operation(), CASE) == Choice("mlx", "requested")
    with use_kernels("blockwise"):  # this operation has no such path
        assert dispatch.choose_path(operation(), CASE).path == "metal"
    monkeypatch.setattr(dispatch, "_environment", "mlx")
    assert dispatch.choose_path(operation(), CASE).path == "mlx"
    monkeypatch.setattr(dispatch, "_environment", "fast")
    with pytest.raises(ConfigError, match="'fast'.*auto, metal, mlx, blockwise"):
        operation().implementation(CASE)


def test_mode_is_local_to_a_thread():
    seen = []
    with use_kernels("mlx"):
        thread = threading.Thread(target=lambda: seen.append(dispatch.mode()))
        thread.start()
        thread.join()
    assert seen == ["auto"] and dispatch.mode() == "auto"


def case(operation, T, S=512, D=64, K=8, dtype="float16", **form):
    return attention_case(operation, dtype, D, 8, K, T, S, (), **form)


def test_rules_of_attention_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ATTENTION, "ON_CPU", False)
    monkeypatch.setattr(ATTENTION, "metal_available", lambda: True)

    def order(operation, *args, **sizes):
        return operation.preferred_paths(case(operation, *args, **sizes))[0]

    assert order(DECODE, 1)[0] == "mlx" and order(DECODE, 1, D=80)[0] == "metal"
    assert order(DECODE, 8, K=1)[0] == "metal"  # 64 rows for one key head
    assert order(PREFILL, 512)[0] == "mlx" and order(PREFILL, 512, D=48)[0] == "metal"
    assert order(PREFILL, 2048, V=32)[0] == "blockwise"
    assert order(QUANTIZED, 1, key_bits=4, value_bits=4, group_size=64)[0] == "metal"
    assert order(TRAINING, 4096) == ("blockwise", "metal", "mlx")
    assert order(TRAINING, 512, window=128) == ("mlx", "metal", "blockwise")
    why = TRAINING.preferred_paths(case(TRAINING, 4096))[1]
    assert why == "memory linear in the length; `mlxlm kernels bench` finds out whether metal is faster here"
    monkeypatch.setattr(ATTENTION, "metal_available", lambda: False)
    assert order(TRAINING, 4096) == ("mlx", "blockwise")  # CUDA has a fused gradient, but
    assert order(TRAINING, 4096, dtype="float32") == ("blockwise", "metal", "mlx")  # not in float32


def test_training_on_a_mac_uses_the_metal_kernels_where_they_were_measured_to_be_fastest(monkeypatch):
    monkeypatch.setattr(Operation, "unavailable_reason", lambda self, path, case: None)
    monkeypatch.setattr(ATTENTION, "metal_available", lambda: True)
    for T, unmeasured in ((4096, "blockwise"), (512, "mlx")):
        measured = case(TRAINING, T)
        assert dispatch.choose_path(TRAINING, measured).path == unmeasured
        measurements.save_measurement(str(measured), {"fastest": "metal"})
        dispatch.clear_choices()
        assert dispatch.choose_path(TRAINING, measured) == ("metal", "measured fastest here")


def test_windows_in_training():
    """Rounded to a power of two, a size of the case; the sample inputs have it, and the checks on little data."""

    def sizes(T, window):
        return attention_case(TRAINING, "float32", 64, 8, 2, T, T, ("window",), window=window)

    rounded = sizes(900, 100)
    assert rounded == sizes(512, 128) and str(rounded) == "training_attention float32 D=64 H=8 K=2 window=128 T=512"
    assert TRAINING.sample_inputs(rounded)[1] == {"window": 128}
    assert TRAINING.check_cases(rounded)[0].size("window") == 35
    assert bench.narrow(sizes(4096, 512)).label == "D=64 H=4 K=1 window=128 T=1024"
    for T, window in ((900, 300), (200, 20), (100, 500)):  # all of the rounded length, or shorter than any case
        assert sizes(T, window) == attention_case(TRAINING, "float32", 64, 8, 2, T, T, ())


@pytest.mark.parametrize("T, first", [(1, "mlx"), (1023, "mlx"), (1024, "blockwise"), (5000, "blockwise")])
def test_long_gradients_use_linear_memory(T, first):
    assert TRAINING.preferred_paths(case(TRAINING, T, dtype="float32"))[0][0] == first


@pytest.mark.skipif(not ON_CPU, reason="MLX fuses prompts on a GPU")
def test_long_prompts_use_linear_memory_on_a_cpu():
    assert PREFILL.preferred_paths(case(PREFILL, 1500))[0][0] == "blockwise"
    assert PREFILL.preferred_paths(case(PREFILL, 500))[0][0] == "mlx"


@pytest.mark.skipif(not ON_CPU, reason="the paths of a CPU")
def test_soft_cap_uses_a_path_that_supports_it(monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    q = mx.ones((1, 2, 12, 32))
    for training in (True, False):
        attention(q, q, q, 0.1, softcap=5.0, training=training)
    with use_kernels("mlx"):
        attention(q, q, q, 0.1, softcap=5.0)
    assert len(dispatch._choices) == 3
    assert {choice.path for choice in dispatch._choices.values()} == {"blockwise"}
    assert any("not mlx: it doesn't support softcap" in choice.why for choice in dispatch._choices.values())


@pytest.mark.parametrize("T", [1, 3, 12])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4), (4, None), (None, 8)], ids=str)
def test_quantized_attention_equals_attention_on_dequantized_values(bits, T, monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    q = mx.random.normal((2, 6, T, 64), key=mx.random.key(0))
    k, v = (mx.random.normal((2, 2, 21, 64), key=mx.random.key(i)) for i in (1, 2))
    quantized = [x if b is None else QuantizedKV.of(x, b, 32) for x, b in zip((k, v), bits, strict=True)]
    plain = [x if b is None else x.dequantized() for x, b in zip(quantized, bits, strict=True)]
    slopes, first = -(2.0 ** -mx.arange(1, 7)), mx.array([0, 5], mx.int32)
    for options in ({}, {"window": 7}, {"softcap": 2.0, "slopes": slopes}, {"first": first, "window": 7}):
        found = attention(q, *quantized, 0.2, **options)
        assert mx.allclose(found, attention(q, *plain, 0.2, **options), atol=1e-5), options


@pytest.mark.parametrize("path", ["mlx", "blockwise"])
@pytest.mark.parametrize("T", [1, 2, 9, 70, 130])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("biased", [False, True])
def test_left_padding_is_ignored(path, T, window, biased, monkeypatch):
    """Each batch entry equals a call without the keys before its first; rows that stand there are finite."""
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    S, begins = T + 20, [0, 7, 20, T + 19]
    shapes = ((4, 6, T, 16), (4, 2, S, 16), (4, 2, S, 16))
    q, k, v = (mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes))
    k[1, :, :7], v[1, :, :7] = 1e4, 1e4
    options = {"window": window, **({"softcap": 3.0, "slopes": mx.linspace(0.1, 0.6, 6)} if biased else {})}
    with use_kernels(path):
        found = attention(q, k, v, 0.3, first=mx.array(begins, mx.int32), **options)
    assert mx.isfinite(found).all()
    for row, begin in enumerate(begins):
        real = slice(max(0, begin - (S - T)), T)
        parts = (x[row : row + 1, :, begin:] for x in (k, v))
        wanted = attention(q[row : row + 1, :, real], *parts, 0.3, **options)
        assert mx.allclose(found[row, :, real], wanted[0], atol=2e-5), row


@pytest.mark.skipif(not ON_CPU, reason="the path of a CPU")
@pytest.mark.parametrize("first", [False, True])
def test_decoding_with_many_scores(first):
    """Enough for the vectorised exp; MLX's own is the oracle."""
    q, k, v = (mx.random.normal((2, h, n, 32), key=mx.random.key(h + n)) for h, n in ((6, 1), (2, 3000), (2, 3001)))
    v, begins = v[:, :, 1:], mx.array([0, 1234], mx.int32) if first else None
    mask = None if begins is None else mx.arange(3000) >= begins[:, None, None, None]
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert mx.allclose(attention(q, k, v, 0.3, first=begins), wanted, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group_size", [32, 64])
def test_dequantized_equals_mlx_exactly(bits, group_size):
    x = mx.random.normal((2, 3, 5, 128), key=mx.random.key(0)) * mx.array([1e-3, 1.0, 1e3])[:, None, None]
    quantized = QuantizedKV.of(x, bits, group_size)
    assert quantized.shape == x.shape
    assert mx.array_equal(quantized.dequantized(), mx.dequantize(*quantized.arrays, group_size=group_size, bits=bits))


def timings(**medians_and_peaks):
    return {path: Timing([seconds], 0.0, peak) for path, (seconds, peak) in medians_and_peaks.items()}


def test_mlx_gradient_is_used_for_long_sequences_if_faster_without_more_memory():
    long = case(TRAINING, 2048, dtype="float32")
    order = TRAINING.preferred_paths(long)[0]
    fused, square = timings(metal=(2, 100), mlx=(1, 150)), timings(metal=(2, 100), mlx=(1, 900))
    assert (bench._fastest(order, long, fused), bench._fastest(order, long, square)) == ("mlx", "metal")
    measurements.save_measurement(str(long), {"fastest": "mlx"})
    assert dispatch.choose_path(TRAINING, long) == Choice("mlx", "measured fastest here")


def test_every_available_path_is_measured(monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    measured = benchmark(operation(), CASE, 1)
    assert set(measured.timings) == {"mlx"} and measured.fastest == "mlx"
    assert measured.skipped == {"metal": "no Metal on this machine"}
    long = attention_case(TRAINING, "float32", 8, 2, 1, 1024, 1024, ())
    assert bench._too_large("mlx", long) is None
    monkeypatch.setattr("mlxlm.backend.device.device_memory", lambda: 1 << 20)
    assert "too much memory" in bench._too_large("mlx", long) and bench._too_large("blockwise", long) is None

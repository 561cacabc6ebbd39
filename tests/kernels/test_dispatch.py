"""Which path is taken: rules, modes, measurements, and kernels that fail or are wrong."""

import json
import warnings

import pytest

from mlxlm._mlx import ON_CPU, mx
from mlxlm.errors import ConfigError, PlatformError
from mlxlm.kernels import attention, dispatch, records
from mlxlm.kernels.attention import DECODE, PREFILL, QUANTIZED, TRAINING
from mlxlm.kernels.dispatch import Case, Operation


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No memory of other choices, an own cache folder, and a machine with Metal."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch, "metal_available", lambda: True)
    monkeypatch.setattr(dispatch, "_choices", {})
    monkeypatch.setattr(dispatch, "_failures", {})
    records._read_all.cache_clear()
    yield
    records._read_all.cache_clear()


CASE = Case("double", "float32", (("N", 8), ("rows", 4)))


def operation(metal=lambda x: 2 * x, order=("metal", "mlx"), lacks=lambda path, case: None):
    return Operation(
        "double",
        {"mlx": lambda x: x + x, "metal": metal},
        lambda case: (order, "it comes first"),
        lambda case, small: ([mx.arange(8, dtype=mx.float32)], {}),
        lacks,
        differentiable=(0,),
    )


def test_the_first_path_that_can_run():
    assert dispatch.choose(operation(), CASE).path == "metal"
    assert dispatch.choose(operation(order=("mlx", "metal")), Case("other", "float32", ())).path == "mlx"


def test_a_path_that_lacks_something_is_passed_over_and_the_reason_told():
    lacking = operation(lacks=lambda path, case: "it has no N of 8" if path == "metal" else None)
    choice = dispatch.choose(lacking, CASE)
    assert choice.path == "mlx" and "metal: it has no N of 8" in choice.why


def test_without_metal_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    assert dispatch.choose(operation(), CASE).path == "mlx"
    with dispatch.using("metal"), pytest.raises(PlatformError, match="no Metal"):
        dispatch.choose(operation(), CASE)


@pytest.mark.parametrize(
    "broken, message",
    [
        (lambda x: 2.01 * x, "wrong on this machine"),
        (lambda x: x * mx.nan, "wrong on this machine"),
        (lambda x: mx.stop_gradient(2 * x), "wrong on this machine"),
        (lambda x: exec("raise RuntimeError('no such function: foo')"), "failed on this machine .*foo"),
    ],
)
def test_a_bad_kernel_is_switched_off_with_one_warning(broken, message):
    with pytest.warns(UserWarning, match=message) as caught:
        assert dispatch.choose(operation(broken), CASE).path == "mlx"
        # Another length is the same kernel: it is not tried again.
        longer = Case("double", "float32", (("N", 8), ("rows", 4096)))
        assert dispatch.choose(operation(broken), longer).path == "mlx"
    assert len(caught) == 1
    with dispatch.using("metal"), pytest.raises(PlatformError):
        dispatch.choose(operation(broken), CASE)


def test_a_kernel_is_tried_once_per_machine():
    calls = []

    def counted(x):
        calls.append(x)
        return 2 * x

    dispatch.choose(operation(counted), CASE)
    tried = len(calls)
    assert tried and json.loads(records.path().read_text())[records.machine()]["verified"] == ["double float32 N=8"]
    dispatch._choices.clear()
    dispatch._failures.clear()
    records._read_all.cache_clear()
    assert dispatch.choose(operation(counted), CASE).path == "metal"
    assert len(calls) == tried


def test_the_first_use_may_come_within_a_compiled_gradient():
    double = operation()

    def loss(x):
        return double.implementation(CASE)(x).sum()

    assert mx.compile(mx.grad(loss))(mx.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 3}', '{"MACHINE": {"measured": [], "verified": 1}}', "\xff"])
def test_a_malformed_record_is_as_good_as_none(content):
    records.path().parent.mkdir(parents=True)
    records.path().write_text(content.replace("MACHINE", records.machine()), encoding="latin-1")
    assert dispatch.choose(operation(), CASE).path == "metal"
    assert records.fastest(str(CASE)) is None


def test_a_record_that_cannot_be_written_changes_nothing(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.choose(operation(), CASE).path == "metal"


def test_what_was_measured_fastest_is_taken_among_those_that_may():
    records.measured({str(CASE): {"fastest": "mlx"}})
    assert dispatch.choose(operation(), CASE) == dispatch.Choice("mlx", "measured fastest here")
    dispatch.forget_choices()
    assert dispatch.choose(operation(order=("metal",)), CASE).path == "metal"  # memory decides: mlx may not


def test_a_record_of_another_machine_is_kept_and_not_used(monkeypatch):
    records.measured({str(CASE): {"fastest": "mlx"}})
    monkeypatch.setattr(records, "machine", lambda: "another")
    assert records.fastest(str(CASE)) is None
    records.measured({str(CASE): {"fastest": "metal"}})
    assert len(json.loads(records.path().read_text())) == 2


def test_modes(monkeypatch):
    with dispatch.using("mlx"):
        assert dispatch.choose(operation(), CASE) == dispatch.Choice("mlx", "asked for")
    with dispatch.using("blockwise"):  # this operation has no such path
        assert dispatch.choose(operation(), CASE).path == "metal"
    monkeypatch.setenv(dispatch.VARIABLE, "mlx")
    assert dispatch.choose(operation(), CASE).path == "mlx"
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ConfigError, match="'fast'.*auto, metal, mlx, blockwise"):
        dispatch.choose(operation(), CASE)


def case(operation, **sizes):
    sizes = {"D": 64, "H": 8, "K": 8, **sizes}
    return Case(operation.name, "float16", tuple(sizes.items()))


@pytest.mark.skipif(ON_CPU, reason="the rules of a GPU")
def test_rules_of_attention_on_a_gpu():
    first = lambda operation, **sizes: operation.prefers(case(operation, **sizes))[0][0]  # noqa: E731
    assert first(DECODE, T=1, S=512) == "mlx" and first(DECODE, T=1, S=512, D=80) == "metal"
    assert first(DECODE, T=8, S=512, K=1) == "metal"  # 64 rows for one key head
    assert first(PREFILL, T=512) == "mlx" and first(PREFILL, T=512, D=48) == "metal"
    assert first(QUANTIZED, T=1, S=512, bits=4, group_size=64) == "metal"


def test_memory_decides_for_long_gradients():
    assert "mlx" not in TRAINING.prefers(case(TRAINING, T=1024))[0]
    assert TRAINING.prefers(case(TRAINING, T=512))[0][0] == "mlx"


def test_soft_cap_takes_a_path_that_has_one(monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    q = mx.ones((1, 2, 12, 32))
    for training in (True, False):
        attention(q, q, q, 0.1, softcap=5.0, training=training)
    assert {c.operation: choice.path for (c, _), choice in dispatch._choices.items()} == {
        "training_attention": "blockwise",
        "prompt_attention": "blockwise",
    }
    with dispatch.using("mlx"), pytest.raises(PlatformError, match="it has no softcap"):
        attention(q, q, q, 0.1, softcap=5.0)

"""Recovery: scales, biases and norms are trained to the source's logits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config.quantization import BITS, Format
from mlxlm.quantize import quantize, recover
from mlxlm.quantize.rtn import dequantized, quantize_rtn
from mlxlm.utils.errors import ArgumentError, CheckpointError, DataError


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(recover, "STEPS", 6)
    monkeypatch.setattr(recover, "BATCH_TOKENS", 512)
    monkeypatch.setattr(recover, "LEARNING_RATE", 0.03)


def parts(folder) -> dict[str, mx.array]:
    return {name: tensor.read() for name, tensor in open_checkpoint(folder).tensors.items()}


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_recovery_lowers_the_divergence_and_keeps_the_packed_integers(model, tmp_path, texts, method):
    options = {"bits": 2, "method": method, "eval_text": texts[1], "verify": True}
    calibration = {"calibration_text": texts[0]}
    plain = quantize(model, tmp_path / "plain", **options, **(calibration if method == "gptq" else {}))
    phases = []
    report = quantize(
        model, tmp_path / "out", recover=True, **options, **calibration, progress=lambda *p: phases.append(p)
    )
    assert report.metrics_before_recovery.kl == pytest.approx(plain.metrics.kl, rel=1e-4)
    assert report.metrics.kl < 0.9 * plain.metrics.kl
    assert report.bits_per_weight == plain.bits_per_weight
    before, after = parts(tmp_path / "plain"), parts(tmp_path / "out")
    assert {name: (v.shape, v.dtype) for name, v in before.items()} == {
        name: (v.shape, v.dtype) for name, v in after.items()
    }
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert changed == {n for n in before if n.endswith((".scales", ".biases", "norm.weight"))}
    recovering = [(done, total) for phase, done, total in phases if phase == "recovering"]
    assert recovering == [(done, 6) for done in range(7)]
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("bits", BITS)
def test_gradients_are_those_of_finite_differences(bits):
    fmt, rng = Format(bits, 32), np.random.default_rng(bits)
    packed = quantize_rtn(mx.array(rng.normal(size=(3, 64)), dtype=mx.float32), fmt)
    values = {**packed.parts("m"), "norm.weight": mx.array(rng.normal(size=8), dtype=mx.float32)}
    trained = recover._Parameters(values, {"m": fmt, "unquantized": None})
    start = trained.zeros()
    assert mx.array_equal(trained.weights(start)["m.weight"], dequantized(packed, fmt))
    assert all(mx.array_equal(value, values[name]) for name, value in trained.stored(start).items())
    factors = {n: mx.array(rng.normal(size=v.shape), dtype=mx.float32) for n, v in trained.weights(start).items()}

    def loss(deltas):
        return sum((mx.square(value) * factors[name]).sum() for name, value in trained.weights(deltas).items())

    deltas = {name: mx.array(0.1 * rng.normal(size=value.shape), dtype=mx.float32) for name, value in start.items()}
    direction = {name: mx.array(rng.normal(size=value.shape), dtype=mx.float32) for name, value in start.items()}
    for only in start:
        moved = [
            {n: v + sign * 0.05 * (n == only) * direction[n] for n, v in deltas.items()} for sign in (1, -1)
        ]  # the loss is quadratic in each: a difference of any size is exact
        slope = (loss(moved[0]) - loss(moved[1])).item() / 0.1
        gradient = (mx.grad(loss)(deltas)[only] * direction[only]).sum().item()
        assert gradient == pytest.approx(slope, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("learning_rate", [100.0, float("nan")])
def test_a_model_that_recovery_makes_worse_stays_as_it_was(model, tmp_path, texts, monkeypatch, learning_rate):
    monkeypatch.setattr(recover, "LEARNING_RATE", learning_rate)
    monkeypatch.setattr(recover, "STEPS", 2)
    quantize(model, tmp_path / "plain", method="rtn", evaluate=False)
    quantize(model, tmp_path / "out", method="rtn", evaluate=False, recover=True, calibration_text=texts[0])
    before, after = parts(tmp_path / "plain"), parts(tmp_path / "out")
    assert all(mx.array_equal(before[name], after[name]) for name in before | after)


def test_floating_point_formats_train_only_the_norms(model, tmp_path, texts):
    options = {"mode": "mxfp4", "method": "rtn", "evaluate": False}
    quantize(model, tmp_path / "plain", **options)
    report = quantize(model, tmp_path / "out", recover=True, calibration_text=texts[0], **options)
    assert report.metrics is report.metrics_before_recovery is None
    before, after = parts(tmp_path / "plain"), parts(tmp_path / "out")
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert changed == {name for name in before if name.endswith("norm.weight")}


def test_models_of_other_kinds_and_mixed_bits(write_model, tmp_path, texts):
    """Experts, an untied head, and biases."""
    experts = {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_model(tmp_path / "source", mx.bfloat16, tie_word_embeddings=False, attention_bias=True, **experts)
    report = quantize(
        tmp_path / "source", tmp_path / "out", recover=True, target_bpw=3.0,
        calibration_text=texts[0], eval_text=texts[1],
    )  # fmt: skip
    assert report.metrics.kl < report.metrics_before_recovery.kl


def test_what_cannot_be_recovered_is_refused_at_once(model, tmp_path, texts, monkeypatch):
    with pytest.raises(ArgumentError, match="mlxlm runs itself"):
        recover.check_recovery(SimpleNamespace(checkpoint=None), None)
    short = tmp_path / "short.txt"
    short.write_text(texts[0].read_text()[:400])
    with pytest.raises(DataError, match="too few to recover on"):
        quantize(model, tmp_path / "out", recover=True, calibration_text=short, eval_text=texts[1])
    monkeypatch.setattr(platform, "total_memory", lambda: 1 << 20)
    with pytest.raises(CheckpointError, match=r"takes .* GB of memory"):
        quantize(model, tmp_path / "out", recover=True, calibration_text=texts[0])
    assert list(tmp_path.iterdir()) == [short]

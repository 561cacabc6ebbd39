"""Searches for bits by bytes on disk, bits per weight and KL divergence."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config.quantization import BITS, Format
from mlxlm.convert.compare import kl_divergence
from mlxlm.kernels import log_softmax
from mlxlm.quantize import bit_search, quantize, sensitivity
from mlxlm.quantize.calibrate import get_submodule
from mlxlm.quantize.quantization_plan import matrices, uniform
from mlxlm.quantize.rtn import dequantized, quantize_rtn
from mlxlm.quantize.sensitivity import estimate_sensitivities
from mlxlm.utils.errors import ConfigError
from tests.quantize.conftest import needed_bytes


def test_fit_to_size(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(matrices(checkpoint), Format(4))
    sensitivities = {
        matrix.name: {Format(bits): weight * 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)}
        for weight, matrix in enumerate(plan.matrices, start=1)
    }
    smallest, path = bit_search.upgrade_path(plan, sensitivities)
    rates = [step.saved / step.nbytes for step in path]
    assert rates == sorted(rates, reverse=True) and set(smallest.formats.values()) == {Format(2)}
    for extra in (0, 5_000, 20_000, 10**9):
        found = bit_search.fit_to_size(plan, sensitivities, smallest.nbytes() + extra)
        assert found.nbytes() <= smallest.nbytes() + extra
    assert set(found.formats.values()) == {Format(8)}


def test_formats_above_the_convex_hull_are_left_out(model):
    """Here 3 bits save nothing: without the hull they would end the search before 4."""
    checkpoint = open_checkpoint(model)
    plan = uniform(matrices(checkpoint), Format(4))
    costs = {Format(2): 1.0, Format(3): 0.99, Format(4): 0.1}
    _, path = bit_search.upgrade_path(plan, {matrix.name: costs for matrix in plan.matrices})
    assert {step.chosen for step in path} == {Format(4)}


def test_sensitivities_fall_with_bits_and_are_positive(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(matrices(checkpoint), Format(8))
    windows = np.arange(64, dtype=np.int32)[None] + 20
    found = estimate_sensitivities(checkpoint, bit_search.candidate_formats(plan, None), windows)
    assert found.keys() == {matrix.name for matrix in plan.matrices}
    for cost in found.values():
        assert {(fmt.bits, fmt.group_size) for fmt in cost} >= {(bits, size) for bits in BITS for size in (32, 64)}
        for size in (32, 64):
            values = [cost[Format(bits, size)] for bits in BITS]
            assert values == sorted(values, reverse=True) and values[-1] > 0


def test_estimated_costs_are_those_of_single_matrices(model):
    """Each matrix alone is rounded, and the KL divergence computed; on average over matrices the estimate is right."""
    checkpoint = open_checkpoint(model)
    plan = uniform(matrices(checkpoint), Format(4))
    windows = np.random.default_rng(0).integers(20, 300, (16, 32)).astype(np.int32)
    estimated = estimate_sensitivities(checkpoint, bit_search.candidate_formats(plan, 64), windows)
    decoder = load_model(model)[0]
    source = log_softmax(decoder(mx.array(windows)).astype(mx.float32))
    ratios = []
    for matrix in plan.matrices:
        layer = get_submodule(decoder, matrix.modules[0])
        kept = layer.weight
        layer.weight = dequantized(quantize_rtn(kept, plan.format_of(matrix)), plan.format_of(matrix))
        changed = log_softmax(decoder(mx.array(windows)).astype(mx.float32))
        layer.weight = kept
        exact = kl_divergence(source, changed).sum(axis=-1).mean().item()
        ratios.append(estimated[matrix.name][plan.format_of(matrix)] / exact)
    assert np.exp(np.mean(np.log(ratios))) == pytest.approx(1, abs=0.3) and 0.2 < min(ratios) <= max(ratios) < 5


def test_fit_to_kl_measures_no_plan_twice(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(matrices(checkpoint), Format(4))
    sensitivities = {m.name: {Format(bits): 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)} for m in plan.matrices}
    metrics = []

    def evaluate(plan) -> float:
        metrics.append(plan.nbytes())
        return 1.0

    with pytest.raises(ConfigError, match="the most bits give 1"):
        bit_search.fit_to_kl(plan, sensitivities, 1e-9, evaluate)
    assert len(metrics) == len(set(metrics))


measured = {}


@pytest.fixture(autouse=True)
def sensitivities_measured_once(monkeypatch):
    """Searches in the same model and text share their measurements, which take longest."""

    def cached(checkpoint, formats, windows, progress, compensated):
        key = (checkpoint.path, windows.tobytes(), str(formats), compensated, sensitivity._Costs.add)
        if key not in measured:
            measured[key] = estimate_sensitivities(checkpoint, formats, windows, progress, compensated=compensated)
        return measured[key]

    monkeypatch.setattr(bit_search, "estimate_sensitivities", cached)


def test_max_size_bounds_the_bytes_on_disk(model, tmp_path, texts):
    max_size = needed_bytes(model) - (model / "model.safetensors").stat().st_size + 60_000
    report = quantize(model, tmp_path / "out", max_size=max_size, calibration_text=texts[0], evaluate=False)
    assert max_size - 4_000 < needed_bytes(tmp_path / "out") == report.bytes <= max_size
    with pytest.raises(ConfigError, match=r"1000 bytes can't be reached \(try: \d+ or more") as error:
        quantize(model, tmp_path / "small", max_size=1000, calibration_text=texts[0], evaluate=False)
    least = int(error.value.hint.split()[0])
    smallest = quantize(model, tmp_path / "least", max_size=least, calibration_text=texts[0], evaluate=False)
    assert smallest.bytes <= least and set(smallest.bits.values()) == {2}


def test_target_bpw_is_better_than_uniform_bits(model, tmp_path, texts):
    even = quantize(model, tmp_path / "even", bits=3, calibration_text=texts[0], eval_text=texts[1])
    target = even.bits_per_weight
    report = quantize(model, tmp_path / "out", target_bpw=target, calibration_text=texts[0], eval_text=texts[1])
    assert target - 0.1 < report.bits_per_weight <= target
    assert report.metrics.kl < even.metrics.kl
    with pytest.raises(ConfigError, match="1.5 bits per weight can't be reached.*2.* or more"):
        quantize(model, tmp_path / "none", target_bpw=1.5, calibration_text=texts[0])


def test_max_kl_with_few_candidates_on_disk(model, tmp_path, texts, monkeypatch):
    num_folders = []
    quantize_tensors = bit_search.quantize_tensors

    def watched(job, plan, scratch, label):
        num_folders.append(len(list(scratch.parent.iterdir())))
        return quantize_tensors(job, plan, scratch, label)

    monkeypatch.setattr(bit_search, "quantize_tensors", watched)
    report = quantize(
        model, tmp_path / "out", max_kl=0.05, method="gptq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert len(num_folders) > 2 and max(num_folders) <= 2  # the best so far, and the current one
    assert report.metrics.kl <= 0.05 and 2.5 < report.bits_per_weight < 8
    with pytest.raises(ConfigError, match="a KL divergence of 1e-12 can't be reached: the most bits give"):
        quantize(model, tmp_path / "none", max_kl=1e-12, calibration_text=texts[0], eval_text=texts[1])
    assert not (tmp_path / "none").exists()


def test_matrices_without_cost_get_the_remaining_bytes(model, tmp_path, texts, monkeypatch):
    add = sensitivity._Costs.add
    monkeypatch.setattr(
        sensitivity._Costs, "add", lambda self, name, w, rows, columns: add(self, name, w, 0 * rows, columns)
    )
    report = quantize(model, tmp_path / "out", max_size=10**9, calibration_text=texts[0], evaluate=False)
    assert set(report.bits.values()) == {8}


def test_sizes_alone_refuse_a_target_before_anything_is_measured(model, tmp_path, texts, monkeypatch):
    monkeypatch.setattr(bit_search, "estimate_sensitivities", None)
    for target in ({"target_bpw": 1.5}, {"max_size": 1000}):
        with pytest.raises(ConfigError, match="can't be reached"):
            quantize(model, tmp_path / "out", calibration_text=texts[0], evaluate=False, **target)

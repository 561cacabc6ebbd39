"""Searches for bits by bytes on disk, bits per weight and KL divergence."""

import pytest

from mlxlm.quantize import bit_search, quantize
from mlxlm.utils.errors import ConfigError
from tests.quantize.conftest import needed_bytes

measure, measured = bit_search.estimate_sensitivities, {}


@pytest.fixture(autouse=True)
def sensitivities_measured_once(monkeypatch):
    """Searches in the same model and text share their measurements, which take longest."""

    def cached(checkpoint, plan, windows, progress):
        key = (checkpoint.path, windows.tobytes(), bit_search._Probe.gradient)
        if key not in measured:
            measured[key] = measure(checkpoint, plan, windows, progress)
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
    even = quantize(model, tmp_path / "even", bits=3, eval_text=texts[1])
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
    monkeypatch.setattr("mlxlm.quantize.bit_search._Probe.gradient", lambda probe, tokens, scales: 0 * scales)
    report = quantize(model, tmp_path / "out", max_size=10**9, calibration_text=texts[0], evaluate=False)
    assert set(report.bits.values()) == {8}


def test_sizes_alone_refuse_a_target_before_anything_is_measured(model, tmp_path, texts, monkeypatch):
    monkeypatch.setattr(bit_search, "estimate_sensitivities", None)
    for target in ({"target_bpw": 1.5}, {"max_size": 1000}):
        with pytest.raises(ConfigError, match="can't be reached"):
            quantize(model, tmp_path / "out", calibration_text=texts[0], evaluate=False, **target)

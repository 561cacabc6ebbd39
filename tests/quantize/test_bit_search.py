"""Costs of bits, and plans of a size or a divergence."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config.quantization import Format
from mlxlm.convert.compare import kl_divergence
from mlxlm.kernels import log_softmax
from mlxlm.quantize import bit_search
from mlxlm.quantize.awq import get_submodule
from mlxlm.quantize.packed_matrix import dequantized, quantize_rtn
from mlxlm.quantize.quantization_plan import uniform
from mlxlm.utils.errors import ConfigError


def test_fit_to_size(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
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
    with pytest.raises(ValueError, match="the smallest plan takes"):
        bit_search.fit_to_size(plan, sensitivities, smallest.nbytes() - 1)


def test_sensitivities_fall_with_bits_and_are_positive(model):
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(8))
    windows = np.arange(64, dtype=np.int32)[None] + 20
    for cost in bit_search.sensitivities(checkpoint, plan, windows).values():
        values = [cost[chosen] for chosen in sorted(cost, key=lambda chosen: chosen.bits)]
        assert values == sorted(values, reverse=True) and values[-1] > 0


def test_estimated_costs_are_those_of_single_matrices(model):
    """Each matrix alone is rounded, and the KL divergence computed; on average over matrices the estimate is right."""
    checkpoint = open_checkpoint(model)
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    windows = np.random.default_rng(0).integers(20, 300, (16, 32)).astype(np.int32)
    estimated = bit_search.sensitivities(checkpoint, plan, windows)
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
    plan = uniform(checkpoint.config, checkpoint.tensors, Format(4))
    sensitivities = {m.name: {Format(bits): 4.0**-bits for bits in (2, 3, 4, 5, 6, 8)} for m in plan.matrices}
    metrics = []

    def evaluate(plan) -> float:
        metrics.append(plan.nbytes())
        return 1.0

    with pytest.raises(ConfigError, match="the most bits give 1"):
        bit_search.fit_to_kl(plan, sensitivities, 1e-9, evaluate)
    assert len(metrics) == len(set(metrics))

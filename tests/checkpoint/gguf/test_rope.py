"""RoPE scaling in GGUF files."""

from __future__ import annotations

import numpy as np
import pytest

from mlxlm.checkpoint.gguf.rope import fit_llama3_scaling, llama3_factors


@pytest.mark.parametrize("context_known", [True, False])
@pytest.mark.parametrize("scaling", [(32.0, 1.0, 4.0, 8192), (8.0, 2.0, 6.0, 8192), (4.0, 1.0, 4.0, 500)])
def test_fit_llama3_scaling(scaling, context_known):
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    rule = {"rope_type": "llama3", **dict(zip(names, scaling, strict=True))}
    factors = llama3_factors(rule, 500_000.0, 64)
    fitted = fit_llama3_scaling(factors, 500_000.0, [scaling[-1]] if context_known else [])
    if not context_known:  # the same rule for the original length of a low_freq_factor of 1
        low = rule["low_freq_factor"]
        rule |= {"low_freq_factor": 1.0, "high_freq_factor": rule["high_freq_factor"] / low}
        rule["original_max_position_embeddings"] /= low
    assert fitted.pop("rope_type") == rule.pop("rope_type")
    assert fitted == pytest.approx(rule, rel=1e-3)
    assert fit_llama3_scaling(factors + np.float32(0.3), 500_000.0, [8192]) is None

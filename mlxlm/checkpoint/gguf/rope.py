"""Scaled rotary positions: Hugging Face's `rope_scaling` and llama.cpp's keys and frequency factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxlm.config.rope_scaling import scaled_wavelengths, unscaled_wavelengths

FACTORS = "rope_freqs.weight"  # Llama 3's scaling, one divisor per frequency
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # Phi-3's "longrope"
TABLES = (FACTORS, LONG, SHORT)


def llama3_factors(scaling: Mapping[str, Any], theta: float, dims: int) -> np.ndarray:
    """The divisor of each of the `dims` / 2 frequencies, float32 (Llama 3.1's rule)."""
    scaled = scaled_wavelengths(theta, dims, scaling)
    return (np.array(scaled) / unscaled_wavelengths(theta, dims)).astype(np.float32)


def llama3_scaling(factors: np.ndarray, theta: float, originals: list[int]) -> dict[str, Any] | None:
    """The rule that gives `factors`, for one of the original context lengths; None if there is none.

    `factors` alone fix the rule only up to the unit of length: where no original length gives them, it is that of
    a low_freq_factor of 1.
    """
    dims, factor = 2 * len(factors), float(factors.max())
    if not (np.isfinite(factors).all() and factor > 1 and factors.min() >= 1):
        return None
    turns = 1 / (2 * math.pi * np.array(unscaled_wavelengths(theta, dims)))  # per position
    low, high = _bounds(factors.astype(np.float64), factor, turns)
    for original in [*originals, *([round(1 / low)] if low > 0 else [])]:
        fitted = (float(f"{low * original:.4g}"), float(f"{high * original:.4g}"))
        for low_factor, high_factor in (fitted, (1.0, 4.0)):
            scaling = {
                "rope_type": "llama3", "factor": factor,
                "low_freq_factor": low_factor, "high_freq_factor": high_factor,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            if 0 < low_factor < high_factor and np.allclose(llama3_factors(scaling, theta, dims), factors, rtol=1e-4):
                return scaling
    return None


def _bounds(factors: np.ndarray, factor: float, turns: np.ndarray) -> tuple[float, float]:
    """Low and high from the factors between 1 and `factor`, where the rule is a line. One of them alone fixes both
    with a high of 4 lows, as Llama has it; (0, 0) for none."""
    between = (factors > 1.001) & (factors < 0.999 * factor)
    if not between.any():
        return 0.0, 0.0
    turns, smooth = turns[between], (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    if len(turns) == 1:
        low = turns[0] / (1 + 3 * smooth[0])
        return low, 4 * low
    slope, start = np.polyfit(turns, smooth, 1)
    return -start / slope, (1 - start) / slope

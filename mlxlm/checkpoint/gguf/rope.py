"""Scaled rotary positions: Hugging Face's `rope_scaling` and llama.cpp's keys and frequency factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

FACTORS = "rope_freqs.weight"  # Llama 3's scaling, one divisor per frequency


def llama3_factors(scaling: Mapping[str, Any], theta: float, dims: int) -> np.ndarray:
    """What each of the `dims` / 2 frequencies is divided by (Llama 3.1's rule: wavelengths up to
    original / high_freq_factor stay, those from original / low_freq_factor on are divided by `factor`)."""
    original = scaling["original_max_position_embeddings"]
    turns = original / _wavelengths(theta, dims)  # of a dimension, over the original context
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def llama3_scaling(factors: np.ndarray, theta: float, originals: list[int]) -> dict[str, Any] | None:
    """The rule that gives `factors`, for one of the original context lengths; None if there is none.

    `factors` alone fix the rule only up to the unit of length, hence `originals`.
    """
    dims, factor = 2 * len(factors), float(factors.max())
    if not (np.isfinite(factors).all() and factor > 1 and factors.min() >= 1):
        return None
    for original in originals:
        bounds = _bounds(factors.astype(np.float64), factor, original / _wavelengths(theta, dims))
        for low, high in (bounds, (1.0, 4.0)):
            scaling = {
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
            if 0 < low < high and np.allclose(llama3_factors(scaling, theta, dims), factors, rtol=1e-4):
                return scaling
    return None


def _bounds(factors: np.ndarray, factor: float, turns: np.ndarray) -> tuple[float, float]:
    """Low and high from the factors between 1 and `factor`, where the rule is a line; (0, 0) for less than two."""
    between = (factors > 1.001) & (factors < 0.999 * factor)
    if between.sum() < 2:
        return 0.0, 0.0
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, start = np.polyfit(turns[between], smooth, 1)
    return float(f"{-start / slope:.4g}"), float(f"{(1 - start) / slope:.4g}")


def _wavelengths(theta: float, dims: int) -> np.ndarray:
    return 2 * math.pi * theta ** (np.arange(0, dims, 2) / dims)

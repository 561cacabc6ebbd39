"""Synthetic runs."""

import math

import numpy as np

from mlxlm.experiments.scaling_fit import ScalingPoint


def scaling_points(law, sizes=(1e5, 1e7), lengths=(1e7, 1e9), count=4, noise=0.0, seed=0):
    """Return runs on a grid of sizes and lengths whose losses follow `law`, with log-normal noise."""
    draw = np.random.default_rng(seed)
    return [
        ScalingPoint(n, d, law.loss(n, d) * math.exp(noise * draw.normal()))
        for n in np.geomspace(*sizes, count)
        for d in np.geomspace(*lengths, count)
    ]

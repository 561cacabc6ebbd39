"""Attention to the latent vectors of multi-head latent attention, with MLX's operations."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.masked_attention import product, weighted_values
from mlxlm.kernels.quantized_kv import QuantizedKV


def latent_attention(
    queries: mx.array, rotated: mx.array, latents: mx.array | QuantizedKV, keys: mx.array | QuantizedKV, mask: mx.array
) -> mx.array:
    """Compute softmax(queries · latentsᵀ + rotated · keysᵀ) · latents.

    The scores are in memory. MLX has no fused kernel for such wide heads.

    Args:
        queries: `[B, H, T, R]`, already multiplied by the scale of attention.
        rotated: `[B, H, T, P]`, rotated queries, also multiplied.
        latents: `[B, 1, S, R]` in the same dtype, or `QuantizedKV`.
        keys: `[B, 1, S, P]`, rotated keys, or `QuantizedKV`.
        mask: Which keys each query sees, at least one, bool `[T, S]` or `[B, 1, T, S]`.

    Returns:
        `[B, H, T, R]`.
    """
    if ON_CPU:  # see `attention`
        latents, keys = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (latents, keys))
    B, H, T, R = queries.shape
    S = keys.shape[2]
    rows = queries.reshape(B, 1, H * T, R)  # one product for all heads
    scores = product(rotated.reshape(B, 1, H * T, -1), keys, transpose=True)
    if isinstance(latents, QuantizedKV):
        scores = scores + product(rows, latents, transpose=True)
    else:
        scores = mx.addmm(scores, rows, latents.swapaxes(-1, -2))
    return weighted_values(scores.reshape(B, H, T, S), mask, latents, (B, 1, H * T), queries.dtype)

"""Attention sinks: one more score for each head, without a value (OpenAI 2025, "gpt-oss-120b & gpt-oss-20b")."""

from __future__ import annotations

from mlxlm.backend.mlx import mx


def add_sinks(out: mx.array, lse: mx.array, sinks: mx.array) -> mx.array:
    """Compute attention with sinks from attention without them.

    The weights of the keys are exp(score) / (sum of exp(scores) + exp(sink)).

    Args:
        out: Attention without sinks, `[B, H, T, D]`.
        lse: Log-sum-exp of each query's scores, float32 `[B, H, T]`.
        sinks: `[H]`.

    Returns:
        `[B, H, T, D]` in the dtype of `out`.
    """
    share = mx.sigmoid(lse - sinks.astype(mx.float32)[:, None])  # of the weights that keys have
    return out * share[..., None].astype(out.dtype)

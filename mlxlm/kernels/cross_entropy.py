"""Cross-entropy over the vocabulary."""

from __future__ import annotations

from mlxlm._mlx import ON_CPU, mx, nn
from mlxlm.kernels.exp import exp_nonpositive


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """-log softmax(logits)[target] per position, in nats, computed in float32.

    logits `[..., V]`, targets int `[...]`; returns `[...]`. The targets take no gradient.
    """
    logits = logits.astype(mx.float32)
    if ON_CPU:
        return _cross_entropy_cpu(logits, targets)[0]
    return nn.losses.cross_entropy(logits, targets)


@mx.custom_function
def _cross_entropy_cpu(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Losses and, for the gradient, the probabilities: one pass of `exp` serves both."""
    top = mx.max(logits, axis=-1, keepdims=True)
    e = exp_nonpositive(logits - top)
    total = mx.sum(e, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)
    losses = (mx.log(total) + top - chosen).squeeze(-1)
    return losses, e / total


@_cross_entropy_cpu.vjp
def _cross_entropy_cpu_vjp(primals, cotangents, outputs):
    _, targets = primals
    scale, probs = cotangents[0][..., None], outputs[1]
    at_target = mx.take_along_axis(probs, targets[..., None], axis=-1)
    # d loss / d logits = probs - onehot(target); only one entry a row differs from probs.
    gradient = mx.put_along_axis(probs * scale, targets[..., None], (at_target - 1.0) * scale, axis=-1)
    return gradient, mx.zeros_like(targets)

"""The distillation loss: cross-entropy, and the KL divergence from a teacher, directly from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mlxlm.backend.mlx import mx
from mlxlm.kernels.cross_entropy import (
    Softmax,
    capped_logits,
    chunk_rows,
    chunked_loss,
    row_weights,
    scaled_by,
    weighted_cross_entropy,
    with_bias,
)

_TINY = 1e-30  # a probability whose logarithm is finite


@dataclass(frozen=True)
class LinearLogits:
    """Logits that are not computed yet: `hidden @ weight.T + bias`, with a soft cap.

    Attributes:
        hidden: `[N, h]`.
        weight: `[V, h]` in the same dtype.
        bias: `[V]`, or None.
        softcap: Soft cap c: logits become c·tanh(logit / c).
    """

    hidden: mx.array
    weight: mx.array
    bias: mx.array | None = None
    softcap: float | None = None


@dataclass(frozen=True)
class Distillation:
    """How a student learns from a teacher (Hinton et al. 2015, arXiv:1503.02531).

    The loss is (1 - kd_ratio) · CE + kd_ratio · T² · KL(p ‖ q), where p and q are the distributions of teacher and
    student at temperature T. T² keeps the size of the gradient.

    Attributes:
        kd_ratio: Weight of the KL divergence; the cross-entropy with the text has the rest.
        temperature: T.
        top_k: Compare the teacher's K most likely tokens, and all others as one: the KL divergence of these K + 1
            probabilities, which is 0 if all are equal. None: compare all tokens.
    """

    kd_ratio: float = 0.5
    temperature: float = 1.0
    top_k: int | None = None


def linear_distillation_loss(
    student: LinearLogits,
    teacher: LinearLogits,
    targets: mx.array,
    weights: mx.array | None,
    distillation: Distillation,
    *,
    chunk: int | None = None,
    training: bool = False,
) -> tuple[mx.array, mx.array, mx.array]:
    """Compute the distillation loss in chunks, without all logits in memory; see `linear_cross_entropy`.

    Only the student's `hidden`, `weight` and `bias` have a gradient.

    Args:
        student: Logits `[N, V]`.
        teacher: Logits `[N, V]`.
        targets: int `[N]`.
        weights: Weight of each position (the loss mask), `[N]`. None: all 1.
        distillation: Weight of the teacher, temperature, top-k.
        chunk: Rows of logits in memory at a time. None chooses for the device.
        training: Whether to compute the gradients along with the loss.

    Returns:
        The loss, the cross-entropy and the KL divergence, in nats, summed over the positions: float32 scalars. The
        last two have no gradient.
    """
    hidden, weight = with_bias(student.hidden, student.weight, student.bias)
    teacher_hidden, teacher_weight = with_bias(teacher.hidden, teacher.weight, teacher.bias)
    rows = chunk or max(1, chunk_rows(weight.shape[0]) // 2)  # for the logits of both
    function = _function(rows, student.softcap, teacher.softcap, distillation, training)
    arrays = hidden, weight, targets, row_weights(targets, weights), teacher_hidden, teacher_weight
    loss, cross_entropy, kl, *_ = function(*arrays)
    return loss, cross_entropy, kl


@cache
def _function(
    rows: int, softcap: float | None, teacher_softcap: float | None, distillation: Distillation, training: bool
) -> Callable[..., tuple[mx.array, ...]]:
    ratio, temperature = distillation.kd_ratio, distillation.temperature

    def chunk(
        hidden: mx.array,
        weight: mx.array,
        targets: mx.array,
        weights: mx.array,
        teacher_hidden: mx.array,
        teacher_weight: mx.array,
    ) -> tuple[list[mx.array], mx.array]:
        logits, slope = capped_logits(hidden, weight, softcap)
        softmax = Softmax.of(logits)
        cross_entropy, gradient = weighted_cross_entropy(softmax, targets, weights)
        if temperature != 1:
            softmax = Softmax.of(logits / temperature)
        teacher_logits, _ = capped_logits(teacher_hidden, teacher_weight, teacher_softcap)
        kl, kl_gradient = _kl_divergence(Softmax.of(teacher_logits / temperature), softmax, distillation.top_k)
        kl_gradient = kl_gradient * weights[:, None]
        kl = kl * weights
        loss = (1 - ratio) * cross_entropy + ratio * temperature**2 * kl
        gradient = (1 - ratio) * gradient + ratio * temperature * kl_gradient
        return [loss, cross_entropy, kl], scaled_by(gradient, slope).astype(hidden.dtype)

    return chunked_loss(chunk, rows, training, shared=1)


def _kl_divergence(teacher: Softmax, student: Softmax, top_k: int | None) -> tuple[mx.array, mx.array]:
    """Return KL(teacher ‖ student) `[N]`, and its gradient by the student's logits."""
    p, q = teacher.e / teacher.total, student.e / student.total
    log_ratio = (teacher.logits - teacher.maximum) - (student.logits - student.maximum)
    log_ratio = log_ratio - (mx.log(teacher.total) - mx.log(student.total))
    if top_k is None or top_k >= p.shape[-1]:
        return (p * log_ratio).sum(axis=-1), q - p
    top = mx.argpartition(-teacher.logits, top_k - 1, axis=-1)[:, :top_k]
    p_top, q_top = (mx.take_along_axis(x, top, axis=-1) for x in (p, q))
    p_rest, q_rest = (  # sums, since 1 minus the others would be inexact
        mx.maximum(mx.put_along_axis(x, top, mx.zeros_like(p_top), axis=-1).sum(axis=-1, keepdims=True), _TINY)
        for x in (p, q)
    )
    kl = (p_top * mx.take_along_axis(log_ratio, top, axis=-1)).sum(axis=-1)
    kl = kl + (p_rest * mx.log(p_rest / q_rest)).squeeze(-1)
    return kl, mx.put_along_axis(q * (1 - p_rest / q_rest), top, q_top - p_top, axis=-1)

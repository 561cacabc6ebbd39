"""Cross-entropy over the vocabulary, of logits or directly from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.exp import exp_nonpositive, row_sums

_CHUNK_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}  # bytes of one chunk's logits in float32
_MIN_ROWS = 64  # with a vocabulary of 32,000: 10% slower than 512 rows, but a fifth of the memory


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Compute -log softmax(logits)[target] per position in float32.

    Args:
        logits: `[..., V]`.
        targets: int `[...]`.

    Returns:
        Losses in nats, float32 `[...]`.
    """
    logits = logits.astype(mx.float32)
    if ON_CPU:
        return _cross_entropy_cpu(logits, targets)[0]
    shifted = _shifted(logits)
    return mx.logsumexp(shifted, axis=-1) - mx.take_along_axis(shifted, targets[..., None], axis=-1).squeeze(-1)


def log_softmax(logits: mx.array) -> mx.array:
    """Return the log-probabilities of logits `[..., V]`, float32 `[..., V]`."""
    shifted = _shifted(logits.astype(mx.float32))
    return shifted - mx.logsumexp(shifted, axis=-1, keepdims=True)


def _shifted(logits: mx.array) -> mx.array:
    """Subtract the maximum, which changes no probability.

    Otherwise log-probabilities are differences of numbers as large as the logits: at 30,000, float32 has steps of
    0.002.
    """
    return logits - mx.stop_gradient(mx.max(logits, axis=-1, keepdims=True))


@mx.custom_function
def _cross_entropy_cpu(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return losses and probabilities. The gradient needs the latter, so `exp` is computed once."""
    maximum = mx.max(logits, axis=-1, keepdims=True)
    e = exp_nonpositive(logits - maximum)
    total = mx.sum(e, axis=-1, keepdims=True)
    target_logits = mx.take_along_axis(logits, targets[..., None], axis=-1)
    losses = (mx.log(total) - (target_logits - maximum)).squeeze(-1)  # this difference is exact if both are large
    return losses, e / total


@_cross_entropy_cpu.vjp
def _cross_entropy_cpu_vjp(
    primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
) -> tuple[mx.array, mx.array]:
    _, targets = primals
    scale, probs = cotangents[0][..., None], outputs[1]
    at_target = mx.take_along_axis(probs, targets[..., None], axis=-1)
    # d loss / d logits = probs - onehot(target): only one entry per row is different from probs.
    gradient = mx.put_along_axis(probs * scale, targets[..., None], (at_target - 1.0) * scale, axis=-1)
    return gradient, mx.zeros_like(targets)


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    *,
    bias: mx.array | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    training: bool = False,
    reduction: str = "sum",
) -> mx.array:
    """Compute the weighted sum of `cross_entropy(hidden @ weightᵀ, targets)` without all logits in memory.

    Matrix products use the inputs' dtype, the softmax and the sums over chunks float32. The gradients of `hidden` and
    `weight` are exact; `weights` has none.

    Args:
        hidden: `[N, h]`.
        weight: The output projection, `[V, h]` in the same dtype.
        targets: int `[N]`, from 0 to V - 1. The range is not checked.
        weights: Weight of each position (the loss mask), `[N]`. None: all 1.
        bias: Bias of the output projection, `[V]`.
        softcap: Soft cap c: logits become c·tanh(logit / c).
        chunk: Rows of logits in memory at a time. None chooses for the device.
        training: Whether to compute the gradients along with the loss (Hsu et al. 2024, "Liger Kernel", section 3.2).
            Otherwise, taking a gradient computes the logits twice.
        reduction: "sum"; or "none" for the loss of each position, without `weights` and `training`.

    Returns:
        The loss in nats, a float32 scalar; without reduction float32 `[N]`.
    """
    weights = mx.ones(targets.shape) if weights is None else weights.astype(mx.float32)
    if bias is not None:  # as one more input, which is 1; it takes a copy of the weight
        hidden = mx.concatenate([hidden, mx.ones((len(hidden), 1), hidden.dtype)], axis=1)
        weight = mx.concatenate([weight, bias[:, None]], axis=1)
    rows = chunk or chunk_rows(weight.shape[0])
    if reduction == "none":
        return _unreduced(rows, softcap)(hidden, weight, targets)
    return _function(rows, softcap, training)(hidden, weight, targets, weights)[0]


def chunk_rows(vocab_size: int, device: str = "cpu" if ON_CPU else "gpu") -> int:
    """Return the default number of rows per chunk, on this device or on "cpu" or "gpu"."""
    return max(_MIN_ROWS, _CHUNK_BYTES[device] // (4 * vocab_size))


@cache
def _function(rows: int, softcap: float | None, training: bool) -> Callable[..., tuple[mx.array, ...]]:
    """Make the function (hidden, weight, targets, weights) -> (loss, and if `training` gradients of the first two)."""

    @mx.custom_function
    def loss(*arrays: mx.array) -> tuple[mx.array, ...]:
        losses, gradients = _chunked(list(arrays), rows, softcap, training)
        return losses[0], *gradients

    @loss.vjp
    def loss_vjp(primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        gradients = outputs[1:] if training else _chunked(primals, rows, softcap, True)[1]
        scaled = [(cotangents[0] * g).astype(x.dtype) for g, x in zip(gradients, primals, strict=False)]
        return scaled + [mx.zeros_like(x) for x in primals[2:]]

    return loss


@cache
def _unreduced(rows: int, softcap: float | None) -> Callable[..., mx.array]:
    """Make the function (hidden, weight, targets) -> losses of the positions."""

    @mx.custom_function
    def losses(hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
        arrays = [hidden, weight, targets, mx.ones(targets.shape)]
        return mx.concatenate(_chunked(arrays, rows, softcap, training=False, reduce=False)[0])

    @losses.vjp
    def losses_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> list[mx.array]:
        gradients = _chunked([*primals, cotangent], rows, softcap, True)[1]  # the cotangents are weights of a sum
        scaled = [g.astype(x.dtype) for g, x in zip(gradients, primals, strict=False)]
        return [*scaled, mx.zeros_like(primals[2])]

    return losses


def _chunked(
    arrays: list[mx.array], rows: int, softcap: float | None, training: bool, reduce: bool = True
) -> tuple[list[mx.array], list[mx.array]]:
    """Return the loss of (hidden, weight, targets, weights) and, if `training`, the gradients of hidden and weight.

    The loss is one scalar, or without `reduce` the weighted losses of each chunk, `[n]`.
    """
    hidden, weight, targets, weights = arrays
    chunks = -(-len(targets) // rows)
    ends = [i * len(targets) // chunks for i in range(1, chunks)]  # chunks of about the same size
    weight_grad = None
    losses: list[mx.array] = []
    hidden_grads: list[mx.array] = []
    for part in zip(*(mx.split(x, ends) for x in (hidden, targets, weights)), strict=True):
        if losses:  # only one chunk's logits at a time: wait for the last chunk
            part = mx.depends(list(part), [losses[-1], *hidden_grads[-1:], *([weight_grad] if training else [])])
        loss, logit_grads = _chunk(part[0], weight, part[1], part[2], softcap)
        losses = [losses[0] + loss.sum()] if reduce and losses else [*losses, loss.sum() if reduce else loss]
        if training:
            hidden_grads.append(eval_point(logit_grads @ weight))
            weight_grad = _add_product(weight_grad, logit_grads.T, part[0])
    return losses, [mx.concatenate(hidden_grads), weight_grad] if training else []


def _add_product(total: mx.array | None, a: mx.array, b: mx.array) -> mx.array:
    """Return total + a @ b in float32, reusing the memory of `total` if a and b are float32."""
    if total is not None and a.dtype == mx.float32:
        return mx.addmm(total, a, b)
    product = (a @ b).astype(mx.float32)
    return product if total is None else total + product


def _chunk(
    hidden: mx.array, weight: mx.array, targets: mx.array, weights: mx.array, softcap: float | None
) -> tuple[mx.array, mx.array]:
    """Return the weighted losses of one chunk, `[n]`, and in the dtype of `hidden` the gradient of the logits.

    The gradient is that of their sum, with respect to the logits before the soft cap.
    """
    logits = (hidden @ weight.T).astype(mx.float32)
    if softcap is not None:
        capped = mx.tanh(logits / softcap)
        logits = softcap * capped
    targets, weights = targets[:, None], weights[:, None]
    maximum = mx.max(logits, axis=-1, keepdims=True)
    e = exp_nonpositive(logits - maximum)
    total = row_sums(e)
    losses = mx.log(total) - (mx.take_along_axis(logits, targets, axis=-1) - maximum)
    # d loss / d logits = probs - onehot(target): only one entry per row is different from probs.
    scale = weights / total
    logit_grads = e * scale
    at_target = mx.take_along_axis(e, targets, axis=-1) * scale - weights
    logit_grads = mx.put_along_axis(logit_grads, targets, at_target, axis=-1)
    if softcap is not None:
        logit_grads = logit_grads * (1 - capped.square())
    return (losses * weights).squeeze(-1), logit_grads.astype(hidden.dtype)

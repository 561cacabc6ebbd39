"""Cross-entropy over the vocabulary, of logits or directly from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

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
    hidden, weight = with_bias(hidden, weight, bias)
    rows = chunk or chunk_rows(weight.shape[0])
    if reduction == "none":
        return _unreduced(rows, softcap)(hidden, weight, targets)
    return _function(rows, softcap, training)(hidden, weight, targets, row_weights(targets, weights))[0]


def with_bias(hidden: mx.array, weight: mx.array, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return factors whose product has the bias: it is one more input, which is 1. It takes a copy of the weight."""
    if bias is None:
        return hidden, weight
    ones = mx.ones((len(hidden), 1), hidden.dtype)
    return mx.concatenate([hidden, ones], axis=1), mx.concatenate([weight, bias[:, None]], axis=1)


def row_weights(targets: mx.array, weights: mx.array | None) -> mx.array:
    """Return the weight of each position, float32 `[N]`: by default 1."""
    return mx.ones(targets.shape) if weights is None else weights.astype(mx.float32)


def chunk_rows(vocab_size: int, device: str = "cpu" if ON_CPU else "gpu") -> int:
    """Return the default number of rows per chunk, on this device or on "cpu" or "gpu"."""
    return max(_MIN_ROWS, _CHUNK_BYTES[device] // (4 * vocab_size))


@cache
def _function(rows: int, softcap: float | None, training: bool) -> Callable[..., tuple[mx.array, ...]]:
    """Make the function (hidden, weight, targets, weights) -> (loss, and if `training` gradients of the first two)."""
    return chunked_loss(partial(_chunk, softcap), rows, training)


def _chunk(
    softcap: float | None, hidden: mx.array, weight: mx.array, targets: mx.array, weights: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Return the weighted losses, and the gradient of their sum; see `chunked_loss`."""
    logits, slope = capped_logits(hidden, weight, softcap)
    losses, logit_grads = weighted_cross_entropy(Softmax.of(logits), targets, weights)
    return [losses], scaled_by(logit_grads, slope).astype(hidden.dtype)


def chunked_loss(
    chunk: Callable[..., tuple[list[mx.array], mx.array]], rows: int, training: bool, shared: int = 0
) -> Callable[..., tuple[mx.array, ...]]:
    """Make a differentiable function that computes a loss of logits `rows` by `rows`.

    Its arguments are hidden `[N, h]`, weight `[V, h]`, arrays `[N, ...]`, and `shared` arrays that each chunk gets as a
    whole. It returns the sums of what `chunk` returns, and if `training` the gradients of `hidden` and `weight`. Only
    the first sum, and only these two arguments, have a gradient.

    Args:
        chunk: Called with the same arguments for n of the rows. Returns arrays `[n]`, of which the first has the
            losses, and the gradient of their sum by `hidden @ weight.T`, in the dtype of `hidden`.
        rows: Rows of logits in memory at a time.
        training: Whether to compute the gradients along with the loss.
        shared: Number of the last arguments that aren't divided into rows.
    """

    def summed(*arrays: mx.array) -> tuple[list[mx.array], mx.array]:
        results, logit_grads = chunk(*arrays)
        return [x.sum() for x in results], logit_grads

    @mx.custom_function
    def loss(*arrays: mx.array) -> tuple[mx.array, ...]:
        results, gradients = _chunked(list(arrays), summed, rows, training, shared)
        return *map(sum, zip(*results, strict=True)), *gradients

    @loss.vjp
    def loss_vjp(primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]) -> list[mx.array]:
        gradients = outputs[-2:] if training else _chunked(primals, summed, rows, True, shared)[1]
        scaled = [(cotangents[0] * g).astype(x.dtype) for g, x in zip(gradients, primals, strict=False)]
        return scaled + [mx.zeros_like(x) for x in primals[2:]]

    return loss


@cache
def _unreduced(rows: int, softcap: float | None) -> Callable[..., mx.array]:
    """Make the function (hidden, weight, targets) -> losses of the positions."""
    chunk = partial(_chunk, softcap)

    @mx.custom_function
    def losses(hidden: mx.array, weight: mx.array, targets: mx.array) -> mx.array:
        arrays = [hidden, weight, targets, mx.ones(targets.shape)]
        return mx.concatenate([losses for [losses] in _chunked(arrays, chunk, rows, training=False)[0]])

    @losses.vjp
    def losses_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> list[mx.array]:
        _, gradients = _chunked([*primals, cotangent], chunk, rows, training=True)  # as weights of a sum
        scaled = [g.astype(x.dtype) for g, x in zip(gradients, primals, strict=False)]
        return [*scaled, mx.zeros_like(primals[2])]

    return losses


def _chunked(
    arrays: list[mx.array],
    chunk: Callable[..., tuple[list[mx.array], mx.array]],
    rows: int,
    training: bool,
    num_shared: int = 0,
) -> tuple[list[list[mx.array]], list[mx.array]]:
    """Return the arrays of each chunk and, if `training`, the gradients of hidden and weight. See `chunked_loss`."""
    (hidden, weight, *others), shared = arrays[: len(arrays) - num_shared], arrays[len(arrays) - num_shared :]
    chunks = -(-len(hidden) // rows)
    ends = [i * len(hidden) // chunks for i in range(1, chunks)]  # chunks of about the same size
    results: list[list[mx.array]] = []
    weight_grad = None
    hidden_grads: list[mx.array] = []
    for part in zip(*(mx.split(x, ends) for x in (hidden, *others)), strict=True):
        if results:  # only one chunk's logits at a time: wait for the last chunk
            part = mx.depends(list(part), [*results[-1], *hidden_grads[-1:], *([weight_grad] if training else [])])
        result, logit_grads = chunk(part[0], weight, *part[1:], *shared)
        results.append(result)
        if training:
            hidden_grads.append(eval_point(logit_grads @ weight))
            weight_grad = _add_product(weight_grad, logit_grads.T, part[0])
    return results, [mx.concatenate(hidden_grads), weight_grad] if training else []


def _add_product(total: mx.array | None, a: mx.array, b: mx.array) -> mx.array:
    """Return total + a @ b in float32, reusing the memory of `total` if a and b are float32."""
    if total is not None and a.dtype == mx.float32:
        return mx.addmm(total, a, b)
    product = (a @ b).astype(mx.float32)
    return product if total is None else total + product


def capped_logits(hidden: mx.array, weight: mx.array, softcap: float | None) -> tuple[mx.array, mx.array | None]:
    """Return `hidden @ weight.T` in float32 with the soft cap, and the derivative of that; None if there is no cap."""
    logits = (hidden @ weight.T).astype(mx.float32)
    if softcap is None:
        return logits, None
    capped = mx.tanh(logits / softcap)
    return softcap * capped, 1 - capped.square()


def scaled_by(gradient: mx.array, slope: mx.array | None) -> mx.array:
    """Return the gradient before a soft cap with this derivative."""
    return gradient if slope is None else gradient * slope


class Softmax(NamedTuple):
    """The parts of a softmax of `logits` `[N, V]`.

    Attributes:
        logits: The logits.
        maximum: Their maximum, `[N, 1]`.
        e: exp(logits - maximum).
        total: The sum of `e`, `[N, 1]`.
    """

    logits: mx.array
    maximum: mx.array
    e: mx.array
    total: mx.array

    @classmethod
    def of(cls, logits: mx.array) -> Softmax:
        """Compute it of float32 logits."""
        maximum = mx.max(logits, axis=-1, keepdims=True)
        e = exp_nonpositive(logits - maximum)
        return cls(logits, maximum, e, row_sums(e))


def weighted_cross_entropy(softmax: Softmax, targets: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    """Return the weighted losses `[N]`, and the gradient of their sum."""
    logits, maximum, e, total = softmax
    targets, weights = targets[:, None], weights[:, None]
    losses = mx.log(total) - (mx.take_along_axis(logits, targets, axis=-1) - maximum)
    # d loss / d logits = probs - onehot(target): only one entry per row is different from probs.
    scale = weights / total
    logit_grads = e * scale
    at_target = mx.take_along_axis(e, targets, axis=-1) * scale - weights
    return (losses * weights).squeeze(-1), mx.put_along_axis(logit_grads, targets, at_target, axis=-1)

"""Cross-entropy over the vocabulary, of logits or straight from hidden states."""

from __future__ import annotations

from functools import cache

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.sums import row_sums

_CHUNK_BYTES = {"cpu": 8 << 20, "gpu": 256 << 20}  # of one chunk's logits in float32
_LEAST_ROWS = 64  # at 32,000 tokens 64 rows cost a tenth more time than 512, and take a fifth of the memory


def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """-log softmax(logits)[target] per position, in nats, computed in float32.

    logits `[..., V]`, targets int `[...]`; returns `[...]`. The targets take no gradient.
    """
    logits = logits.astype(mx.float32)
    if ON_CPU:
        return _cross_entropy_cpu(logits, targets)[0]
    shifted = _shifted(logits)
    return mx.logsumexp(shifted, axis=-1) - mx.take_along_axis(shifted, targets[..., None], axis=-1).squeeze(-1)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities, computed in float32: logits `[..., V]` of any dtype, returns float32 `[..., V]`."""
    shifted = _shifted(logits.astype(mx.float32))
    return shifted - mx.logsumexp(shifted, axis=-1, keepdims=True)


def _shifted(logits: mx.array) -> mx.array:
    """The logits minus their maximum, which changes no probability.

    Without it log-probabilities are a difference of two numbers as large as the logits: at 30,000, float32 has steps
    of 0.002.
    """
    return logits - mx.stop_gradient(mx.max(logits, axis=-1, keepdims=True))


@mx.custom_function
def _cross_entropy_cpu(logits: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Losses and, for the gradient, the probabilities: one pass of `exp` serves both."""
    top = mx.max(logits, axis=-1, keepdims=True)
    e = exp_nonpositive(logits - top)
    total = mx.sum(e, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, targets[..., None], axis=-1)
    losses = (mx.log(total) - (chosen - top)).squeeze(-1)  # the difference is exact where both are large
    return losses, e / total


@_cross_entropy_cpu.vjp
def _cross_entropy_cpu_vjp(primals, cotangents, outputs):
    _, targets = primals
    scale, probs = cotangents[0][..., None], outputs[1]
    at_target = mx.take_along_axis(probs, targets[..., None], axis=-1)
    # d loss / d logits = probs - onehot(target); only one entry a row differs from probs.
    gradient = mx.put_along_axis(probs * scale, targets[..., None], (at_target - 1.0) * scale, axis=-1)
    return gradient, mx.zeros_like(targets)


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    *,
    softcap: float | None = None,
    chunk: int | None = None,
    training: bool = False,
) -> mx.array:
    """The sum of `cross_entropy(hidden @ weightᵀ, targets)`, each times its weight, without the logits in memory.

    hidden `[N, h]` and weight `[V, h]` of one dtype, targets int `[N]`, weights `[N]` (None: all 1); returns a
    float32 scalar, in nats. `chunk` rows of logits exist at a time, each chunk waiting for the one before it; None
    takes as many as are worth it here. `softcap` c: logits become c·tanh(logit / c). Targets are from 0 to V - 1;
    others are not looked for, and give a number without meaning. Raises ValueError for a `chunk` below 1.

    Gradients by hidden and weight are exact; the weights take none. `training`: they will be taken, and are made
    beside the loss (Hsu et al. 2024, "Liger Kernel", 3.2); without it nothing of them is computed before they are
    asked for, which then makes the logits twice. Products run in the inputs' dtype, the softmax and the sums over
    chunks in float32.
    """
    weights = mx.ones(targets.shape) if weights is None else weights.astype(mx.float32)
    if chunk is not None and chunk < 1:
        raise ValueError(f"a chunk of {chunk} rows: at least 1, or None")
    rows = chunk or chunk_rows(weight.shape[0])
    function = _with_gradients if training else _without_gradients
    out = function(rows, softcap)(hidden, weight, targets, weights)
    return out[0] if training else out


def chunk_rows(vocab_size: int, device: str = "cpu" if ON_CPU else "gpu") -> int:
    """Rows of a chunk where nobody says how many, here or on the other kind of device."""
    return max(_LEAST_ROWS, _CHUNK_BYTES[device] // (4 * vocab_size))


@cache
def _with_gradients(rows: int, softcap: float | None):
    """(hidden, weight, targets, weights) -> (loss, its gradients by hidden and weight)"""

    @mx.custom_function
    def function(*arrays):
        return _chunked(*arrays, rows, softcap)

    @function.vjp
    def function_vjp(primals, cotangents, outputs):
        return _scaled(cotangents[0], *outputs[1:], *primals)

    return function


@cache
def _without_gradients(rows: int, softcap: float | None):
    """(hidden, weight, targets, weights) -> loss"""

    @mx.custom_function
    def function(*arrays):
        return _chunked(*arrays, rows, softcap, gradients=False)[0]

    @function.vjp
    def function_vjp(primals, cotangent, _output):
        return _scaled(cotangent, *_chunked(*primals, rows, softcap)[1:], *primals)

    return function


def _scaled(cotangent, by_hidden, by_weight, hidden, weight, targets, weights):
    scaled = ((cotangent * g).astype(x.dtype) for g, x in ((by_hidden, hidden), (by_weight, weight)))
    return (*scaled, mx.zeros_like(targets), mx.zeros_like(weights))


def _chunked(hidden, weight, targets, weights, rows, softcap, gradients=True):
    """The loss and, with `gradients`, those by hidden and by weight in float32, else None twice."""
    chunks = -(-len(targets) // rows)
    ends = [i * len(targets) // chunks for i in range(1, chunks)]  # all of about one size
    total, by_hidden, by_weight = None, [], None
    for part in zip(*(mx.split(x, ends) for x in (hidden, targets, weights)), strict=True):
        if total is not None:  # one chunk's logits at a time: this one waits for the last
            part = mx.depends(list(part), [total, *by_hidden[-1:], *([by_weight] if gradients else [])])
        chunk, targets, weights = part
        loss, slopes = _chunk(chunk, weight, targets, weights, softcap)
        total = loss if total is None else total + loss
        if gradients:
            by_hidden.append(eval_point(slopes @ weight))
            by_weight = _with_product(by_weight, slopes.T, chunk)
    return total, mx.concatenate(by_hidden) if gradients else None, by_weight


def _with_product(total: mx.array | None, a: mx.array, b: mx.array) -> mx.array:
    """total + a @ b in float32, into the memory of `total` where the product is in float32 too."""
    if total is not None and a.dtype == mx.float32:
        return mx.addmm(total, a, b)
    product = (a @ b).astype(mx.float32)
    return product if total is None else total + product


def _chunk(hidden, weight, targets, weights, softcap):
    """The loss of one chunk, and its gradient by the logits before the soft cap, in the dtype of `hidden`."""
    logits = (hidden @ weight.T).astype(mx.float32)
    if softcap is not None:
        capped = mx.tanh(logits / softcap)
        logits = softcap * capped
    targets, weights = targets[:, None], weights[:, None]
    top = mx.max(logits, axis=-1, keepdims=True)
    e = _exp(logits - top)
    total = row_sums(e) if ON_CPU else mx.sum(e, axis=-1, keepdims=True)
    losses = mx.log(total) - (mx.take_along_axis(logits, targets, axis=-1) - top)
    # d loss / d logits = probs - onehot(target); only one entry a row differs from probs.
    scale = weights / total
    slopes = e * scale
    at_target = mx.take_along_axis(e, targets, axis=-1) * scale - weights
    slopes = mx.put_along_axis(slopes, targets, at_target, axis=-1)
    if softcap is not None:
        slopes = slopes * (1 - capped.square())
    return (losses * weights).sum(), slopes.astype(hidden.dtype)


def _exp(x: mx.array) -> mx.array:
    return exp_nonpositive(x) if ON_CPU else mx.exp(x)

"""What the kernels must compute, in float64 numpy, by the textbook."""

import numpy as np

from mlxlm.backend.mlx import mx


def as64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), dtype=np.float64)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rms_norm_grad(x, weight, eps, g):
    """Gradients of sum(g * rms_norm(x)) by x and weight."""
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    normed = x * inverse
    gw = g * weight
    dx = inverse * (gw - normed * (gw * normed).mean(-1, keepdims=True))
    return dx, (g * normed).reshape(-1, x.shape[-1]).sum(0)


def rms_norm_grad_size(x, weight, eps, g):
    """The sums of the absolute terms of both: what rounding is in proportion to."""
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    normed, gw = np.abs(x * inverse), np.abs(g * weight)
    dx = inverse * (gw + normed * (gw * normed).mean(-1, keepdims=True))
    return dx, (np.abs(g) * normed).reshape(-1, x.shape[-1]).sum(0)


def _visible(T, S, window, segment_ids=None):
    p, s = np.arange(S - T, S)[:, None], np.arange(S)[None]
    visible = (s <= p) & ((s > p - window) if window is not None else True)
    if segment_ids is None:
        return visible
    return visible & (segment_ids[:, None, -T:, None] == segment_ids[:, None, None, :])


def _probabilities(q, k, scale, window, softcap=None, slopes=None, segment_ids=None, sinks=None):
    """Probabilities and log-sum-exp of grouped heads; a row that sees nothing has 0 and -inf."""
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    scores = scale * q @ np.repeat(k, H // k.shape[1], axis=1).swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if slopes is not None:
        distance = np.arange(S)[None] - np.arange(S - T, S)[:, None]
        scores = scores + np.asarray(slopes, np.float64)[:, None, None] * distance
    scores = np.where(_visible(T, S, window, segment_ids), scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    e = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    if sinks is not None:  # a score that has no key
        total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - top)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + np.where(np.isfinite(top), top, 0)
    return e / np.where(total > 0, total, 1), lse[..., 0]


def attention(q, k, v, scale, window=None, softcap=None, slopes=None, segment_ids=None, sinks=None):
    """(output, log-sum-exp): `[B, H, T, D]` and `[B, H, T]`."""
    probs, lse = _probabilities(q, k, scale, window, softcap, slopes, segment_ids, sinks)
    return probs @ np.repeat(v, q.shape[1] // v.shape[1], axis=1), lse


def attention_grad(q, k, v, scale, do, window=None, segment_ids=None):
    """Gradients of sum(do * output) by q, k and v."""
    B, kv_heads, S, D = k.shape
    groups = q.shape[1] // kv_heads
    keys, values = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
    probs, _ = _probabilities(q, k, scale, window, segment_ids=segment_ids)
    dp = do @ values.swapaxes(-1, -2)
    ds = probs * (dp - (dp * probs).sum(-1, keepdims=True))
    dk, dv = scale * ds.swapaxes(-1, -2) @ q, probs.swapaxes(-1, -2) @ do

    def per_key_head(x):
        return x.reshape(B, kv_heads, groups, S, -1).sum(2)

    return scale * ds @ keys, per_key_head(dk), per_key_head(dv)


def rope(x, theta):
    """Rotate the first dimensions of x `[..., D]` by theta `[..., dims / 2]`, in pairs of one of each half."""
    half = theta.shape[-1]
    first, second, others = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cosines, sines = np.cos(theta), np.sin(theta)
    return np.concatenate([first * cosines - second * sines, first * sines + second * cosines, others], axis=-1)

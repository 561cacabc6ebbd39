"""The kernels of `metal_kernels/` as lazy MLX operations: the same inputs, template arguments and outputs.

Each function takes the inputs by name, the template arguments by name and the shape and dtype of each output. Sums are
float32, as in the kernels.
"""

from __future__ import annotations

import math
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.kernels.quantile import quantile_by_sorting, target_weight

Arrays = dict[str, mx.array]
LOG2_E = math.log2(math.e)
LOWEST = -3.4e38  # the kernels' maximum score of no keys


def rms_norm(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The norm of each row."""
    x, weight = _float32(inputs["x"]), _float32(inputs["weight"])
    return [(x * _inverse_rms(x, inputs["eps"]) * weight).astype(template["T"])]


def add_rms_norm(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The sum, and its norm after rounding."""
    h = (_float32(inputs["x"]) + _float32(inputs["residual"])).astype(template["H"])
    return [h, *rms_norm({**inputs, "x": h}, template, outputs)]


def rms_norm_grad(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """dx, and dw of all rows as the part of the first team."""
    x, weight, dy = (_float32(inputs[name]) for name in ("x", "weight", "dy"))
    inverse = _inverse_rms(x, inputs["eps"])
    dx = inverse * (dy * weight - x * inverse.square() * mx.mean(dy * weight * x, axis=-1, keepdims=True))
    if template["STREAM"]:
        dx = dx + _float32(inputs["dh"])
    teams = outputs[1][0][0]
    dw = mx.sum(dy * x * inverse, axis=0, keepdims=True)
    return [dx.astype(template["T"]), mx.pad(dw, [(0, teams - 1), (0, 0)])]


def qk_norm_rope(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The heads of queries and keys, normalized and rotated."""
    x, H, half = _float32(inputs["x"]), template["H"], template["HALF"]
    parts = []
    for part, weight in ((x[:, :H], "query_weight"), (x[:, H : H + template["K"]], "key_weight")):
        if template["NORM"]:
            part = part * _inverse_rms(part, inputs["eps"]) * _float32(inputs[weight])
        if half:
            waves = {"base": None, "freqs": inputs["wavelengths"]}
            if not template["WAVELENGTHS"]:
                waves = {"base": 2.0 ** inputs["base"].item(), "freqs": None}
            part = mx.fast.rope(part, 2 * half, traditional=False, scale=1.0, offset=inputs["positions"], **waves)
        parts.append(part.astype(template["T"]))
    return parts if template["K"] else [parts[0], mx.zeros(outputs[1][0], template["T"])]


def attention_decode(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The attention of the last queries; with SPLIT, as the result of the first part of the keys."""
    keys, values = _float32(inputs["keys"]), _float32(inputs["values"])
    queries = _float32(inputs["queries"])
    B, H, T, D = queries.shape
    S = keys.shape[2]
    key_positions = mx.arange(S)
    if template["RANGE"]:
        first, end = (inputs["range"][:, i].reshape(-1, 1, 1, 1) for i in (0, 1))
    else:
        first, end = mx.array(0), mx.array(S)
    positions = end - T + mx.arange(T)[:, None]
    visible = (key_positions >= first) & (key_positions <= positions)
    if template["WINDOW"]:
        visible = visible & (key_positions > positions - inputs["window"])
    seen = visible.any(axis=-2).reshape(-1, 1, S, 1)  # what no query sees isn't read: it may be NaN
    keys, values = mx.where(seen, keys, 0.0), mx.where(seen, values, 0.0)
    scores = inputs["scale"] * (queries @ _repeat(keys, H).swapaxes(-1, -2))
    if template["SOFTCAP"]:
        scores = inputs["cap"] * mx.tanh(scores / inputs["cap"])
    if template["SLOPES"]:
        scores = scores + inputs["slopes"].reshape(-1, 1, 1) * (key_positions - positions)
    weights, top, total = _exponentials(LOG2_E * scores, visible)
    if template["SINKS"]:
        sink = LOG2_E * inputs["sinks"].reshape(-1, 1, 1)
        highest = mx.maximum(top, sink)
        faded, top = mx.exp((top - highest) / LOG2_E), highest
        weights, total = weights * faded, total * faded + mx.exp((sink - top) / LOG2_E)
    sums = weights @ _repeat(values, H)
    if not template["SPLIT"]:
        return [mx.where(total == 0, 0.0, sums / mx.maximum(total, 1e-30)).astype(template["T"])]
    rows, splits, _ = outputs[0][0]
    part = mx.concatenate([sums, top, total], axis=-1).reshape(rows, 1, D + 2)
    empty = mx.concatenate([mx.zeros((rows, splits - 1, D)), mx.full((rows, splits - 1, 1), LOWEST)], axis=-1)
    empty = mx.pad(empty, [(0, 0), (0, 0), (0, 1)])
    return [mx.concatenate([part, empty], axis=1)]


def attention_decode_quantized(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """`attention_decode` of the dequantized keys and values."""
    B = inputs["queries"].shape[0]
    for side in ("key", "value"):
        codes, scales, biases = (inputs[name][:B] for name in (f"{side}s", f"{side}_scales", f"{side}_biases"))
        dense = mx.dequantize(codes, _float32(scales), _float32(biases), template["GROUP"], template["BITS"])
        inputs = {**inputs, f"{side}s": dense}
    return attention_decode(inputs, template, outputs)


def attention_decode_combine(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The merged parts."""
    parts, D = inputs["parts"], template["D"]
    top = parts[..., D : D + 1]
    weights = mx.exp((top - mx.max(top, axis=1, keepdims=True)) / LOG2_E)
    total = mx.sum(weights * parts[..., D + 1 :], axis=1)
    sums = mx.sum(weights * parts[..., :D], axis=1)
    out = mx.where(total == 0, 0.0, sums / mx.maximum(total, 1e-30))
    return [out.reshape(outputs[0][0]).astype(template["T"])]


def attention_forward(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The output, and the log-sum-exp of each row."""
    weights, top, total = _exponentials(*_training_scores(inputs))
    values = _repeat(_float32(inputs["values"]), inputs["queries"].shape[1])
    output = mx.where(total == 0, 0.0, (weights @ values) / mx.maximum(total, 1e-30))
    lse = mx.where(total == 0, -mx.inf, (top + mx.log2(total)) / LOG2_E)
    return [output.astype(template["T"]), lse.squeeze(-1)]


def attention_grad_query(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The gradient of the queries, and sum(output_grad * output) - lse_grad of each row."""
    output, output_grad = _float32(inputs["output"]), _float32(inputs["output_grad"])
    delta = mx.sum(output * output_grad, axis=-1) - inputs["lse_grad"]
    score_grad, _ = _score_gradients(inputs, delta)
    keys = _repeat(_float32(inputs["keys"]), output.shape[1])
    return [(inputs["scale"] * (score_grad @ keys)).astype(template["T"]), delta]


def attention_grad_key_value(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The gradients of the keys and the values, as those of the first split."""
    score_grad, probabilities = _score_gradients(inputs, inputs["delta"])
    K = inputs["keys"].shape[1]
    pairs = ((inputs["scale"] * score_grad, inputs["queries"]), (probabilities, inputs["output_grad"]))
    gradients = [mx.unflatten(left.swapaxes(-1, -2) @ _float32(right), 1, (K, -1)).sum(axis=2) for left, right in pairs]
    others = [(0, template["SPLITS"] - 1)] + 4 * [(0, 0)]
    return [mx.pad(gradient[None], others).astype(template["U"]) for gradient in gradients]


def weighted_quantile(inputs: Arrays, template: dict[str, Any], outputs: list[Any]) -> list[mx.array]:
    """The quantiles, by sorting."""
    values, amount = mx.abs(inputs["values"]), inputs["amount"]
    if template["COUNT"]:
        index = mx.broadcast_to(amount.astype(mx.int32) - 1, (len(values), 1))
        return [mx.take_along_axis(mx.sort(values, axis=-1), index, axis=-1)]
    return [quantile_by_sorting(values, inputs["weights"], target_weight(inputs["weights"], amount))]


def _float32(x: mx.array) -> mx.array:
    return x.astype(mx.float32)


def _inverse_rms(x: mx.array, eps: mx.array) -> mx.array:
    return mx.rsqrt(mx.mean(x.square(), axis=-1, keepdims=True) + eps)


def _repeat(x: mx.array, heads: int) -> mx.array:
    """Repeat `[B, H_kv, S, D]` for each of the query heads."""
    return mx.repeat(x, heads // x.shape[1], axis=1)


def _exponentials(scores: mx.array, visible: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return exp2(score - maximum), the maximum and the sum of each row; LOWEST and 0 if it sees no key."""
    top = mx.max(mx.where(visible, scores, LOWEST), axis=-1, keepdims=True)
    weights = mx.where(visible, mx.exp((scores - top) / LOG2_E), 0.0)
    return weights, top, mx.sum(weights, axis=-1, keepdims=True)


def _training_scores(inputs: Arrays) -> tuple[mx.array, mx.array]:
    """Return the scores in units of log 2, and which of them are visible."""
    queries, keys = _float32(inputs["queries"]), _float32(inputs["keys"])
    T, S = queries.shape[2], keys.shape[2]
    ranges = inputs["ranges"][:, None]
    if "delta" in inputs:  # attention_grad_key_value: the queries that see each key
        begin, end, seen = ranges[:, :, None, :, 0], ranges[:, :, None, :, 1], mx.arange(T)[:, None]
    else:  # the keys that each query sees
        begin, end, seen = ranges[..., :1], ranges[..., 1:], mx.arange(S)
    visible = (seen >= begin) & (seen < end)
    scores = inputs["scale"] * LOG2_E * (queries @ _repeat(keys, queries.shape[1]).swapaxes(-1, -2))
    return scores, visible


def _score_gradients(inputs: Arrays, delta: mx.array) -> tuple[mx.array, mx.array]:
    """Return the gradients of the scaled scores, and the probabilities."""
    scores, visible = _training_scores(inputs)
    probabilities = mx.where(visible, mx.exp(scores / LOG2_E - inputs["lse"][..., None]), 0.0)
    values = _repeat(_float32(inputs["values"]), scores.shape[1])
    slopes = _float32(inputs["output_grad"]) @ values.swapaxes(-1, -2)
    return probabilities * (slopes - delta[..., None]), probabilities


REFERENCES = {
    function.__name__: function
    for function in (
        rms_norm,
        add_rms_norm,
        rms_norm_grad,
        qk_norm_rope,
        attention_decode,
        attention_decode_quantized,
        attention_decode_combine,
        attention_forward,
        attention_grad_query,
        attention_grad_key_value,
        weighted_quantile,
    )
}

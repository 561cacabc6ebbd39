"""How often rounding changes a token: half precision is simulated in float32, with sums in two orders.

A GPU sums products in another order for several rows than for one, and rounds after each operation. Here every product
is rounded as well, and the second order adds four parts. With --bits, weights are quantized, and the second order also
rounds the dequantized ones, as MLX on Metal does from 6 to 33 rows on, by chip and matrix, and not for fewer. Texts are
the model's own, at temperature 0.7.

python benchmarks/rounding.py MODEL [--dtypes bfloat16 float16 float32] [--bits 4] [--texts 7] [--tokens 250]

For models with Llama's architecture. "batch": all tokens are computed in the second order. "decided alone": the last
token is computed in the first order, after keys and values of the second, as in a batch whose uncertain tokens are
decided by a pass over one row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import report

import mlxlm
from mlxlm.backend.mlx import mx

MARGINS = (0.05, 0.1, 0.2, 0.5)
PARTS = 4
PROMPTS = [
    "Once upon a time",
    "The reason why",
    "In 1969",
    "The capital of France",
    "My name is",
    "She said",
    "The dog",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--bits", type=int, choices=[4, 8])
    parser.add_argument("--texts", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=250)
    options = parser.parse_args()
    lm = mlxlm.load(options.model)
    encoded = [lm.tokenizer.encode(PROMPTS[i % len(PROMPTS)]) for i in range(options.texts)]
    results = mlxlm.batch(lm, encoded, seed=1, temperature=0.7, max_tokens=options.tokens)
    texts = [[*prompt, *result.tokens] for prompt, result in zip(encoded, results, strict=True)]
    rows, values = [], {}
    for dtype in options.dtypes:
        for temperature in (0.0, 0.7):
            found = measure(lm, texts, getattr(mx, dtype), options.bits, temperature)
            values[f"{dtype}, temperature {temperature}"] = found
            shown = "; ".join(f"{name} {value:.3g}" for name, value in found.items())
            rows.append((f"{dtype}, temperature {temperature}", shown))
    title = (
        f"{options.model}, {sum(map(len, texts))} tokens; shares in %, changes of the lead over the runner-up in logits"
    )
    report(title, rows, {"benchmark": "rounding", "results": values})


def measure(
    lm: Any, texts: Sequence[list[int]], dtype: mx.Dtype, bits: int | None, temperature: float
) -> dict[str, float]:
    rng, leads, changes, flips = np.random.default_rng(0), [], [], {"batch": [], "decided alone": []}
    for ids in texts:
        alone, _ = forward(lm, ids, dtype, bits, 1)
        batch, keys_and_values = forward(lm, ids, dtype, bits, PARTS)
        decided, _ = forward(lm, ids, dtype, bits, 1, keys_and_values)
        noise = temperature * mx.array(rng.gumbel(size=alone.shape).astype(np.float32))
        alone, batch, decided = (logits + noise for logits in (alone, batch, decided))
        token = mx.argmax(alone, axis=-1, keepdims=True)
        runner_up = mx.argmax(mx.put_along_axis(alone, token, mx.array(-mx.inf), axis=-1), axis=-1, keepdims=True)
        lead, other = (
            mx.take_along_axis(scores, token, axis=-1) - mx.take_along_axis(scores, runner_up, axis=-1)
            for scores in (alone, batch)
        )
        leads += lead.flatten().tolist()
        changes += mx.abs(lead - other).flatten().tolist()
        for name, scores in (("batch", batch), ("decided alone", decided)):
            flips[name] += (mx.argmax(scores, axis=-1, keepdims=True) != token).flatten().tolist()
    found = {f"{name}: other tokens": 100 * float(np.mean(flipped)) for name, flipped in flips.items()}
    found |= {"change p99": float(np.quantile(changes, 0.99)), "largest": max(changes)}
    return found | {f"within {margin}": 100 * float(np.mean(np.array(leads) < margin)) for margin in MARGINS}


def forward(
    lm: Any, ids: list[int], dtype: mx.Dtype, bits: int | None, parts: int, cached: Any = None
) -> tuple[mx.array, list[Any]]:
    """The logits `[T, V]`, and the keys and values of each layer. Queries see `cached` ones at earlier positions."""
    config, model, T = lm.config, lm.model.model, len(ids)
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    own, past = mx.eye(T).astype(mx.bool_), mx.tri(T, k=-1).astype(mx.bool_)

    def rounded(x: mx.array) -> mx.array:
        return x.astype(dtype).astype(mx.float32)

    def product(x: mx.array, weight: mx.array) -> mx.array:
        if bits is not None:
            packed, scales, biases = mx.quantize(weight, bits=bits)
            weight = mx.dequantize(packed, rounded(scales), rounded(biases), bits=bits)
        weight = (weight if bits is not None and parts == 1 else rounded(weight)).T
        pairs = zip(mx.split(x, parts, axis=-1), mx.split(weight, parts), strict=True)
        return rounded(sum(x @ weight for x, weight in pairs))

    def norm(x: mx.array, weight: mx.array) -> mx.array:
        return rounded(mx.fast.rms_norm(x, rounded(weight), config.rms_norm_eps))

    def heads(x: mx.array, count: int, rotate: bool) -> mx.array:
        x = x.reshape(1, T, count, D).swapaxes(1, 2)
        if rotate:
            x = rounded(mx.fast.rope(x, D, traditional=False, base=config.rope_theta, scale=1.0, offset=0))
        return x[0]

    x, kept = rounded(model.embed_tokens.weight)[mx.array(ids)], []
    for index, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = norm(x, layer.input_layernorm.weight)
        q = heads(product(h, attention.q_proj.weight), H, True).reshape(K, H // K, T, D)
        k = heads(product(h, attention.k_proj.weight), K, True)
        v = heads(product(h, attention.v_proj.weight), K, False)
        old_k, old_v = (k, v) if cached is None else cached[index]
        scores = mx.where(own, (q * k[:, None]).sum(-1, keepdims=True), q @ old_k[:, None].swapaxes(-1, -2))
        weights = mx.softmax(mx.where(own | past, scores * D**-0.5, -mx.inf), axis=-1)
        out = rounded(
            mx.where(past, weights, 0) @ old_v[:, None] + mx.where(own, weights, 0).sum(-1, keepdims=True) * v[:, None]
        )
        out = out.reshape(H, T, D).swapaxes(0, 1).reshape(T, H * D)
        x = rounded(x + product(out, attention.o_proj.weight))
        h = norm(x, layer.post_attention_layernorm.weight)
        gate = product(h, mlp.gate_proj.weight)
        gate = rounded(rounded(gate * mx.sigmoid(gate)) * product(h, mlp.up_proj.weight))
        x = rounded(x + product(gate, mlp.down_proj.weight))
        kept.append((k, v))
        mx.eval(x, k, v)
    return product(norm(x, model.norm.weight), lm.model.head_weight), kept


if __name__ == "__main__":
    main()

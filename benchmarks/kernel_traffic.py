"""Errors and device-memory traffic of every Metal kernel, by running its source on the CPU. Not a timing.

    python benchmarks/kernel_traffic.py [--only NAME]

"moved over minimum" is the bytes that threads load from and store to device memory, divided by the minimum: each input
read once, each output written once. "error" is the largest error against float64, relative to the largest value.
Kernels with matrix products also have the number of 8x8 products, the loads from threadgroup memory of a thread for
each of them, and the barriers of a threadgroup. The counts have no noise. Needs clang 19, as the tests of the kernels
do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from common import report

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlxlm.backend.mlx import mx  # noqa: E402
from mlxlm.kernels.decode_attention import decode_attention  # noqa: E402
from mlxlm.kernels.flash_attention import tiled_attention  # noqa: E402
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE, RoPE  # noqa: E402
from mlxlm.kernels.rms_norm import add_rms_norm_metal, rms_norm_metal  # noqa: E402
from tests import oracle  # noqa: E402
from tests.metal import harness  # noqa: E402

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
EPS = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args()
    if reason := harness.available():
        raise SystemExit(f"error: {reason}")
    rows, results = [], {}
    for name, case in cases().items():
        if options.only not in name:
            continue
        results[name] = {}
        for dtype in DTYPES:
            key = str(dtype).removeprefix("mlx.core.")
            results[name][key] = values = counts(*case(dtype))
            words = (
                f"{what.replace('_', ' ')} {x:{',' if what == 'products' else '.3g'}}" for what, x in values.items()
            )
            rows.append((f"{name} {key}", ", ".join(words)))
            print(*rows[-1], file=sys.stderr)
    title = "kernels: errors, bytes moved, matrix products"
    report(title, rows, {"benchmark": "kernel_traffic", "cases": results})


def counts(error: float, launches: list[harness.Launch], minimum: int) -> dict[str, float]:
    moved = sum(x.read + x.written for x in launches)
    values = {"error": error, "moved_over_minimum": moved / minimum}
    if products := sum(x.products for x in launches):
        loads, barriers = sum(x.threadgroup_loads for x in launches), sum(x.barriers for x in launches)
        values["products"] = products
        values["loads_per_product"] = loads / products / 32
        values["barriers_per_threadgroup"] = barriers / sum(x.groups for x in launches)
    return values


def random(shape, dtype, seed):
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32)).astype(dtype)


def error(results: list[mx.array], wanted: list[np.ndarray]) -> float:
    return max(float(np.abs(oracle.as64(f) - w).max() / np.abs(w).max()) for f, w in zip(results, wanted, strict=True))


def nbytes(*arrays: mx.array) -> int:
    return sum(x.nbytes for x in arrays)


def run(function: Callable[[], list[mx.array]], kernels: str) -> tuple[list[mx.array], list[harness.Launch]]:
    """The outputs, and the launches of the kernels whose name starts with `kernels`."""
    with harness.use(seed=0) as log:
        out = function()
        mx.eval(out)
    return out, [launch for launch in log.launches if launch.kernel.startswith(f"mlxlm_{kernels}")]


def cases() -> dict[str, Callable]:
    """Functions of a dtype that return the error, the launches, and the minimum of bytes."""
    named = {}
    for rows, N in ((2048, 256), (2048, 1024), (512, 4096), (512, 8192)):
        size = f"{rows} x {N}"
        named[f"rms_norm {size}"] = partial(norm, rows, N)
        named[f"rms_norm_grad {size}"] = partial(norm_grad, rows, N)
        named[f"add_rms_norm {size}"] = partial(add_norm, rows, N, False)
        named[f"add_rms_norm {size}, over the two operations apart"] = partial(add_norm, rows, N, True)
    named["qk_norm_rope D=128 H=32 K=8"] = normed_heads
    for D, S, G, T in ((64, 4096, 1, 1), (64, 4096, 4, 1), (80, 2048, 4, 1), (128, 2048, 8, 1), (128, 1024, 8, 8)):
        named[f"attention_decode D={D} S={S} G={G} T={T}"] = partial(decode, D, S, G, T)
    for bits, group in ((8, 64), (8, 32), (4, 64), (4, 32)):
        named[f"attention_decode_quantized {bits} bits / {group} D=128 S=2048 G=4"] = partial(quantized, bits, group)
    for T, D in ((256, 64), (512, 64), (256, 128), (512, 128)):
        for kernel in ("attention_forward", "attention_grad_query", "attention_grad_key_value"):
            named[f"{kernel} T={T} D={D}"] = partial(tiled, kernel, T, D)
    return named


def norm(rows, N, dtype):
    x, w = random((rows, N), dtype, 0), random((N,), dtype, 1)
    (y,), launches = run(lambda: [rms_norm_metal(x, w, EPS)], "rms_norm")
    return error([y], [oracle.rms_norm(oracle.as64(x), oracle.as64(w), EPS)]), launches, nbytes(x, w, y)


def norm_grad(rows, N, dtype):
    x, w, g = random((rows, N), dtype, 0), random((N,), dtype, 1), random((rows, N), dtype, 2)
    (dx, dw), launches = run(lambda: mx.vjp(lambda x, w: rms_norm_metal(x, w, EPS), [x, w], [g])[1], "rms_norm_grad")
    wanted = oracle.rms_norm_grad(oracle.as64(x), oracle.as64(w), EPS, oracle.as64(g))
    return error([dx, dw], wanted), launches, nbytes(x, w, g, dx, dw)


def add_norm(rows, N, apart, dtype):
    x, r, w = random((rows, N), dtype, 0), random((rows, N), dtype, 1), random((N,), dtype, 2)
    (h, y), launches = run(lambda: list(add_rms_norm_metal(x, r, w, EPS)), "add_rms_norm")
    wanted = [oracle.as64(x + r), oracle.rms_norm(oracle.as64(x + r), oracle.as64(w), EPS)]
    least = nbytes(x, r, w, h, y)
    return error([h, y], wanted), launches, least + h.nbytes if apart else least


def normed_heads(dtype):
    D, H, K = 128, 32, 8
    x, q, k = random((1, H + 2 * K, 1, D), dtype, 0), random((D,), dtype, 1), random((D,), dtype, 2)
    arguments = x, H, K, (q, k), EPS, RoPE(D, 10_000.0, None), mx.array([7], mx.int32)
    (queries, keys), launches = run(lambda: list(QK_NORM_ROPE.paths["metal"](*arguments)), "qk_norm_rope")
    theta = 7 * 10_000.0 ** (-np.arange(0, D, 2) / D)
    parts = (x[:, :H], q), (x[:, H : H + K], k)
    wanted = [oracle.rope(oracle.rms_norm(oracle.as64(x), oracle.as64(w), EPS), theta) for x, w in parts]
    return error([queries, keys], wanted), launches, 2 * nbytes(queries, keys) + nbytes(q, k)


def decode(D, S, G, T, dtype):
    q, k, v = random((1, 2 * G, T, D), dtype, 0), random((1, 2, S, D), dtype, 1), random((1, 2, S, D), dtype, 2)
    (out,), launches = run(lambda: [decode_attention(q, k, v, D**-0.5)], "attention_decode")
    return error([out], [oracle.attention(*map(oracle.as64, (q, k, v)), D**-0.5)[0]]), launches, nbytes(q, k, v, out)


def quantized(bits, group_size, dtype):
    D, S, form = 128, 2048, {"bits": bits, "group_size": group_size}
    q, k, v = random((1, 8, 1, D), dtype, 0), random((1, 2, S, D), dtype, 1), random((1, 2, S, D), dtype, 2)
    k, v = mx.quantize(k, **form), mx.quantize(v, **form)
    form = {"group_size": group_size, "key_bits": bits, "value_bits": bits}
    (out,), launches = run(lambda: [decode_attention(q, k, v, D**-0.5, **form)], "attention_decode")
    exact = [dequantized(x, bits, group_size) for x in (k, v)]
    return error([out], [oracle.attention(oracle.as64(q), *exact, D**-0.5)[0]]), launches, nbytes(q, *k, *v, out)


def dequantized(packed, bits, group_size):
    words, scales, biases = packed
    exact = (x.astype(mx.float32) for x in (scales, biases))
    return oracle.as64(mx.dequantize(words, *exact, bits=bits, group_size=group_size))


def tiled(kernel, T, D, dtype):
    q, k, v, g = (random((1, h, T, D), dtype, seed) for seed, h in enumerate((4, 2, 2, 4)))
    out, grads = [], []

    def both():
        out[:], grads[:] = mx.vjp(lambda *x: tiled_attention(*x, D**-0.5), [q, k, v], [g])
        return out + grads

    _, launches = run(both, kernel)
    exact = [oracle.as64(x) for x in (q, k, v, g)]
    rows = 4 * q.size // D  # bytes of a float32 for each row
    if kernel == "attention_forward":
        return error(out, [oracle.attention(*exact[:3], D**-0.5)[0]]), launches, nbytes(q, k, v, *out) + rows
    dq, dk, dv = oracle.attention_grad(*exact[:3], D**-0.5, exact[3])
    if kernel == "attention_grad_query":
        return error(grads[:1], [dq]), launches, nbytes(q, k, v, g, *out, grads[0]) + 3 * rows
    return error(grads[1:], [dk, dv]), launches, nbytes(q, k, v, g, *grads[1:]) + 2 * rows


if __name__ == "__main__":
    main()

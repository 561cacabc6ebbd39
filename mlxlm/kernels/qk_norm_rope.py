"""RMSNorm and rotary position embeddings (RoPE) of the queries and keys of a decoding step.

They have few bytes, so on a GPU the number of launches decides.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation
from mlxlm.kernels.metal import MetalKernel, scalar

_KERNEL = MetalKernel(
    "qk_norm_rope",
    inputs=("x", "query_weight", "key_weight", "positions", "wavelengths", "base", "eps"),
    outputs=("queries", "keys"),
)
_SIMD = 32  # threads of a SIMD group
_SEVERAL = 8  # rows of the case of more than one

_Norms = tuple[mx.array, mx.array]


class RoPE(NamedTuple):
    """Rotary position embeddings (Su et al. 2021), as `mx.fast.rope` describes them.

    Args:
        dims: How many dimensions of a head are rotated, the first ones. Even.
        base: Of the wavelengths base^(2i / dims).
        wavelengths: Others, float32 `[dims / 2]`, if `base` is None.
        interleaved: Pairs are neighboring dimensions instead of the two halves; not for `qk_norm_rope`.
    """

    dims: int
    base: float | None
    wavelengths: mx.array | None
    interleaved: bool = False

    def rotate(self, x: mx.array, offset: int | mx.array) -> mx.array:
        """Rotate x `[B, H, T, D]` for the positions from `offset`, int32 `[B]`, on."""
        return mx.fast.rope(
            x, self.dims, traditional=self.interleaved, base=self.base, scale=1.0, offset=offset, freqs=self.wavelengths
        )


def qk_norm_rope(
    x: mx.array, heads: int, kv_heads: int, norms: _Norms | None, eps: float, rope: RoPE | None, angles: Any
) -> tuple[mx.array, mx.array]:
    """Normalize and rotate the queries and keys of a fused projection.

    Args:
        x: `[B, N, 1, D]`, N >= H + H_kv: queries and keys of one position per row, and others, float32, float16 or
            bfloat16.
        heads: H.
        kv_heads: H_kv. May be 0.
        norms: Weights `[D]` of the RMSNorm of each head of the queries and of the keys.
        eps: Added to the mean square.
        rope: The rotation, if there is one.
        angles: Positions int32 `[B]`. On a CPU also cosines and sines, see `RotaryEmbedding.angles`.

    Returns:
        Queries `[B, H, 1, D]` and keys `[B, H_kv, 1, D]` in the dtype that x and norms promote to.
    """
    if norms is None and rope is None:
        return _qk_norm_rope_mlx(x, heads, kv_heads, norms, eps, rope, angles)
    B, _, _, D = x.shape
    sizes = D, 0 if rope is None else rope.dims, heads, kv_heads, 1 if B == 1 else _SEVERAL
    used = {"norm": norms is not None, "wavelengths": rope is not None and rope.wavelengths is not None}
    features = tuple(name for name, is_used in used.items() if is_used)
    case = Case(QK_NORM_ROPE.name, DTYPE_NAMES[x.dtype], ("D", "dims", "H", "K", "rows"), sizes, features)
    return QK_NORM_ROPE.implementation(case)(x, heads, kv_heads, norms, eps, rope, angles)


def _qk_norm_rope_mlx(
    x: mx.array, heads: int, kv_heads: int, norms: _Norms | None, eps: float, rope: RoPE | None, angles: Any
) -> tuple[mx.array, mx.array]:
    rotated = x[:, : heads + kv_heads]
    if norms is not None:
        parts = zip((rotated[:, :heads], rotated[:, heads:]), norms, strict=True)
        rotated = mx.concatenate([mx.fast.rms_norm(part, weight, eps) for part, weight in parts], axis=1)
    if rope is not None:
        rotated = _rotate(rotated, rope, angles)
    return rotated[:, :heads], rotated[:, heads:]


def _rotate(x: mx.array, rope: RoPE, angles: Any) -> mx.array:
    """Rotate x `[B, H, 1, D]`. Equal to the rotation of whole sequences."""
    if isinstance(angles, mx.array):
        return rope.rotate(x, angles)
    cosines, sines = angles
    (B, H, _, D), dims = x.shape, rope.dims
    halves = x.reshape(B, H, 2, D // 2) if dims == D else x[..., :dims].reshape(B, H, 2, dims // 2)
    rotated = (halves * cosines + halves[:, :, ::-1] * sines).reshape(B, H, 1, dims)
    return rotated if dims == D else mx.concatenate([rotated, x[..., dims:]], axis=-1)


def _qk_norm_rope_metal(
    x: mx.array, heads: int, kv_heads: int, norms: _Norms | None, eps: float, rope: RoPE | None, angles: Any
) -> tuple[mx.array, mx.array]:
    B, total, _, D = x.shape
    query_weight, key_weight = norms or (x, x)  # an array that isn't read stands in for what is missing
    dtype = mx.result_type(x, query_weight, key_weight)
    dims, base, wavelengths, _ = rope or (0, None, None, False)
    queries, keys = _KERNEL(
        inputs=[
            x, query_weight, key_weight,
            x if rope is None else angles,
            x if wavelengths is None else wavelengths,
            scalar(math.log2(base or 1.0), mx.float32), scalar(eps, mx.float32),
        ],
        template={
            "T": dtype, "D": D, "N": total, "H": heads, "K": kv_heads, "HALF": dims // 2, "NORM": norms is not None,
            "WAVELENGTHS": wavelengths is not None,
        },
        grid=(_SIMD, heads + kv_heads, B),
        threadgroup=(_SIMD, 1, 1),
        outputs=[((B, heads, 1, D), dtype), ((B, max(1, kv_heads), 1, D), dtype)],  # an array can't have no elements
    )  # fmt: skip
    return queries, keys[:, :kv_heads]


def _preferred_paths(case: Case) -> tuple[tuple[str, ...], str]:
    """The path with fewer launches: `metal_kernels/README.md` counts those of MLX's operations."""
    if case.size("rows") == 1 and case.size("dims") == case.size("D") and "norm" not in case.features:
        return ("mlx", "metal"), "MLX's own"
    return ("metal", "mlx"), "MLX needs several launches"


def _sample_inputs(case: Case) -> tuple[list[Any], dict[str, Any]]:
    D, dims, H, K, rows = case.sizes
    dtype = getattr(mx, case.dtype)
    seeds = mx.random.split(mx.random.key(0), 4)
    x = mx.random.normal((rows, H + K + 1, 1, D), key=seeds[0]).astype(dtype)
    norms = tuple((1 + 0.3 * mx.random.normal((D,), key=seed)).astype(dtype) for seed in seeds[1:3])
    rope = RoPE(dims, 10_000.0, None) if dims else None
    if "wavelengths" in case.features:
        rope = RoPE(dims, None, mx.exp(mx.random.uniform(0, 9, (dims // 2,), key=seeds[3])))
    positions = 37 * mx.arange(rows, dtype=mx.int32) + 5
    return [x, H, K, norms if "norm" in case.features else None, 1e-6, rope, positions], {}


QK_NORM_ROPE = Operation(
    "qk_norm_rope",
    {"mlx": _qk_norm_rope_mlx, "metal": _qk_norm_rope_metal},
    _preferred_paths,
    _sample_inputs,
    lambda case: (case.with_sizes(rows=3),),
)

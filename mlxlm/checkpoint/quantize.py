"""Quantized weights in MLX's affine format, with every exception listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxlm._mlx import mx, nn, tree_flatten

GROUP_SIZES = (128, 64, 32)  # what MLX's affine kernels take


@dataclass(frozen=True)
class Quantized:
    """Weights to write, the `quantization` entry of config.json, and the layers that differ from it."""

    weights: dict[str, mx.array]
    plan: dict[str, Any]
    regrouped: dict[str, int]  # layer: the group size it got instead
    skipped: dict[str, int]  # layer: the width that no group size divides; left in 16 bits


def quantize_weights(model: nn.Module, bits: int, group_size: int = 64, dtype: mx.Dtype = mx.float16) -> Quantized:
    """Quantize all matrices of `model` to `bits` with one scale and bias per `group_size` weights of a row.

    A matrix whose rows `group_size` doesn't divide gets the largest size below it that does; if none
    does, it is left in `dtype`. Norms and other vectors are always left in `dtype`.
    """
    weights: dict[str, mx.array] = {}
    plan: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    regrouped, skipped = {}, {}
    for name, value in tree_flatten(model.parameters()):
        layer = name.removesuffix(".weight")
        if value.ndim != 2:
            weights[name] = value.astype(dtype)
            continue
        width = value.shape[-1]
        fitting = next((g for g in GROUP_SIZES if g <= group_size and width % g == 0), None)
        if fitting is None:
            skipped[layer] = width
            plan[layer] = False
            weights[name] = value.astype(dtype)
            continue
        if fitting != group_size:
            regrouped[layer] = fitting
            plan[layer] = {"group_size": fitting, "bits": bits}
        packed, scales, biases = mx.quantize(value.astype(dtype), group_size=fitting, bits=bits)
        weights |= {name: packed, f"{layer}.scales": scales, f"{layer}.biases": biases}
    return Quantized(weights, plan, regrouped, skipped)

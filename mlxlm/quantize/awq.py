"""AWQ (Lin et al. 2023, arXiv:2306.00978): scale up important input channels before rounding.

The norm or matrix before them is scaled down, so that the model computes the same. mlx_lm.quant.awq has a table per
architecture; this works on the parts of our decoder. Errors are computed from second moments of the inputs, so that
no activations are kept: |ΔW X|² = tr(ΔW · XᵀX · ΔWᵀ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import Format
from mlxlm.config.sublayers import MIXERS
from mlxlm.quantize.calibrate import CalibratedMethod, InputStats, get_submodule
from mlxlm.quantize.rtn import PackedMatrix, dequantized, quantize_rtn

EXPONENTS = tuple(step / 16 for step in range(17))  # of a channel's RMS, which gives its scale; 0 is no scaling
CLIP_RATIOS = tuple(1 - step / 20 for step in range(11))  # of a group's range; down to 0.5 as in the paper's code
_UNCLIPPED = ("q_proj", "k_proj")  # not clipped: attention scores depend most on the largest weights (the paper's code)
_LIMIT = 64.0  # largest scale and inverse, so that 16 bits can represent the result


@dataclass(frozen=True)
class ScaleGroup:
    """Layers that read the output of `source`, a norm or a matrix, so that its channels can be scaled."""

    source: str
    next_layers: tuple[str, ...]


def scale_groups(config: ModelConfig, mixer: str = "attention") -> list[ScaleGroup]:
    """The places of a block with this mixer where channels can be scaled without changing what it computes."""
    matrices = MIXERS[mixer](config).matrices
    attention = tuple(m.module for m in matrices if m.group not in ("output", "convolution"))
    feed_forward = ("mlp.gate_proj", "mlp.up_proj") if config.mlp_gated else ("mlp.up_proj",)
    groups = []
    norms = config.layer_norms
    if norms.attention_input and norms.mlp_input:  # else the sublayers read the residual, or share a norm
        groups += [ScaleGroup(norms.attention_input, attention), ScaleGroup(norms.mlp_input, feed_forward)]
    elif norms.attention_input:
        groups.append(ScaleGroup(norms.attention_input, attention + feed_forward))
    if (
        mixer == "attention" and config.num_key_value_heads == config.num_attention_heads
    ):  # else several heads share a value channel
        groups.append(ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)))
    if config.mlp_gated or config.hidden_act == "relu":  # what is linear in `up`; relu(x / s) = relu(x) / s
        groups.append(ScaleGroup("mlp.up_proj", ("mlp.down_proj",)))
    return groups


def apply_best_scales(
    block: nn.Module,
    config: ModelConfig,
    inputs: Mapping[str, InputStats],
    formats: Mapping[str, Format | None],
    dtype: mx.Dtype,
) -> tuple[dict[str, InputStats], set[str]]:
    """Scale the channels of a block in place, in each group by the exponent with the smallest output error.

    See `CalibratedMethod.change_block`.
    """
    inputs, changed = dict(inputs), set()
    for group in scale_groups(config, block.mixer_type):
        moments = inputs[group.next_layers[0]].moments
        modules = {name: get_submodule(block, name) for name in group.next_layers}
        quantized = [(module.weight, fmt) for name, module in modules.items() if (fmt := formats.get(name)) is not None]
        scale = _best_scale(quantized, moments, dtype) if quantized else None
        if scale is None:
            continue
        offset = 1.0 if config.norm_unit_offset and "norm" in group.source else 0.0
        scale = _divide(get_submodule(block, group.source), scale, offset, dtype)
        for module in modules.values():
            module.weight = _round_to(dtype, module.weight * scale)
        inverse = np.array(1 / scale)
        scaled = moments * inverse * inverse[:, None]
        inputs |= dict.fromkeys(group.next_layers, InputStats(scaled))
        changed |= {group.source, *group.next_layers}
    return inputs, changed


def quantize_clipped(name: str, weight: mx.array, moments: np.ndarray, chosen: Format) -> PackedMatrix:
    """Round a matrix with the clip ratio of each group that has the smallest output error."""
    plain = quantize_rtn(weight, chosen)
    if name.rpartition(".")[2] in _UNCLIPPED:
        return plain
    rows, width = weight.shape
    size = chosen.group_size
    # The moments within each group, [groups, size, size].
    corners = mx.array(np.stack([moments[s : s + size, s : s + size] for s in range(0, width, size)]))
    groups = weight.reshape(rows, -1, size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best, best_error = groups, mx.array(mx.inf)
    for part in CLIP_RATIOS:
        candidate = mx.clip(groups, low * part, high * part)
        values = dequantized(quantize_rtn(candidate.reshape(rows, width), chosen), chosen)
        change = (values.reshape(rows, -1, size) - groups.astype(mx.float32)).swapaxes(0, 1)  # [groups, rows, size]
        error = ((change @ corners) * change).sum(axis=-1).T[..., None]
        better = error < best_error
        best, best_error = mx.where(better, candidate, best), mx.where(better, error, best_error)
        mx.eval(best, best_error)
    return quantize_rtn(best.reshape(rows, width), chosen)


def _best_scale(next_layers: list[tuple[mx.array, Format]], moments: np.ndarray, dtype: mx.Dtype) -> mx.array | None:
    """The scale of each channel, float32; None if no scaling is best."""
    size = np.sqrt(np.diag(moments).astype(np.float32))
    alive = size > 0
    if not alive.any():
        return None
    products = mx.array(moments)
    best, best_error = None, np.inf
    for exponent in EXPONENTS:
        powers = np.where(alive, np.where(alive, size, 1) ** exponent, 1)
        middle = np.sqrt(powers[alive].max() * powers[alive].min())
        scale = mx.array(np.clip(np.where(alive, powers / middle, 1), 1 / _LIMIT, _LIMIT))
        error = mx.array(0.0)
        for weight, chosen in next_layers:
            values = dequantized(quantize_rtn((weight * scale).astype(dtype), chosen), chosen) / scale
            change = values - weight.astype(mx.float32)
            error = error + ((change @ products) * change).sum()
        if error.item() < best_error:
            best, best_error = (scale if exponent else None), error.item()
    return best


def _divide(source: nn.Module, scale: mx.array, offset: float, dtype: mx.Dtype) -> mx.array:
    """Divide the output channels of a norm or linear layer by `scale`; returns the factors after rounding.

    A norm's gain is its weight plus `offset`. The next layers are scaled by the factors of the rounded weight: near -1
    an offset weight has few bits left for the gain.
    """
    if isinstance(source, nn.Linear):
        source.weight = _round_to(dtype, source.weight / scale[:, None])
    else:
        before = source.weight + offset
        weight = _round_to(dtype, before / scale - offset)
        done = before / (weight + offset)
        usable = (done > 1 / (2 * _LIMIT)) & (done < 2 * _LIMIT)  # not where one of the two is 0
        source.weight = mx.where(usable, weight, source.weight)
        scale = mx.where(usable, done, 1)
    if "bias" in source:
        source.bias = _round_to(dtype, source.bias / scale)
    return scale


def _round_to(dtype: mx.Dtype, value: mx.array) -> mx.array:
    """Round to `dtype` and back."""
    return value.astype(dtype).astype(value.dtype)


class AWQ(CalibratedMethod):
    """Scales and clips before rounding."""

    needs_dense_decoder = True
    change_block = staticmethod(apply_best_scales)

    def quantize(self, module: str, weight: mx.array, inputs: InputStats, fmt: Format) -> PackedMatrix:
        """Round with the best clip ratio of each group."""
        return quantize_clipped(module, weight, inputs.moments, fmt)

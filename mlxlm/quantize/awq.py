"""AWQ (Lin et al. 2023, arXiv:2306.00978): input channels that matter are made larger before rounding, and the norm
or matrix before them smaller, so that the model computes the same.

mlx_lm.quant.awq knows its own models by name; this works on the parts of the one decoder. Errors are taken from
the second moments of the inputs, so that no activation is kept: |ΔW X|² = tr(ΔW · XᵀX · ΔWᵀ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.quantize.calibrate import InputStats
from mlxlm.quantize.packed_matrix import PackedMatrix, dequantized, quantize_rtn
from mlxlm.quantize.quantization_plan import Format

EXPONENTS = tuple(step / 16 for step in range(17))  # of a channel's size in its scale; 0 is no scaling
CLIP_RATIOS = tuple(
    1 - step / 20 for step in range(11)
)  # parts of a group's range; the paper's code goes to a half, too
_UNCLIPPED = ("q_proj", "k_proj")  # attention scores feel their largest weights most (the paper's code)
_LIMIT = 64.0  # of a scale and its inverse, so that 16 bits hold the result


@dataclass(frozen=True)
class ScaleGroup:
    """`next_layers` all multiply what `source` gives, a norm or the rows of a matrix, channel by channel."""

    source: str
    next_layers: tuple[str, ...]


def scale_groups(config: ModelConfig) -> list[ScaleGroup]:
    """Where a block lets channels be scaled without any change of what it computes."""
    attention = tuple(f"self_attn.{p}_proj" for p in "qkv")
    feed_forward = ("mlp.gate_proj", "mlp.up_proj") if config.mlp_gated else ("mlp.up_proj",)
    found = []
    if config.norm_placement in ("pre", "both"):  # else they read the residual stream itself
        second = "pre_feedforward_layernorm" if config.norm_placement == "both" else "post_attention_layernorm"
        if config.shared_norm:
            found.append(ScaleGroup("input_layernorm", attention + feed_forward))
        else:
            found += [ScaleGroup("input_layernorm", attention), ScaleGroup(second, feed_forward)]
    if config.num_key_value_heads == config.num_attention_heads:  # else several heads share a value channel
        found.append(ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)))
    if config.mlp_gated or config.hidden_act == "relu":  # what is linear in `up`; relu(x / s) = relu(x) / s
        found.append(ScaleGroup("mlp.up_proj", ("mlp.down_proj",)))
    return found


def apply_best_scales(
    block: nn.Module, config: ModelConfig, inputs: Mapping[str, InputStats], formats: Mapping[str, Format | None],
    dtype: mx.Dtype,
) -> tuple[dict[str, InputStats], set[str]]:  # fmt: skip
    """Scale the channels of `block` in place, each fold by the exponent with the smallest output error.

    What has changed is rounded to `dtype`, the files', so that the block goes on with what they will have.
    Returns the layers' inputs as they are afterwards, and the modules whose tensors have changed.
    """
    inputs, changed = dict(inputs), set()
    for group in scale_groups(config):
        next_layers = [name for name in group.next_layers if formats.get(name) is not None]
        if not next_layers:
            continue
        own = inputs[group.next_layers[0]].moments
        modules = {name: get_submodule(block, name) for name in group.next_layers}
        scale = _best_scale([(modules[name].weight, formats[name]) for name in next_layers], own, dtype)
        if scale is None:
            continue
        offset = 1.0 if config.norm_unit_offset and "norm" in group.source else 0.0
        scale = _divide(get_submodule(block, group.source), scale, offset, dtype)
        for module in modules.values():
            module.weight = _in(dtype, module.weight * scale)
        inverse = np.array(1 / scale)
        scaled = own * inverse * inverse[:, None]
        inputs |= dict.fromkeys(group.next_layers, InputStats(scaled))
        changed |= {group.source, *group.next_layers}
    return inputs, changed


def quantize_clipped(name: str, weight: mx.array, moments: np.ndarray, chosen: Format) -> PackedMatrix:
    """Rounded within the range of each group whose output error is smallest, taken group by group."""
    plain = quantize_rtn(weight, chosen)
    if name.rpartition(".")[2] in _UNCLIPPED:
        return plain
    rows, width = weight.shape
    size = chosen.group_size
    # The moments within each group, [groups, size, size].
    corners = mx.array(np.stack([moments[s : s + size, s : s + size] for s in range(0, width, size)]))
    groups = weight.reshape(rows, -1, size)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    best = best_error = None
    for part in CLIP_RATIOS:
        candidate = mx.clip(groups, low * part, high * part)
        values = dequantized(quantize_rtn(candidate.reshape(rows, width), chosen), chosen)
        change = (values.reshape(rows, -1, size) - groups.astype(mx.float32)).swapaxes(0, 1)  # [groups, rows, size]
        error = ((change @ corners) * change).sum(axis=-1).T[..., None]
        if best is None:
            best, best_error = candidate, error
        else:
            better = error < best_error
            best, best_error = mx.where(better, candidate, best), mx.where(better, error, best_error)
        mx.eval(best, best_error)
    return quantize_rtn(best.reshape(rows, width), chosen)


def _best_scale(next_layers: list[tuple[mx.array, Format]], moments: np.ndarray, dtype: mx.Dtype) -> mx.array | None:
    """The scale of each channel, float32, or None where none does better than 1."""
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
    """Make what `source` gives smaller by `scale`, channel by channel; by how much it has become smaller.

    A norm, whose gain is its weight plus `offset`, is rounded first and its readers make up for what it then is:
    near -1 an offset weight has few bits left for the gain.
    """
    if isinstance(source, nn.Linear):
        source.weight = _in(dtype, source.weight / scale[:, None])
    else:
        before = source.weight + offset
        weight = _in(dtype, before / scale - offset)
        done = before / (weight + offset)
        usable = (done > 1 / (2 * _LIMIT)) & (done < 2 * _LIMIT)  # not where one of the two is 0
        source.weight = mx.where(usable, weight, source.weight)
        scale = mx.where(usable, done, 1)
    if "bias" in source:
        source.bias = _in(dtype, source.bias / scale)
    return scale


def _in(dtype: mx.Dtype, value: mx.array) -> mx.array:
    """Rounded to `dtype`, in its own."""
    return value.astype(dtype).astype(value.dtype)


def get_submodule(block: nn.Module, name: str) -> nn.Module:
    """The part of a block, or of a decoder, with a dotted name."""
    for part in name.split("."):
        block = block[int(part) if part.isdigit() else part]
    return block

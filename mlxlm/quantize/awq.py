"""AWQ (Lin et al. 2023, arXiv:2306.00978): scale up important input channels before rounding.

The norm or matrix before them is scaled down, so that the model computes the same. mlx_lm.quant.awq has a table of such
places for some architectures; here they are found by trying. Errors are computed from second moments of the inputs, so
that no activations are kept: |ΔW X|² = tr(ΔW · XᵀX · ΔWᵀ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.config.quantization import Format
from mlxlm.quantize import calibrate
from mlxlm.quantize.calibrate import CalibratedMethod, ExpertInputs, InputStats, get_submodule, is_stack
from mlxlm.quantize.rtn import PackedMatrix, dequantized, quantize_rtn

EXPONENTS = tuple(step / 16 for step in range(17))  # of a channel's RMS, which gives its scale; 0 is no scaling
CLIP_RATIOS = tuple(1 - step / 20 for step in range(11))  # of a group's range; down to 0.5 as in the paper's code
# Not clipped: attention scores depend most on the largest weights (the paper's code), and clipping those of latent
# attention made the KL divergence of small random models 2 to 5 % larger.
_UNCLIPPED = ("q_proj", "k_proj", "embed_q", "unembed_out")
_LIMIT = 64.0  # largest scale and inverse, so that 16 bits can represent the result
_SAME = 0.01  # relative difference that rounding can cause: on a GPU, weights have 16 bits


@dataclass(frozen=True)
class ScaleGroup:
    """Layers that read the output of one norm or matrix, so that its channels can be scaled.

    Attributes:
        source: The norm or matrix; or the matrices of all experts, whose readers are those of the same experts.
        next_layers: All that read its output.
        offset: A norm's gain is its weight plus this.
    """

    source: str
    next_layers: tuple[str, ...]
    offset: float = 0.0


def find_scale_groups(block: nn.Module, run: Callable[[], mx.array]) -> list[ScaleGroup]:
    """Find the places of a block where channels can be scaled without changing what it computes.

    Each norm and matrix is tried: its channels are divided by powers of two. Layers whose inputs change by just these
    read its output. If multiplying their weights by the same powers restores the output of the block, nothing else
    does. A layer that could be scaled by several sources gets the first one.

    Args:
        block: A block, which is the same afterwards.
        run: Runs it on some text; returns its output.
    """
    output, squares = _observe(block, run)
    groups: list[ScaleGroup] = []
    left = set(squares)
    modules = tree_flatten(block.leaf_modules(), is_leaf=nn.Module.is_module)
    for source, module in sorted(modules, key=lambda item: item[1].get("weight", mx.array(0)).ndim):  # norms first
        if "weight" not in module or not (is_norm := module.weight.ndim == 1) and source not in squares:
            continue
        width = module.weight.shape[-1 if is_norm else -2]
        powers = mx.where(mx.arange(width) % 2 == 0, 2.0, 0.5)
        for offset in (0.0, 1.0) if is_norm else (0.0,):
            before = {source: dict(module)}
            scale = _divide(module, powers, offset, mx.float32)
            changed, found = _observe(block, run)
            expected = {name: value / np.array(scale) ** 2 for name, value in squares.items() if len(value) == width}
            readers = [n for n in expected if n in left and n != source and np.allclose(found[n], expected[n], _SAME)]
            before |= {name: dict(get_submodule(block, name)) for name in readers}
            _multiply(block, readers, scale, mx.float32)
            difference = _size(run() - output) if readers else np.inf
            for name, values in before.items():
                get_submodule(block, name).update(values)
            if difference < _SAME * _size(changed - output):
                groups.append(ScaleGroup(source, tuple(readers), offset))
                left -= set(readers)
                break
    return groups


def _observe(block: nn.Module, run: Callable[[], mx.array]) -> tuple[mx.array, dict[str, np.ndarray]]:
    """Run a block: its output, and the sum of squares of each channel of its layers' inputs, by name."""
    with calibrate.recording(block, diagonal=True) as inputs:
        output = run()
        mx.eval(output)
    return output, {n: s.squares() if isinstance(s, ExpertInputs) else s.moments for n, s in inputs.items()}


def _size(x: mx.array) -> float:
    return mx.linalg.norm(x.astype(mx.float32).flatten()).item()


def apply_best_scales(
    block: nn.Module,
    groups: list[ScaleGroup],
    inputs: Mapping[str, InputStats | ExpertInputs],
    formats: Mapping[str, Format | None],
    dtype: mx.Dtype,
) -> set[str]:
    """Scale the channels of a block in place, in each group by the exponent with the smallest output error.

    Experts that read too little of the text to be calibrated aren't scaled. See `CalibratedMethod.change_block`.
    """
    changed: set[str] = set()
    for group in groups:
        readers = {name: inputs[name] for name in group.next_layers}
        quantized = [
            (get_submodule(block, name).weight, fmt) for name in readers if (fmt := formats.get(name)) is not None
        ]
        source = get_submodule(block, group.source)
        scale = _expert_scales(quantized, readers, dtype) if is_stack(source) else _scale(quantized, readers, dtype)
        if scale is None:
            continue
        scale = _divide(source, scale, group.offset, dtype)
        _multiply(block, group.next_layers, scale, dtype)
        changed |= {group.source, *group.next_layers}
    return changed


def _scale(
    weights: list[tuple[mx.array, Format]], readers: Mapping[str, InputStats | ExpertInputs], dtype: mx.Dtype
) -> mx.array | None:
    """The scale of each channel that all tokens have, `[width]`; None if no scaling is best."""
    if not weights:
        return None
    stats = next((stats for stats in readers.values() if isinstance(stats, InputStats)), next(iter(readers.values())))
    if isinstance(stats, InputStats):
        moments = stats.moments
    else:  # only experts read it
        experts = range(len(weights[0][0]))
        moments = sum((stats.of(expert)[1].moments for expert in experts), np.zeros((), np.float32))
    return _best_scale([(weight.reshape(-1, weight.shape[-1]), fmt) for weight, fmt in weights], moments, dtype)


def _expert_scales(
    weights: list[tuple[mx.array, Format]], readers: Mapping[str, InputStats | ExpertInputs], dtype: mx.Dtype
) -> mx.array | None:
    """The scale of each channel of each expert, `[experts, width]`; None if no scaling is best."""
    [inputs, *_] = readers.values()
    if not weights or not isinstance(inputs, ExpertInputs):
        return None
    experts, _, width = weights[0][0].shape
    scales: list[mx.array | None] = []
    for expert in range(experts):
        tokens, stats = inputs.of(expert)
        own = [(weight[expert], fmt) for weight, fmt in weights]
        is_calibrated = tokens >= calibrate.MIN_EXPERT_TOKENS
        scales.append(_best_scale(own, stats.moments, dtype) if is_calibrated else None)
    if all(scale is None for scale in scales):
        return None
    return mx.stack([mx.ones(width) if scale is None else scale for scale in scales])


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
    weight = source.weight.astype(mx.float32)
    if weight.ndim == 1:
        rounded = ((weight + offset) / scale - offset).astype(dtype).astype(mx.float32)
        done = (weight + offset) / (rounded + offset)
        usable = (done > 1 / (2 * _LIMIT)) & (done < 2 * _LIMIT)  # not where one of the two is 0
        _set(source, "weight", mx.where(usable, rounded, weight), dtype)
        scale = mx.where(usable, done, 1)
    else:
        _set(source, "weight", weight / scale[..., None], dtype)
    if "bias" in source:
        _set(source, "bias", source.bias / scale, dtype)
    return scale


def _multiply(block: nn.Module, layers: Iterable[str], scale: mx.array, dtype: mx.Dtype) -> None:
    """Multiply the input channels of linear layers by `scale` `[width]`, or those of experts by `[experts, width]`."""
    for name in layers:
        layer = get_submodule(block, name)
        _set(layer, "weight", layer.weight * (scale[:, None] if scale.ndim == 2 else scale), dtype)


def _set(module: nn.Module, parameter: str, value: mx.array, dtype: mx.Dtype) -> None:
    """Set a parameter to a value that `dtype` can represent."""
    module[parameter] = value.astype(dtype).astype(module[parameter].dtype)


class AWQ(CalibratedMethod):
    """Scales and clips before rounding."""

    def __init__(self) -> None:
        self._groups: dict[Any, list[ScaleGroup]] = {}  # by the names and shapes of a block's weights

    def change_block(
        self,
        block: nn.Module,
        run: Callable[[], mx.array],
        formats: Mapping[str, Format | None],
        dtype: mx.Dtype,
    ) -> set[str]:
        """Scale channels. Blocks with weights of the same names and shapes are scaled in the same places."""
        kind = tuple((name, value.shape) for name, value in tree_flatten(block.parameters()))
        if kind not in self._groups:
            self._groups[kind] = find_scale_groups(block, run)
        with calibrate.recording(block) as inputs:
            mx.eval(run())
        return apply_best_scales(block, self._groups[kind], inputs, formats, dtype)

    def quantize(self, name: str, weight: mx.array, fmt: Format, inputs: InputStats) -> PackedMatrix:
        """Round with the best clip ratio of each group."""
        return quantize_clipped(name, weight, inputs.moments, fmt)

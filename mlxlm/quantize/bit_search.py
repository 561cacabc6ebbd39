"""Bits per matrix under a constraint: the KL divergence that each matrix costs, and where a byte saves most of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.layerwise import HiddenState
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert.compare import kl_divergence
from mlxlm.kernels import log_softmax
from mlxlm.quantize.awq import get_submodule
from mlxlm.quantize.packed_matrix import dequantized, quantize_rtn
from mlxlm.quantize.quantization_plan import BITS, Format, Matrix, QuantizationPlan
from mlxlm.utils.errors import CheckpointError, ConfigError

PROBE_BITS = 3  # few enough for a measurable KL divergence, enough for one that grows with the squared error
_MIN_COST = 1e-9  # nats per token: matrices without a measurable cost get more bits, too, if there is room
PROBE_TOKENS = 2048  # of the calibration text
_MAX_LOGITS = 1 << 27  # of the source, in memory
_NUM_SIZES = 128  # candidates for a bound on the KL divergence
_MAX_MEASUREMENTS = 6  # of whole models, to find the smallest one within the bound

# Matrix -> format -> increase of the KL divergence, in nats per token, if only this matrix is quantized.
Sensitivities = Mapping[str, Mapping[Format, float]]


@dataclass(frozen=True)
class BitUpgrade:
    """A better format for one matrix, the bytes that it costs and the KL divergence that it saves."""

    matrix: Matrix
    chosen: Format
    nbytes: int
    saved: float


def sensitivities(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    windows: np.ndarray,
    progress: Callable[[str], None] = lambda name: None,
) -> Sensitivities:
    """Measure the KL divergence that each matrix costs.

    Each matrix alone is rounded to PROBE_BITS, and the rest of the model is run to the logits. The cost of other bits
    is extrapolated from the squared error of the weights, since a small change of weights changes the KL divergence by
    its square.

    Args:
        checkpoint: A model in 16 bits.
        plan: The matrices and their mode and group size.
        windows: Tokens, int `[N, T]`.
        progress: Called with the name of each finished matrix.

    Raises:
        CheckpointError: The model doesn't fit in memory, where it has to be for one run per matrix.
    """
    needed = 4 * checkpoint.config.parameter_count()
    if needed > 0.6 * platform.total_memory():
        raise CheckpointError(
            f"the search for bits runs the model once per matrix, which takes {needed / 1e9:.1f} GB of memory",
            "a recipe, or the same bits for all matrices: both keep one layer in memory",
        )
    model, _ = load_checkpoint(checkpoint)
    count = max(1, min(PROBE_TOKENS, _MAX_LOGITS // checkpoint.config.vocab_size) // windows.shape[1])
    probe = _Probe(model, windows[:: -(-len(windows) // count)])
    costs: dict[str, dict[Format, float]] = {}
    for matrix in plan.matrices:
        base = plan.format_of(matrix)
        if base is not None:
            costs[matrix.name] = _costs(probe, model, matrix, base)
            progress(matrix.name)
    return costs


def _costs(probe: _Probe, model: nn.Module, matrix: Matrix, base: Format) -> dict[Format, float]:
    layers = [get_submodule(model, name) for name in matrix.modules]
    weights = [layer.weight for layer in layers]
    errors: dict[Format, float] = {}
    for bits in BITS:
        chosen = replace(base, bits=bits)
        changed = [dequantized(quantize_rtn(weight, chosen), chosen) for weight in weights]
        errors[chosen] = sum(mx.square(new - old).sum().item() for new, old in zip(changed, weights, strict=True))
        if bits == PROBE_BITS:
            for layer, value in zip(layers, changed, strict=True):
                layer.weight = value.astype(layer.weight.dtype)
            cost = probe.kl_divergence(matrix.modules[0])
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight = weight
    measured = errors[replace(base, bits=PROBE_BITS)]
    if not measured:  # exact in few bits
        return errors
    return {chosen: max(cost, _MIN_COST) * error / measured for chosen, error in errors.items()}


class _Probe:
    """The source's hidden states before each block and its predictions, to run the model from any block."""

    def __init__(self, model: nn.Module, windows: np.ndarray):
        self._model, self._tokens = model, mx.array(windows)
        state = model.model.embed(self._tokens), None
        self._states = [state]
        for block in model.layers:
            state = block(*state)
            mx.eval(state)
            self._states.append(state)
        self._source = log_softmax(self._logits(state))
        mx.eval(self._source)

    def kl_divergence(self, module: str) -> float:
        """KL(source || model) in nats per token, if the model was changed in `module` only."""
        parts = module.split(".")
        if module.startswith("model.layers."):
            first = int(parts[2])
            state = self._states[first]
        elif module == "lm_head":
            first, state = len(self._model.layers), self._states[-1]
        else:
            first, state = 0, (self._model.model.embed(self._tokens), None)
        for block in self._model.layers[first:]:
            state = block(*state)
        return kl_divergence(self._source, log_softmax(self._logits(state))).sum(axis=-1).mean().item()

    def _logits(self, state: HiddenState) -> mx.array:
        return self._model.head(self._model.model.final_norm(*state))


def upgrade_path(plan: QuantizationPlan, sensitivities: Sensitivities) -> tuple[QuantizationPlan, list[BitUpgrade]]:
    """The smallest plan, and the upgrades from it in the order of the KL divergence saved per byte.

    Only formats on the lower convex hull of a matrix's cost over bytes are used. The upgrades of a matrix then save
    less and less per byte, so that sorting all upgrades keeps the order within each matrix: the solution that Lagrange
    multipliers give.
    """
    lowest: dict[str, Format] = {}
    path: list[BitUpgrade] = []
    for matrix in plan.matrices:
        if matrix.name not in sensitivities:
            continue
        points = sorted((matrix.nbytes(f), cost, f) for f, cost in sensitivities[matrix.name].items())
        hull = points[:1]
        for point in points[1:]:
            while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            if point[1] < hull[-1][1]:
                hull.append(point)
        lowest[matrix.name] = hull[0][2]
        for before, after in zip(hull, hull[1:], strict=False):
            path.append(BitUpgrade(matrix, after[2], after[0] - before[0], before[1] - after[1]))
    path.sort(key=lambda step: -step.saved / step.nbytes)
    return plan.with_formats(lowest), path


def fit_to_size(plan: QuantizationPlan, sensitivities: Sensitivities, nbytes: int) -> QuantizationPlan:
    """The plan with the lowest cost whose matrices take at most `nbytes`, found greedily.

    An upgrade that doesn't fit is skipped, and the room goes to later ones.

    Raises:
        ValueError: The smallest plan takes more than `nbytes`.
    """
    smallest, path = upgrade_path(plan, sensitivities)
    room = nbytes - smallest.nbytes()
    if room < 0:
        raise ValueError(f"the smallest plan takes {smallest.nbytes()} bytes, not {nbytes}")
    chosen: dict[str, Format] = {}
    closed: set[str] = set()
    for step in path:
        if step.matrix.name in closed or step.nbytes > room:
            closed.add(step.matrix.name)
        else:
            chosen[step.matrix.name] = step.chosen
            room -= step.nbytes
    return smallest.with_formats(chosen)


def fit_to_kl(
    plan: QuantizationPlan, sensitivities: Sensitivities, limit: float, measure: Callable[[QuantizationPlan], float]
) -> QuantizationPlan:
    """The smallest plan whose measured KL divergence is at most `limit`.

    A bisection over sizes, guided by the predicted costs, which each measurement corrects. No plan is measured twice,
    and each one within the limit is smaller than those before.

    Args:
        plan: The matrices and their mode and group size.
        sensitivities: Costs of each matrix.
        limit: KL divergence in nats per token.
        measure: Returns the KL divergence of a plan.

    Raises:
        ConfigError: The most bits aren't enough; the message has the lowest possible divergence.
    """
    plans = _candidates(plan, sensitivities)
    predicted = np.minimum.accumulate([_predicted(each, sensitivities) for each in plans])
    below, enough, ratio = -1, len(plans), 1.0  # indices: the largest that is too small, the smallest within the limit
    kl = math.inf
    for _ in range(_MAX_MEASUREMENTS):
        if below + 1 >= enough:
            break
        guess = int(np.searchsorted(-predicted * ratio, -limit))
        count = min(max(guess, below + 1), enough - 1)
        kl = measure(plans[count])
        if predicted[count] > 0 and kl > 0:
            ratio = kl / predicted[count]
        if kl <= limit:
            enough = count
        else:
            below = count
    if enough < len(plans):
        return plans[enough]
    lowest = kl if below == len(plans) - 1 else measure(plans[-1])
    if lowest <= limit:
        return plans[-1]
    raise ConfigError(
        f"a KL divergence of {limit:g} can't be reached: the most bits give {lowest:.3g}",
        f"{lowest * 1.01:.2g} or more, or smaller groups",
    )


def _candidates(plan: QuantizationPlan, sensitivities: Sensitivities) -> list[QuantizationPlan]:
    """Plans of increasing size, each the best for its size that `fit_to_size` finds."""
    smallest, path = upgrade_path(plan, sensitivities)
    low, span = smallest.nbytes(), sum(step.nbytes for step in path)
    sizes = [low + span * i // _NUM_SIZES for i in range(_NUM_SIZES + 1)]
    plans = {p.nbytes(): p for p in (fit_to_size(plan, sensitivities, size) for size in sizes)}
    return [plans[size] for size in sorted(plans)]


def _predicted(plan: QuantizationPlan, sensitivities: Sensitivities) -> float:
    formats = ((m.name, plan.format_of(m)) for m in plan.matrices if m.name in sensitivities)
    return sum(sensitivities[name][fmt] for name, fmt in formats if fmt is not None)


def _slope(a: tuple[int, float, Format], b: tuple[int, float, Format]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])

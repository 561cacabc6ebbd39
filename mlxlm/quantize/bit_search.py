"""Bits per matrix under a budget: what each matrix costs in KL divergence, and where a byte saves most of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.convert.compare import kl_divergence
from mlxlm.kernels import log_softmax
from mlxlm.quantize.awq import get_submodule
from mlxlm.quantize.packed_matrix import dequantized, quantize_rtn
from mlxlm.quantize.quantization_plan import BITS, Format, Matrix, QuantizationPlan
from mlxlm.utils.errors import CheckpointError, ConfigError

PROBE_BITS = 3  # few enough for a KL that can be measured, and not so few that it stops growing with the square
_LEAST = 1e-9  # nats per token: matrices that don't seem to matter get bits, too, where there is room
TOKENS = 2048  # of the text that the probes see
_LOGITS = 1 << 27  # at most so many of the source's stay in memory
_SIZES = 128  # to choose from for a bound on the KL divergence
_MEASUREMENTS = 6  # of whole models at most, to find the smallest that keeps it

# Matrix -> what the KL divergence grows by, in nats per token, with only this matrix in each format.
Sensitivities = Mapping[str, Mapping[Format, float]]


@dataclass(frozen=True)
class BitUpgrade:
    """More bits for one matrix, and the KL divergence that it saves."""

    matrix: Matrix
    chosen: Format
    nbytes: int
    saved: float


def sensitivities(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    windows: np.ndarray,
    progress: Callable[[str], None] = lambda done: None,
) -> Sensitivities:
    """Measure each matrix of `plan` on `windows` int `[N, T]`.

    Each is rounded to PROBE_BITS by itself, and the rest of the model is run to the logits. Other bits are taken
    from that by the squared error of the weights: a small change of weights changes the KL divergence by its square.
    `progress` is told each matrix that is done. Raises CheckpointError where the model doesn't fit into memory:
    every matrix needs a run of its own.
    """
    needed = 4 * checkpoint.config.parameter_count()
    if needed > 0.6 * platform.total_memory():
        raise CheckpointError(
            f"a search for bits runs the model once per matrix, and it needs {needed / 1e9:.1f} GB of memory",
            "a recipe, or the same bits for all matrices, which need room for one layer",
        )
    model, _ = load_checkpoint(checkpoint)
    count = max(1, min(TOKENS, _LOGITS // checkpoint.config.vocab_size) // windows.shape[1])
    probe = _Probe(model, windows[:: -(-len(windows) // count)])
    found: dict[str, dict[Format, float]] = {}
    for matrix in plan.matrices:
        base = plan.format_of(matrix)
        if base is not None:
            found[matrix.name] = _cost(probe, model, matrix, base)
            progress(matrix.name)
    return found


def _cost(probe: _Probe, model: nn.Module, matrix: Matrix, base: Format) -> dict[Format, float]:
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
    if not measured:  # as good as exact in few bits
        return errors
    return {chosen: max(cost, _LEAST) * error / measured for chosen, error in errors.items()}


class _Probe:
    """The source's states before each block and its predictions, to run from any block on."""

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
        """KL(source || the model as it is now), which differs in `module` only; nats per token."""
        words = module.split(".")
        if module.startswith("model.layers."):
            first = int(words[2])
            state = self._states[first]
        elif module == "lm_head":
            first, state = len(self._model.layers), self._states[-1]
        else:
            first, state = 0, (self._model.model.embed(self._tokens), None)
        for block in self._model.layers[first:]:
            state = block(*state)
        return kl_divergence(self._source, log_softmax(self._logits(state))).sum(axis=-1).mean().item()

    def _logits(self, state) -> mx.array:
        return self._model.head(self._model.model.final_norm(*state))


def upgrade_path(plan: QuantizationPlan, sensitivities: Sensitivities) -> tuple[QuantizationPlan, list[BitUpgrade]]:
    """The smallest plan, and the steps up from it in the order of the KL divergence saved per byte.

    Of each matrix only the formats on the lower convex hull of cost over bytes are taken, so that a matrix's steps
    save less and less per byte and the order by saving is one that can be walked: what Lagrange multipliers find.
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
    """The plan whose matrices take at most `nbytes`, with the least cost found by walking up; room that a step is
    too large for goes to the next that fit. `nbytes` are those of the smallest plan at least."""
    smallest, path = upgrade_path(plan, sensitivities)
    room = nbytes - smallest.nbytes()
    if room < 0:
        raise ValueError(f"{smallest.nbytes()} bytes are the least, not {nbytes}")
    chosen: dict[str, Format] = {}
    closed: set[str] = set()
    for step in path:
        if step.matrix.name in closed or step.nbytes > room:
            closed.add(step.matrix.name)
            continue
        chosen[step.matrix.name] = step.chosen
        room -= step.nbytes
    return smallest.with_formats(chosen)


def fit_to_kl(
    plan: QuantizationPlan, sensitivities: Sensitivities, limit: float, measure: Callable[[QuantizationPlan], float]
) -> QuantizationPlan:
    """The smallest plan found whose KL divergence, as `measure(plan)` gives it, is at most `limit`.

    What the costs predict is corrected by each measurement, so that a few suffice; the bracket of sizes only shrinks.
    No plan is measured twice, and one that keeps the bound is smaller than those before that did.
    Raises ConfigError, naming the smallest divergence possible, if all bits aren't enough.
    """
    plans = _sizes(plan, sensitivities)
    predicted = np.minimum.accumulate([_predicted(each, sensitivities) for each in plans])
    below, enough, ratio = -1, len(plans), 1.0  # the largest known to be too small, the smallest known to do
    most = None  # the divergence that all bits have, once it was measured
    for _ in range(_MEASUREMENTS):
        if below + 1 >= enough:
            break
        guess = int(np.searchsorted(-predicted * ratio, -limit))
        count = min(max(guess, below + 1), enough - 1)
        found = measure(plans[count])
        if predicted[count] > 0 and found > 0:
            ratio = found / predicted[count]
        if found <= limit:
            enough = count
        else:
            below = count
        if count == len(plans) - 1:
            most = found
    if enough < len(plans):
        return plans[enough]
    if most is None:
        most = measure(plans[-1])
    if most <= limit:
        return plans[-1]
    raise ConfigError(
        f"a KL divergence of {limit:g} can't be reached: the most bits give {most:.3g}",
        f"{most * 1.01:.2g} or more, or smaller groups",
    )


def _sizes(plan: QuantizationPlan, sensitivities: Sensitivities) -> list[QuantizationPlan]:
    """Plans from the smallest size to the largest, each the best for its size as far as `fit_to_size` finds it."""
    smallest, path = upgrade_path(plan, sensitivities)
    low, span = smallest.nbytes(), sum(step.nbytes for step in path)
    found = {
        p.nbytes(): p for p in (fit_to_size(plan, sensitivities, low + span * i // _SIZES) for i in range(_SIZES + 1))
    }
    return [found[size] for size in sorted(found)]


def _predicted(plan: QuantizationPlan, sensitivities: Sensitivities) -> float:
    return sum(sensitivities[m.name][plan.format_of(m)] for m in plan.matrices if m.name in sensitivities)


def _slope(a: tuple, b: tuple) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])

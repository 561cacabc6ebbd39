"""Bits per matrix for a target: bytes of the files, bits per weight, or a KL divergence."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint.huggingface import config_values, copy_tokenizer, file_tensors
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.checkpoint.safetensors import SHARD_BYTES
from mlxlm.config.quantization import BITS, Format
from mlxlm.convert.verify import Progress, parameter_count
from mlxlm.quantize.calibrate import get_submodule
from mlxlm.quantize.intercept import intercept
from mlxlm.quantize.methods import Job, QuantizedTensors, quantize_tensors
from mlxlm.quantize.quantization_plan import Matrix, QuantizationPlan
from mlxlm.quantize.report import compare_with_source
from mlxlm.quantize.rtn import dequantized, lazy_quantize, quantize_rtn
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.utils.errors import CheckpointError, ConfigError

PROBE_BITS = 4  # of the rounding errors that are measured
PROBE_SCALE = 0.25  # of these errors: together they must be small enough for the second order
# KL with 8 and with 16 of a model of 0.3M parameters: 0.254 and 0.263 at 4.5 bits, 0.067 and 0.064 at 5.5.
NUM_PROBES = 8
PROBE_TOKENS = 128  # of each
_MIN_COST = 1e-9  # nats per token: matrices without a measurable cost get more bits, too, if there is room
_NUM_SIZES = 128  # candidates for a bound on the KL divergence
_MAX_MEASUREMENTS = 6  # of whole models, to find the smallest one within the bound

# Matrix -> format -> increase of the KL divergence, in nats per token, if only this matrix is quantized.
Sensitivities = Mapping[str, Mapping[Format, float]]
_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding


@dataclass(frozen=True)
class BitUpgrade:
    """A better format for one matrix, the bytes that it costs and the KL divergence that it saves."""

    matrix: Matrix
    chosen: Format
    nbytes: int
    saved: float


def estimate_sensitivities(
    checkpoint: WritableCheckpoint,
    plan: QuantizationPlan,
    windows: np.ndarray,
    progress: Progress,
) -> Sensitivities:
    """Estimate the KL divergence that each matrix costs.

    To second order the KL divergence is sᵀMs / 2, if the rounding error of matrix i is scaled by s_i. Its gradient at
    random signs s gives all (Ms)_i / s_i, whose mean is M_ii: Hutchinson's estimator of a diagonal, as HAWQ-V2 (Dong et
    al. 2020, arXiv:1911.03852) uses for the trace of the Hessian. So a few runs measure all matrices, instead of one
    run each. The cost of other bits is extrapolated from the squared error of the weights.

    Args:
        checkpoint: A model in 16 bits.
        plan: The matrices and their mode and group size.
        windows: Tokens, int `[N, T]`.
        progress: Called as `progress(phase, done, total)`: matrices that were rounded, then runs.

    Raises:
        CheckpointError: The model doesn't fit in memory with its rounding errors, or has no gradients.
    """
    needed = 8 * parameter_count(checkpoint)
    if needed > 0.6 * platform.total_memory():
        raise CheckpointError(
            f"the search for bits keeps the whole model in memory, which takes {needed / 1e9:.1f} GB",
            "a recipe, or the same bits for all matrices: both keep one layer in memory",
        )
    model, _ = load_checkpoint(checkpoint)
    if isinstance(checkpoint, ModuleCheckpoint):
        model.train()  # recurrent layers have kernels without a gradient for inference
    squared, rounding = {}, {}
    for done, matrix in enumerate(plan.matrices, start=1):
        if (base := plan.format_of(matrix)) is not None and not matrix.fixed:
            squared[matrix.name], rounding[matrix.name] = _rounding_errors(model, matrix, base)
        progress("rounding each matrix", done, len(plan.matrices))
    probe = _Probe(model, {m.name: m.modules for m in plan.matrices if m.name in rounding}, rounding)
    rng, length = np.random.default_rng(0), min(PROBE_TOKENS, windows.shape[1])
    starts = np.linspace(0, windows.size - length, NUM_PROBES).astype(int)
    costs = np.empty((NUM_PROBES, len(rounding)))
    for done, (row, start) in enumerate(zip(costs, starts, strict=True), start=1):
        scales = rng.choice([-PROBE_SCALE, PROBE_SCALE], len(rounding))
        try:
            row[:] = probe.gradient(windows.reshape(-1)[None, start : start + length], scales) / (2 * scales)
        except (RuntimeError, ValueError) as error:  # an operation without a gradient
            hint = "a recipe, or the same bits for all matrices"
            raise CheckpointError(f"the search for bits needs the gradients of the model: {error}", hint) from None
        progress("measuring what rounding costs", done, NUM_PROBES)
    # Other matrices' errors make a mean uncertain; a cost below its standard error would be a guess.
    cost = np.maximum(costs.mean(axis=0), costs.std(axis=0) / NUM_PROBES**0.5)
    found: dict[str, dict[Format, float]] = {}
    for (name, errors), value in zip(squared.items(), cost, strict=True):
        measured = next(error for chosen, error in errors.items() if chosen.bits == PROBE_BITS)
        scale = max(value, _MIN_COST) / measured if measured else 1.0  # 0: exact in few bits
        found[name] = {chosen: float(scale * error) for chosen, error in errors.items()}
    return found


def _rounding_errors(model: nn.Module, matrix: Matrix, base: Format) -> tuple[dict[Format, float], list[mx.array]]:
    """The squared rounding error in each format, and the rounding errors of each module in PROBE_BITS."""
    squared: dict[Format, float] = {}
    weights = [get_submodule(model, name).weight for name in matrix.modules]
    for bits in BITS:
        chosen = replace(base, bits=bits)
        errors = [dequantized(quantize_rtn(weight, chosen), chosen) - weight for weight in weights]
        squared[chosen] = sum(mx.square(error).sum().item() for error in errors)
        if bits == PROBE_BITS:
            rounding = [error.astype(weight.dtype) for error, weight in zip(errors, weights, strict=True)]
            mx.eval(rounding)
    return squared, rounding


class _Probe:
    """Runs a model with scaled rounding errors."""

    def __init__(
        self, model: nn.Module, modules: Mapping[str, tuple[str, ...]], rounding: Mapping[str, list[mx.array]]
    ):
        self._model = model
        self._scales: mx.array | None = None
        for index, (name, errors) in enumerate(rounding.items()):
            for module, error in zip(modules[name], errors, strict=True):
                self._perturb(get_submodule(model, module), error, index)

    def _perturb(self, layer: nn.Module, error: mx.array, index: int) -> None:
        """Add a rounding error, scaled by `scales[index]`, to the weight of a layer.

        It is a layer of its own, so that no array of the weight's size is made.
        """
        error_layer = copy(layer)
        error_layer.weight = error
        error_layer.pop("bias", None)

        def call(method: str, original: Callable[..., mx.array], *args: Any, **kwargs: Any) -> mx.array:
            output = original(*args, **kwargs)
            if self._scales is None:
                return output
            change = getattr(error_layer, method)(*args, **kwargs)
            return output + self._scales[index].astype(output.dtype) * change

        for method in ("__call__", "as_linear"):  # embeddings have both
            if hasattr(layer, method):
                intercept(layer, method, partial(call, method))

    def gradient(self, tokens: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """The gradient of KL(source || model), nats per token, with respect to the scale of each matrix's error."""
        ids = mx.array(tokens)
        source = mx.softmax(self._logits(ids, None), axis=-1)
        mx.eval(source)

        def cross_entropy(scales: mx.array) -> mx.array:
            logits = self._logits(ids, scales)
            return (mx.logsumexp(logits, axis=-1) - (source * logits).sum(axis=-1)).sum()

        # A sum: the gradient of a mean would underflow in float16.
        return np.array(mx.grad(cross_entropy)(mx.array(scales, mx.float32)), np.float64) / tokens.size

    def _logits(self, ids: mx.array, scales: mx.array | None) -> mx.array:
        self._scales = scales
        return self._model(ids).astype(mx.float32)


def upgrade_path(plan: QuantizationPlan, sensitivities: Sensitivities) -> tuple[QuantizationPlan, list[BitUpgrade]]:
    """The smallest plan, and the upgrades from it in the order of the KL divergence saved per byte.

    Only formats on the lower convex hull of a matrix's cost over bytes are used. The upgrades of a matrix then save
    less and less per byte, so that sorting all upgrades keeps the order within each matrix: the solution that Lagrange
    multipliers give.
    """
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
        for before, after in zip(hull, hull[1:], strict=False):
            path.append(BitUpgrade(matrix, after[2], after[0] - before[0], before[1] - after[1]))
    path.sort(key=lambda step: -step.saved / step.nbytes)
    return smallest_plan(plan), path


def smallest_plan(plan: QuantizationPlan) -> QuantizationPlan:
    """The plan with the fewest bits."""
    formats = ((matrix.name, plan.format_of(matrix)) for matrix in plan.matrices if not matrix.fixed)
    return plan.with_formats({name: replace(base, bits=BITS[0]) for name, base in formats if base is not None})


def fit_to_size(plan: QuantizationPlan, sensitivities: Sensitivities, nbytes: int) -> QuantizationPlan:
    """The plan with the lowest cost whose matrices take at most `nbytes`, found greedily.

    An upgrade that doesn't fit is skipped, and the room goes to later ones.
    """
    smallest, path = upgrade_path(plan, sensitivities)
    room = nbytes - smallest.nbytes()
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


def search_bits(job: Job, plan: QuantizationPlan, scratch: Path) -> tuple[QuantizationPlan, QuantizedTensors]:
    """Search for the bits of each matrix, and quantize.

    Raises:
        ConfigError: The target can't be reached; the hint is the nearest one that can.
    """
    source, settings = job.source, job.settings
    _check_reachable(source, smallest_plan(plan), settings)  # before minutes of measurements
    windows = job.texts.calibration_windows
    sensitivities = estimate_sensitivities(source.checkpoint_16bit, plan, windows, job.progress)
    if settings.max_kl is not None:
        return _search_kl(job, plan, sensitivities, settings.max_kl, scratch)
    if settings.target_bpw is not None:
        limit = _bytes_of_matrices(source, plan, settings.target_bpw)
        plan = fit_to_size(plan, sensitivities, limit)
    elif settings.max_size is not None:
        plan = _plan_for_size(source, plan, sensitivities, settings.max_size)
    return plan, quantize_tensors(job, plan, scratch)


def _check_reachable(source: Source, smallest: QuantizationPlan, settings: QuantizationSettings) -> None:
    """Raise ConfigError if the sizes alone show that a target can't be reached."""
    if (target := settings.target_bpw) is not None and _bytes_of_matrices(source, smallest, target) < smallest.nbytes():
        lowest = math.ceil(800 * (smallest.nbytes() + _other_tensor_bytes(source, smallest)) / source.parameters) / 100
        raise ConfigError(f"{target:g} bits per weight can't be reached", f"{lowest} or more, or larger groups")
    if settings.max_size is not None:
        least = smallest.nbytes() + _other_bytes(source, smallest)
        if settings.max_size < least:
            raise ConfigError(f"{settings.max_size} bytes can't be reached", f"{least} or more, or larger groups")


def _search_kl(
    job: Job, plan: QuantizationPlan, sensitivities: Sensitivities, max_kl: float, scratch: Path
) -> tuple[QuantizationPlan, QuantizedTensors]:
    """Quantize candidates until the smallest that keeps the bound is known; files of the others are removed."""
    results: dict[int, QuantizedTensors] = {}  # by the bytes of the plan, which no two candidates share

    def measure(candidate: QuantizationPlan) -> float:
        label = f", candidate {len(results) + 1}"
        folder = Path(tempfile.mkdtemp(dir=scratch))
        result = results[candidate.nbytes()] = quantize_tensors(job, candidate, folder, label)
        quantized = job.source.with_tensors(candidate, result.tensors)
        kl = compare_with_source(job.source.checkpoint, quantized, job.texts.evaluation, job.progress, label).kl
        # Each candidate within the bound is smaller than the one before.
        for other in list(scratch.iterdir()):
            if (other == folder) != (kl <= max_kl):
                shutil.rmtree(other)
        return kl

    plan = fit_to_kl(plan, sensitivities, max_kl, measure)
    return plan, results[plan.nbytes()]


def _bytes_of_matrices(source: Source, plan: QuantizationPlan, target_bpw: float) -> int:
    """Bytes that an average of bits per weight leaves for the matrices of the plan."""
    return math.floor(target_bpw * source.parameters / 8) - _other_tensor_bytes(source, plan)


def _plan_for_size(
    source: Source, plan: QuantizationPlan, sensitivities: Sensitivities, max_size: int
) -> QuantizationPlan:
    smallest = smallest_plan(plan)
    rest = _other_bytes(source, smallest)
    for _ in range(3):  # the size of the metadata depends on the plan, a little
        larger = fit_to_size(plan, sensitivities, max(smallest.nbytes(), max_size - rest))
        rest = _other_bytes(source, larger)
        if larger.nbytes() + rest <= max_size:
            return larger
    return smallest


def _other_bytes(source: Source, plan: QuantizationPlan) -> int:
    """Bytes of all files without the matrices of the plan."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tokenizer(source.checkpoint, Path(folder))
        tokenizer = sum(file.stat().st_size for file in Path(folder).iterdir())
    return _other_tensor_bytes(source, plan) + tokenizer + _metadata_bytes(source, plan)


def _other_tensor_bytes(source: Source, plan: QuantizationPlan) -> int:
    """Bytes of the tensors that aren't matrices of the plan."""
    matrices = {f"{module}.weight" for matrix in plan.matrices for module in matrix.modules}
    return sum(t.nbytes for name, t in source.checkpoint_16bit.tensors.items() if name not in matrices)


def _metadata_bytes(source: Source, plan: QuantizationPlan) -> int:
    """An upper bound of the folder's bytes without the values of tensors and the tokenizer: headers, index, config."""
    quantized = source.with_tensors(plan, lazy_quantize(source.checkpoint_16bit.tensors, plan))
    stored = file_tensors(quantized)
    total = sum(tensor.nbytes for tensor in stored.values())
    header = sum(
        len(json.dumps({name: {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [total, total]}}))
        for name, tensor in stored.items()
    )
    index = sum(len(name) + 60 for name in stored) if total > SHARD_BYTES else 0
    values = json.dumps(config_values(quantized), indent=2, default=str)
    return header + index + len(values.encode("utf-8")) + _MARGIN

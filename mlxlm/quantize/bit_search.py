"""Bits per matrix for a target: bytes of the files, bits per weight, or a KL divergence."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mlxlm.checkpoint.huggingface import config_values, copy_tokenizer, file_tensors
from mlxlm.checkpoint.safetensors import SHARD_BYTES
from mlxlm.config.quantization import BITS, GROUP_SIZES, Format
from mlxlm.quantize.methods import Job, QuantizedTensors, quantize_tensors
from mlxlm.quantize.quantization_plan import Matrix, QuantizationPlan
from mlxlm.quantize.report import compare_with_source
from mlxlm.quantize.rtn import lazy_quantize
from mlxlm.quantize.sensitivity import Sensitivities, estimate_sensitivities
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.utils.errors import ConfigError

_NUM_SIZES = 128  # candidates for a bound on the KL divergence
_MAX_MEASUREMENTS = 6  # of whole models, to find the smallest one within the bound
_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding


@dataclass(frozen=True)
class BitUpgrade:
    """A better format for one matrix, the bytes that it costs and the KL divergence that it saves."""

    matrix: Matrix
    chosen: Format
    nbytes: int
    saved: float


def candidate_formats(plan: QuantizationPlan, group_size: int | None) -> dict[Matrix, list[Format]]:
    """The formats that a search chooses from, by matrix: all bits, and all group sizes unless `group_size` is given."""
    found: dict[Matrix, list[Format]] = {}
    for matrix in plan.matrices:
        if (base := plan.format_of(matrix)) is None or matrix.fixed:
            continue
        sizes = [size for size in GROUP_SIZES if matrix.width % size == 0] if group_size is None else [base.group_size]
        found[matrix] = [replace(base, bits=bits, group_size=size) for bits in BITS for size in sizes]
    return found


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
    return smallest_plan(plan, sensitivities), path


def smallest_plan(plan: QuantizationPlan, formats: Mapping[str, Iterable[Format]]) -> QuantizationPlan:
    """The smallest plan with these formats, by matrix name."""
    by_name = {matrix.name: matrix for matrix in plan.matrices}
    return plan.with_formats({name: min(choices, key=by_name[name].nbytes) for name, choices in formats.items()})


def fit_to_size(plan: QuantizationPlan, sensitivities: Sensitivities, nbytes: int) -> QuantizationPlan:
    """The plan with the lowest cost whose matrices take at most `nbytes`, found greedily."""
    return _upgrade(*upgrade_path(plan, sensitivities), nbytes)


def _upgrade(smallest: QuantizationPlan, path: Iterable[BitUpgrade], nbytes: int) -> QuantizationPlan:
    """Upgrade the smallest plan. An upgrade that doesn't fit is skipped, and the room goes to later ones."""
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
    plans = {p.nbytes(): p for p in (_upgrade(smallest, path, size) for size in sizes)}
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
    formats = candidate_formats(plan, settings.group_size)
    smallest = smallest_plan(plan, {matrix.name: choices for matrix, choices in formats.items()})
    _check_reachable(source, smallest, settings)  # before minutes of measurements
    progress = partial(job.progress, "measuring what rounding costs")
    windows = job.texts.calibration_windows
    compensated = settings.method == "gptq"
    sensitivities = estimate_sensitivities(source.checkpoint_16bit, formats, windows, progress, compensated=compensated)
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
    smallest, path = upgrade_path(plan, sensitivities)
    rest = _other_bytes(source, smallest)
    for _ in range(3):  # the size of the metadata depends on the plan, a little
        larger = _upgrade(smallest, path, max(smallest.nbytes(), max_size - rest))
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

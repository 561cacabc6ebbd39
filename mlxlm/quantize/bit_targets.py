"""Choose the bits of each matrix for a target: bytes of the files, bits per weight, or a KL divergence."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.safetensors import SHARD_BYTES
from mlxlm.checkpoint.tokenizer_files import copy_tokenizer
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.families import config_to_hf, weight_mappings
from mlxlm.quantize import bit_search
from mlxlm.quantize.evaluation import compare_with_source
from mlxlm.quantize.lazy_quantize import lazy_quantize
from mlxlm.quantize.methods import Job, QuantizedTensors, quantize_tensors
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.utils.errors import ConfigError

_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding


def search_bits(job: Job, plan: QuantizationPlan, scratch: Path) -> tuple[QuantizationPlan, QuantizedTensors]:
    """Search for the bits of each matrix, and quantize.

    Raises:
        ConfigError: The target can't be reached; the hint is the nearest one that can.
    """
    source, settings = job.source, job.settings
    _check_reachable(source, bit_search.smallest_plan(plan), settings)  # before minutes of measurements
    windows = job.texts.calibration_windows
    sensitivities = bit_search.sensitivities(source.checkpoint_16bit, plan, windows, job.progress)
    if settings.max_kl is not None:
        return _search_kl(job, plan, sensitivities, settings.max_kl, scratch)
    if settings.target_bpw is not None:
        limit = _bytes_of_matrices(source, plan, settings.target_bpw)
        plan = bit_search.fit_to_size(plan, sensitivities, limit)
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
    job: Job, plan: QuantizationPlan, sensitivities: bit_search.Sensitivities, max_kl: float, scratch: Path
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

    plan = bit_search.fit_to_kl(plan, sensitivities, max_kl, measure)
    return plan, results[plan.nbytes()]


def _bytes_of_matrices(source: Source, plan: QuantizationPlan, target_bpw: float) -> int:
    """Bytes that an average of bits per weight leaves for the matrices of the plan."""
    return math.floor(target_bpw * source.parameters / 8) - _other_tensor_bytes(source, plan)


def _plan_for_size(
    source: Source, plan: QuantizationPlan, sensitivities: bit_search.Sensitivities, max_size: int
) -> QuantizationPlan:
    smallest = bit_search.smallest_plan(plan)
    rest = _other_bytes(source, smallest)
    for _ in range(3):  # the size of the metadata depends on the plan, a little
        larger = bit_search.fit_to_size(plan, sensitivities, max(smallest.nbytes(), max_size - rest))
        rest = _other_bytes(source, larger)
        if larger.nbytes() + rest <= max_size:
            return larger
    return smallest


def _other_bytes(source: Source, plan: QuantizationPlan) -> int:
    """Bytes of all files without the matrices of the plan."""
    tokenizer = _tokenizer_bytes(source.checkpoint)
    return _other_tensor_bytes(source, plan) + tokenizer + _metadata_bytes(source, plan)


def _other_tensor_bytes(source: Source, plan: QuantizationPlan) -> int:
    """Bytes of the tensors that aren't matrices of the plan."""
    matrices = {f"{module}.weight" for matrix in plan.matrices for module in matrix.modules}
    return sum(t.nbytes for name, t in source.checkpoint_16bit.tensors.items() if name not in matrices)


def _metadata_bytes(source: Source, plan: QuantizationPlan) -> int:
    """An upper bound of the folder's bytes besides the values of tensors and the tokenizer: headers, index, config."""
    config = source.checkpoint.config.with_changes(quantization=plan.quantization_config())
    tensors = lazy_quantize(source.checkpoint_16bit.tensors, plan)
    stored = to_file_weights(weight_mappings(config, for_mlx=True), tensors)
    total = sum(tensor.nbytes for tensor in stored.values())
    header = sum(
        len(json.dumps({name: {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [total, total]}}))
        for name, tensor in stored.items()
    )
    index = sum(len(name) + 60 for name in stored) if total > SHARD_BYTES else 0
    values = json.dumps({**source.checkpoint.hf_config, **config_to_hf(config)}, indent=2, default=str)
    return header + index + len(values.encode("utf-8")) + _MARGIN


def _tokenizer_bytes(checkpoint: Checkpoint) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy_tokenizer(checkpoint, Path(folder))
        return sum(file.stat().st_size for file in Path(folder).iterdir())

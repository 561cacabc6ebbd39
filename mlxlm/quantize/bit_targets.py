"""Choose the bits of each matrix for a target: bytes of the files, bits per weight, or a KL divergence."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from pathlib import Path

from mlxlm.checkpoint import huggingface
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.tokenizer_files import copy_tokenizer
from mlxlm.checkpoint.weight_mapping import to_file_weights
from mlxlm.convert.verify import Progress
from mlxlm.families import config_to_hf, weight_mappings
from mlxlm.quantize import bit_search
from mlxlm.quantize.evaluation import compare_with_source
from mlxlm.quantize.lazy_quantize import lazy_quantize
from mlxlm.quantize.methods import QuantizedTensors, progress_counter, quantize_tensors
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.quantize.text import Texts
from mlxlm.utils.errors import ConfigError

_MARGIN = 1024  # bytes: generation_config.json, names in config.json, padding


def search_bits(
    source: Source,
    plan: QuantizationPlan,
    settings: QuantizationSettings,
    texts: Texts,
    scratch: Path,
    progress: Progress,
) -> tuple[QuantizationPlan, QuantizedTensors]:
    """Search for the bits of each matrix, and quantize.

    Raises:
        ConfigError: The target can't be reached; the hint is the nearest one that can.
    """
    counter = progress_counter(progress, "measuring each matrix", sum(f is not None for f in plan.matrix_formats()))
    sensitivities = bit_search.sensitivities(source.checkpoint_16bit, plan, texts.calibration_windows, counter)
    if settings.max_kl is not None:
        return _search_kl(source, plan, sensitivities, settings, texts, scratch, progress)
    if settings.target_bpw is not None:
        plan = _plan_for_bpw(source, plan, sensitivities, settings.target_bpw)
    else:
        plan = _plan_for_size(source, plan, sensitivities, settings.max_size)
    return plan, quantize_tensors(source, plan, settings.method, texts, scratch, progress)


def _search_kl(
    source: Source,
    plan: QuantizationPlan,
    sensitivities: bit_search.Sensitivities,
    settings: QuantizationSettings,
    texts: Texts,
    scratch: Path,
    progress: Progress,
) -> tuple[QuantizationPlan, QuantizedTensors]:
    """Quantize candidates until the smallest that keeps the bound is known; files of the others are removed."""
    best: tuple[QuantizedTensors, Path] | None = None
    count = 0

    def measure(candidate: QuantizationPlan) -> float:
        nonlocal best, count
        count += 1
        label = f", candidate {count}"
        folder = Path(tempfile.mkdtemp(dir=scratch))
        result = quantize_tensors(source, candidate, settings.method, texts, folder, progress, label)
        quantized = source.with_tensors(candidate, result.tensors)
        kl = compare_with_source(source.checkpoint, quantized, texts.evaluation, progress, label).kl
        unused: Path | None = folder
        if kl <= settings.max_kl:  # each such candidate is smaller than the one before
            best, unused = (result, folder), best and best[1]
        if unused is not None:
            shutil.rmtree(unused)
        return kl

    plan = bit_search.fit_to_kl(plan, sensitivities, settings.max_kl, measure)
    return plan, best[0]


def _plan_for_bpw(
    source: Source, plan: QuantizationPlan, sensitivities: bit_search.Sensitivities, target: float
) -> QuantizationPlan:
    others = _other_tensor_bytes(source, plan)
    smallest = bit_search.upgrade_path(plan, sensitivities)[0].nbytes()
    limit = math.floor(target * source.parameters / 8) - others
    if limit < smallest:
        lowest = math.ceil(800 * (smallest + others) / source.parameters) / 100
        raise ConfigError(f"{target:g} bits per weight can't be reached", f"{lowest} or more, or larger groups")
    return bit_search.fit_to_size(plan, sensitivities, limit)


def _plan_for_size(
    source: Source, plan: QuantizationPlan, sensitivities: bit_search.Sensitivities, max_size: int
) -> QuantizationPlan:
    smallest = bit_search.upgrade_path(plan, sensitivities)[0]
    fixed = _other_tensor_bytes(source, plan) + _tokenizer_bytes(source.checkpoint)
    rest = fixed + _metadata_bytes(source, smallest)
    if max_size < smallest.nbytes() + rest:
        raise ConfigError(f"{max_size} bytes can't be reached", f"{smallest.nbytes() + rest} or more, or larger groups")
    for _ in range(3):  # the size of the metadata depends on the plan, a little
        larger = bit_search.fit_to_size(plan, sensitivities, max(smallest.nbytes(), max_size - rest))
        rest = fixed + _metadata_bytes(source, larger)
        if larger.nbytes() + rest <= max_size:
            return larger
    return smallest


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
    index = sum(len(name) + 60 for name in stored) if total > huggingface.SHARD_BYTES else 0
    values = json.dumps({**source.checkpoint.hf_config, **config_to_hf(config)}, indent=2, default=str)
    return header + index + len(values.encode("utf-8")) + _MARGIN


def _tokenizer_bytes(checkpoint: Checkpoint) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy_tokenizer(checkpoint, Path(folder))
        return sum(file.stat().st_size for file in Path(folder).iterdir())

"""Quantize a checkpoint: open it, plan the bits, calibrate, write, verify, evaluate, report."""

from __future__ import annotations

import shutil
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, limit_buffer_cache, mx
from mlxlm.checkpoint.huggingface import copy_tokenizer, write_checkpoint
from mlxlm.checkpoint.lazy_tensor import UNQUANTIZED_DTYPES, LazyTensors, bits_of, with_read_progress
from mlxlm.checkpoint.locations import QUANTIZATION_PLOT, QUANTIZATION_REPORT
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.config.option import non_default_fields
from mlxlm.config.quantization import GROUP_SIZES
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.convert.conversion import check_folder_name, folder_name
from mlxlm.convert.metadata import Check, check_metadata
from mlxlm.convert.model_card import CARD, model_card
from mlxlm.convert.verify import Progress
from mlxlm.families import weight_mappings
from mlxlm.quantize.bit_search import search_bits
from mlxlm.quantize.calibration_text import EvalText, read_texts
from mlxlm.quantize.methods import Job, QuantizedTensors, quantize_tensors
from mlxlm.quantize.quantization_plan import QuantizationPlan, matrices, recipe, uniform
from mlxlm.quantize.recover import check_recovery, recover
from mlxlm.quantize.report import QuantizationReport, evaluate, plot_quantization
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source, open_source
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import atomic_new_folder, check_not_exists
from mlxlm.utils.json_files import write_json

_SCRATCH = ".scratch"
_FEW_TOKENS = 256  # a mean over fewer tokens says little


def quantize(
    source: Path | str,
    out: Path | str,
    settings: QuantizationSettings | None = None,
    *,
    adapter: Path | str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> QuantizationReport:
    """Quantize a checkpoint for mlxlm and mlx_lm.

    Tensors stream from disk to disk. Rounding holds one matrix in memory; calibration holds one block or table in
    float32, the second moments of its inputs, and the hidden states of the calibration text. The report is also written
    to the folder, as JSON, as a plot and in a model card. If anything fails, `out` is not created.

    Args:
        source: Whatever `open_checkpoint` opens. A quantized model is dequantized first, with a warning.
        out: New folder.
        settings: How to quantize.
        adapter: Folder or hub id of an adapter that is merged into the weights.
        progress: Called as `progress(phase, done, total)`.
        **options: Fields of QuantizationSettings that replace those of `settings`: `bits=4, method="gptq"`.

    Raises:
        ArgumentError: Settings contradict each other, one has no effect, or the model's layers can't be calibrated.
        CheckpointError: `out` exists, or the weights can't be quantized.
        ConfigError: A value can't work, or a target can't be reached; the hint is the nearest one that can.
        DataError: A text is too short.
    """
    started = time.monotonic()
    settings = replace(settings or QuantizationSettings(), **options)
    settings.check()
    progress = progress or (lambda phase, done, total: None)
    out = Path(out)
    gguf = out.suffix.lower() == ".gguf"
    hint = f"mlxlm convert SOURCE --out {out} --dtype q4_k_m" if gguf else f"{folder_name(out)}, for a folder"
    check_folder_name(out, "quantize", hint)
    check_not_exists(out, CheckpointError, "another name for the output")
    model = open_source(source, adapter)
    if settings.needs_eval_text and isinstance(model.checkpoint, ModuleCheckpoint):
        _check_memory(model)
    plan = _initial_plan(model, settings)
    texts = read_texts(model.checkpoint, settings)
    if settings.recover:
        check_recovery(model, texts)
    job = Job(model, settings, texts, progress)
    with limit_buffer_cache(), atomic_new_folder(out) as folder:
        scratch = folder / _SCRATCH
        scratch.mkdir()
        if settings.searches_bits:
            plan, quantized = search_bits(job, plan, scratch)
        else:
            quantized = quantize_tensors(job, plan, scratch)
        before_recovery = None
        if settings.recover:
            unrecovered = model.with_tensors(plan, quantized.tensors)
            if settings.evaluate:
                before_recovery = evaluate(model.checkpoint, unrecovered, texts.evaluation, progress)
            quantized = recover(job, plan, quantized)
        checksums: dict[str, int] = {}
        warnings = _write(folder, model, plan, quantized, checksums if settings.verify else None, progress)
        shutil.rmtree(scratch)
        written = open_module_checkpoint(folder)
        checks = verify(model.checkpoint, written, str(out), checksums, progress) if settings.verify else []
        metrics = evaluate(model.checkpoint, written, texts.evaluation, progress) if settings.evaluate else None
        source_bytes, nbytes = (sum(t.nbytes for t in c.tensors.values()) for c in (model.checkpoint, written))
        report = QuantizationReport(
            source=str(source),
            path=str(out),
            method=settings.method,
            settings=_changed(settings) | ({} if adapter is None else {"adapter": str(adapter)}),
            dtype=str(model.dtype).removeprefix("mlx.core."),
            parameters=model.parameters,
            source_bytes=source_bytes,
            bytes=sum(file.stat().st_size for file in folder.iterdir() if file.is_file()),
            source_bits_per_weight=8 * source_bytes / model.parameters,
            bits_per_weight=8 * nbytes / model.parameters,
            formats=plan.to_dict(),
            reduced_group_sizes=dict(plan.reduced_group_sizes),
            skipped=dict(plan.skipped),
            bits={module: fmt.bits for module, fmt in plan.formats.items() if fmt is not None},
            errors=quantized.errors,
            rounded_experts=quantized.rounded_experts,
            error_of="weights" if settings.method == "rtn" else "outputs",
            calibration_text=texts.calibration.name or None,
            metrics=metrics,
            metrics_before_recovery=before_recovery,
            seconds=time.monotonic() - started,
            checks=checks,
            warnings=[*_warnings(dequantized_tensors(model.checkpoint), texts.evaluation), *warnings],
        )
        write_json(folder / QUANTIZATION_REPORT, report.to_dict())
        plot_quantization(report, folder / QUANTIZATION_PLOT)
        (folder / CARD).write_text(model_card(folder, out.name), encoding="utf-8")
    return report


def _changed(settings: QuantizationSettings) -> dict[str, Any]:
    """The settings that aren't the defaults, as JSON values."""
    changed = non_default_fields(settings, QuantizationSettings())
    return {name: str(value) if isinstance(value, Path) else value for name, value in changed.items()}


def _check_memory(source: Source) -> None:
    """Raise CheckpointError if a model that runs only as a whole can't be compared with its source."""
    nbytes = sum(tensor.nbytes for tensor in source.checkpoint.tensors.values())
    needed = 8 * source.parameters if ON_CPU else 2 * nbytes  # at most
    if needed > 0.6 * platform.total_memory():
        problem = f"the evaluation needs {needed / 1e9:.3g} GB of memory for the two models"
        raise CheckpointError(problem, "no evaluation (--no-evaluate)")


def _initial_plan(source: Source, settings: QuantizationSettings) -> QuantizationPlan:
    """The plan of a recipe, or one format for all matrices, which a search starts from.

    Raises:
        CheckpointError: No group size divides the width of any matrix.
    """
    found = matrices(source.checkpoint_16bit)
    if settings.recipe is not None:
        plan = recipe(found, settings.recipe, settings.format.group_size)
    else:
        plan = uniform(found, settings.format)
    if not any(plan.formats.values()):
        widths = ", ".join(map(str, sorted(set(plan.skipped.values()))))
        sizes = ", ".join(map(str, GROUP_SIZES if settings.format.affine else [settings.format.group_size]))
        raise CheckpointError(f"no matrix can be quantized: widths are {widths}, group sizes {sizes}")
    return plan


def _write(
    folder: Path,
    source: Source,
    plan: QuantizationPlan,
    quantized: QuantizedTensors,
    checksums: dict[str, int] | None,
    progress: Progress,
) -> list[str]:
    """Write the model's files, and the checksum of each tensor to `checksums`; returns warnings."""
    tensors: LazyTensors = with_read_progress(quantized.tensors, partial(progress, "writing"))
    if checksums is not None:
        config = source.checkpoint.config
        mappings = weight_mappings(config, for_mlx=True) if isinstance(config, ModelConfig) else []
        offsets = {f"{m.modules[0]}.weight": m.offset for m in mappings if m.offset}

        def record(name: str, value: mx.array) -> mx.array:
            offset = offsets.get(name)  # the sum is what the file has, and what is read from it is rounded
            checksums[name] = checksum(value if offset is None else (value + offset) - offset)
            return value

        tensors = {name: tensor.transform(partial(record, name)) for name, tensor in tensors.items()}
    write_checkpoint(folder, source.with_tensors(plan, tensors))
    return copy_tokenizer(source.checkpoint, folder)


def _warnings(source_tensors: LazyTensors, text: EvalText) -> list[str]:
    """Reasons to read the report with care."""
    warnings = []
    types = sorted({t.stored_dtype for t in source_tensors.values()} - UNQUANTIZED_DTYPES)
    if types:
        names = " and ".join(types).replace("U32", "MLX")
        problem = f"the source is already quantized ({names}): the report shows only what is lost in addition"
        warnings.append(f"{problem} (try: its unquantized original; mlxlm convert keeps the weights as they are)")
    if text.documents and text.predicted < _FEW_TOKENS:
        warnings.append(f"evaluated on {text.predicted} tokens of {text.name}: fewer than {_FEW_TOKENS} say little")
    return warnings


def checksum(value: mx.array) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(bits_of(value).data)


def verify(
    source: WritableCheckpoint,
    written: WritableCheckpoint,
    label: str,
    checksums: Mapping[str, int],
    progress: Progress,
) -> list[Check]:
    """Compare a quantized folder with what was computed, and its tokenizer and configuration with the source's.

    Args:
        source: The source.
        written: The folder, opened again.
        label: Its name in errors.
        checksums: Tensor name -> `checksum` of the value that was written.
        progress: Called as `progress(phase, done, total)`.

    Raises:
        CheckpointError: Something differs.
    """
    for done, (name, tensor) in enumerate(written.tensors.items(), start=1):
        if checksum(tensor.read()) != checksums.get(name):
            raise CheckpointError(f"{label}: {name} is not what was written", "check the disk")
        progress("comparing tensors", done, len(written.tensors))
    unquantized = written.with_tensors(written.tensors)
    return [
        Check("tensors", "equal", f"{len(checksums)} tensors, bit for bit"),
        *check_metadata(source, unquantized, label),
    ]

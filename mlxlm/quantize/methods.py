"""Quantize all tensors of a model in one pass over its layers: rounded as they are read, or by a calibrated method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, lazy_tensor
from mlxlm.checkpoint.mlx_lm import WritableCheckpoint
from mlxlm.checkpoint.safetensors import file_tensors, write_file
from mlxlm.config.quantization import Format
from mlxlm.convert.verify import Progress
from mlxlm.quantize import calibrate
from mlxlm.quantize.awq import AWQ
from mlxlm.quantize.calibrate import CalibratedMethod, ExpertInputs, InputStatistics, InputStats, get_submodule
from mlxlm.quantize.calibration_text import QuantizationTexts
from mlxlm.quantize.gptq import GPTQ, output_error
from mlxlm.quantize.layers import layers_of
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.quantize.rtn import PackedMatrix, dequantized, lazy_quantize, quantize_rtn, weight_error
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.utils.errors import CheckpointError

# None rounds to nearest (rtn.py), which needs no calibration and streams.
METHODS: dict[str, type[CalibratedMethod] | None] = {"rtn": None, "gptq": GPTQ, "awq": AWQ}

_ROWS = 16_384  # of a matrix that are calibrated at once: embeddings have a quarter of a million
_TIED_SHARE = 4  # a tied embedding is calibrated as the head on every fourth window


@dataclass
class QuantizedTensors:
    """Quantized tensors.

    Attributes:
        tensors: The decoder's tensors. Those of calibrated methods are mostly in files of a scratch folder, which must
            stay until they have been read.
        errors: Module -> relative error: of its weights for rtn, filled while the tensors are read; else of its outputs
            on the calibration text, |ΔW X| / |W X|.
        rounded_experts: Module -> the number of its experts that were rounded to nearest, because they read too little
            of the calibration text.
    """

    tensors: dict[str, LazyTensor]
    errors: dict[str, float] = field(default_factory=dict)
    rounded_experts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What is quantized, and how.

    Attributes:
        source: The model.
        settings: How to quantize.
        texts: The texts that the settings need.
        progress: Called as `progress(phase, done, total)`.
    """

    source: Source
    settings: QuantizationSettings
    texts: QuantizationTexts
    progress: Progress


def quantize_tensors(job: Job, plan: QuantizationPlan, scratch: Path, label: str = "") -> QuantizedTensors:
    """Quantize all matrices of `plan`; `label` is appended to the names of phases."""
    source, method = job.source, METHODS[job.settings.method]
    if method is None:
        errors: dict[str, float] = {}
        return QuantizedTensors(_rounded(source.checkpoint_16bit.tensors, plan, errors), errors)
    windows = job.texts.calibration_windows
    progress = partial(job.progress, f"calibrating ({job.settings.method}){label}")
    return quantize_calibrated(source.checkpoint_16bit, plan, method(), windows, scratch, progress)


def quantize_calibrated(
    checkpoint: WritableCheckpoint,
    plan: QuantizationPlan,
    method: CalibratedMethod,
    windows: np.ndarray,
    scratch: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> QuantizedTensors:
    """Quantize with a calibrated method.

    The layers are calibrated on the quantized embedding. A tied embedding is calibrated as the head, which takes a run
    through the source first, and as a table with the same weight. Other tables have no inputs: their rows are
    quantized for equal errors of all columns. Memory: one layer or table in float32, the second moments of a layer's
    inputs and a few matrices of their size, and the hidden states of the windows.

    Args:
        checkpoint: A model in 16 bits.
        plan: The format of each matrix.
        method: The method, for this model only.
        windows: Calibration tokens, int `[N, T]`.
        scratch: An empty folder for the result.
        progress: Called as `progress(done, total)` after each layer.
    """
    quantizer = _LayerQuantizer(checkpoint, plan, method, scratch)
    source, tied_moments = layers_of(checkpoint), None
    tied = source.tied_table if plan.formats.get(source.tied_table or "") is not None else None
    done, total = itertools.count(1), len(source.names) * (1 if tied is None else 2)

    def report() -> None:
        progress(next(done), total)

    if tied is not None:
        tied_moments = calibrate.calibrate_layers(source, windows[::_TIED_SHARE], progress=report)[tied].moments
    embeddings = quantizer.quantize_tables(source.tables, tied, tied_moments)
    calibrated = layers_of(checkpoint.with_tensors({**checkpoint.tensors, **embeddings}))
    unquantized = source if method.runs_source else None
    head_inputs = calibrate.calibrate_layers(calibrated, windows, quantizer.quantize_layer, report, source=unquantized)
    for name, inputs in head_inputs.items():
        if name not in source.tables and plan.formats.get(name) is not None:
            quantizer.quantize_head(name, inputs)
    return quantizer.result()


def _rounded(tensors: LazyTensors, plan: QuantizationPlan, errors: dict[str, float]) -> dict[str, LazyTensor]:
    """Round the matrices of `plan` to nearest when they are read; adds the error of each to `errors` then."""

    def on_matrix(module: str, weight: mx.array, packed: PackedMatrix, fmt: Format) -> None:
        errors[module] = weight_error(weight, packed, fmt)

    return lazy_quantize(tensors, plan, on_matrix)


class _LayerQuantizer:
    """Quantizes embeddings, layers and head one after the other, and keeps the results in files of `scratch`."""

    def __init__(self, checkpoint: WritableCheckpoint, plan: QuantizationPlan, method: CalibratedMethod, scratch: Path):
        self._checkpoint, self._plan, self._method, self._scratch = checkpoint, plan, method, scratch
        self._stored: dict[str, LazyTensor] = {}
        self._errors: dict[str, float] = {}
        self._rounded_experts: dict[str, int] = {}

    def quantize_tables(
        self, tables: Sequence[str], tied: str | None, tied_moments: np.ndarray | None
    ) -> dict[str, LazyTensor]:
        """Quantize the embeddings; returns them dequantized, by tensor name. `tied_moments`: inputs of a tied head."""
        embeddings: dict[str, LazyTensor] = {}
        for module in tables:
            if (fmt := self._plan.formats.get(module)) is None:
                continue
            tensor = self._checkpoint.tensors[f"{module}.weight"]
            moments: np.ndarray = np.eye(tensor.shape[1], dtype=np.float32)
            measured = None
            if module == tied and tied_moments is not None:
                moments = moments + tied_moments / max(float(np.mean(np.diag(tied_moments))), 1e-30)
                measured = InputStats(tied_moments)
            packed = self._quantize(module, tensor.read(), fmt, InputStats(moments), measured)
            stored = self._save(module, packed.parts(module))
            embeddings |= dequantize_tensors(stored, self._plan.quantization_config())
        return embeddings

    def quantize_head(self, name: str, inputs: InputStats) -> None:
        """Quantize an untied head, or another matrix outside the layers."""
        weight, fmt = self._checkpoint.tensors[f"{name}.weight"].read(), self._plan.formats[name]
        assert fmt is not None
        self._save(name, self._quantize(name, weight, fmt, inputs).parts(name))

    def quantize_layer(
        self, name: str, block: nn.Module, run: Callable[[], mx.array], source_inputs: Mapping[str, mx.array]
    ) -> mx.array:
        """Quantize the matrices of a layer while it runs, each one when it is called; see `calibrate.OnLayer`.

        So a matrix is calibrated on what those before it give once they are quantized, in the same layer, too.
        """
        prefix, tensors = f"{name}.", self._checkpoint.tensors
        formats = {m.removeprefix(prefix): fmt for m, fmt in self._plan.formats.items() if m.startswith(prefix)}
        results: dict[str, mx.array] = {}
        if formats:
            dtype = tensors[f"{prefix}{next(iter(formats))}.weight"].dtype
            for changed in sorted(self._method.change_block(block, run, formats, dtype)):
                for parameter, value in tree_flatten(get_submodule(block, changed).parameters()):
                    key = f"{name}.{changed}.{parameter}"
                    results[key] = value.astype(tensors[key].dtype)
        left = {layer_name: fmt for layer_name, fmt in formats.items() if fmt is not None}
        statistics = InputStatistics()

        def quantize(layer_name: str, inputs: InputStats | ExpertInputs | None) -> None:
            module, layer, fmt = f"{name}.{layer_name}", get_submodule(block, layer_name), left.pop(layer_name)
            weight = layer.weight.astype(tensors[f"{module}.weight"].dtype)
            packed = self._quantize(module, weight, fmt, inputs)
            layer.weight = dequantized(packed, fmt).astype(layer.weight.dtype)
            results.update(packed.parts(module))

        def call(
            layer_name: str, layer: nn.Module, original: Callable[..., mx.array], *inputs: Any, **options: Any
        ) -> mx.array:
            if layer_name in left:
                transposed, source = not options.get("transpose", True), source_inputs.get(layer_name)
                quantize(layer_name, statistics.of(layer, inputs, transposed, source))
            return original(*inputs, **options)

        with calibrate.intercepting(block, call):
            output = run()
            mx.eval(output)
        for layer_name in list(left):  # not called, on this text
            quantize(layer_name, None)
        if results:
            self._save(name, results)
        return output

    def result(self) -> QuantizedTensors:
        """All tensors in the source's order; matrices that weren't calibrated are rounded when they are read."""
        tensors = _rounded(self._checkpoint.tensors, self._plan, self._errors)
        stored = {name: self._stored.get(name, tensor) for name, tensor in tensors.items()}
        return QuantizedTensors(stored, self._errors, self._rounded_experts)

    def _quantize(
        self,
        module: str,
        weight: mx.array,
        fmt: Format,
        inputs: InputStats | ExpertInputs | None,
        measured: InputStats | None = None,
    ) -> PackedMatrix:
        """Quantize a matrix, and record its error, on inputs `measured` if given.

        What has no inputs is rounded to nearest: matrices of a kind that isn't calibrated, and experts that read less
        than `calibrate.MIN_EXPERT_TOKENS`.
        """
        if inputs is None:
            packed = quantize_rtn(weight, fmt)
            self._errors[module] = weight_error(weight, packed, fmt)
            return packed
        try:
            if isinstance(inputs, InputStats):
                packed, (change, size) = self._quantize_matrix(module, weight, fmt, inputs, measured or inputs)
            else:
                packed, (change, size) = self._quantize_experts(module, weight, fmt, inputs)
        except CheckpointError as error:
            raise error.prefixed(module) from None
        self._errors[module] = float(np.sqrt(max(0.0, change) / size)) if size > 0 else 0.0
        return packed

    def _quantize_matrix(
        self, module: str, weight: mx.array, fmt: Format, inputs: InputStats, measured: InputStats
    ) -> tuple[PackedMatrix, np.ndarray]:
        """Quantize a matrix `[rows, width]`, or `[heads, rows, width]`; returns the parts of its error, too."""
        rows = weight.flatten(0, -2)
        count = len(rows) if inputs.transposed else _ROWS
        parts = []
        for start in range(0, len(rows), count):
            piece = rows[start : start + count]
            packed = self._method.quantize(module, piece, fmt, inputs)
            parts.append((packed, output_error(piece, packed, fmt, measured)))
            mx.eval(packed)
            mx.clear_cache()
        packed, squared = _join(PackedMatrix.concatenate_rows, parts)
        return PackedMatrix(*(x if x is None else mx.unflatten(x, 0, weight.shape[:-1]) for x in packed)), squared

    def _quantize_experts(
        self, module: str, weight: mx.array, fmt: Format, inputs: ExpertInputs
    ) -> tuple[PackedMatrix, np.ndarray]:
        """Quantize matrices `[experts, rows, width]`; see `_quantize_matrix`."""
        parts = []
        for expert, rows in enumerate(weight):
            tokens, stats = inputs.of(expert)
            if tokens >= calibrate.MIN_EXPERT_TOKENS:
                parts.append(self._quantize_matrix(module, rows, fmt, stats, stats))
                continue
            packed = quantize_rtn(rows, fmt)
            parts.append((packed, output_error(rows, packed, fmt, stats) if tokens else np.zeros(2)))
            self._rounded_experts[module] = self._rounded_experts.get(module, 0) + 1
        return _join(PackedMatrix.stack, parts)

    def _save(self, name: str, arrays: dict[str, mx.array]) -> dict[str, LazyTensor]:
        file = self._scratch / f"{name}.safetensors"
        write_file(file, {name: lazy_tensor(value) for name, value in arrays.items()})
        stored = file_tensors(file)
        self._stored |= stored
        return stored


def _join(
    join: Callable[[Sequence[PackedMatrix]], PackedMatrix], parts: Sequence[tuple[PackedMatrix, np.ndarray]]
) -> tuple[PackedMatrix, np.ndarray]:
    """Join the parts of a matrix, and add up those of its error."""
    packed, squared = zip(*parts, strict=True)
    return join(packed), np.sum(squared, axis=0)

"""Quantize all tensors of a model in one pass over its layers: rounded as they are read, or by a calibrated method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
from mlxlm.quantize.calibrate import CalibratedMethod, ExpertInputs, InputStats, Matrices, get_submodule
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
        stats = calibrate.calibrate_layers(source, windows[::_TIED_SHARE], progress=report)[tied]
        tied_moments = stats.moments if isinstance(stats, InputStats) else None
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
            [packed] = self._quantize([(module, tensor.read(), fmt)], InputStats(moments), measured)
            stored = self._save(module, packed.parts(module))
            embeddings |= dequantize_tensors(stored, self._plan.quantization_config())
        return embeddings

    def quantize_head(self, name: str, inputs: InputStats | ExpertInputs) -> None:
        """Quantize an untied head, or another matrix outside the layers."""
        weight, fmt = self._checkpoint.tensors[f"{name}.weight"].read(), self._plan.formats[name]
        assert fmt is not None
        [packed] = self._quantize([(name, weight, fmt)], inputs)
        self._save(name, packed.parts(name))

    def quantize_layer(
        self,
        name: str,
        block: nn.Module,
        run: Callable[[], mx.array],
        inputs: Mapping[str, InputStats | ExpertInputs],
    ) -> None:
        """Quantize the matrices of a layer, and set its weights to the dequantized ones."""
        prefix, tensors = f"{name}.", self._checkpoint.tensors
        formats = {m.removeprefix(prefix): fmt for m, fmt in self._plan.formats.items() if m.startswith(prefix)}
        results: dict[str, mx.array] = {}
        if formats:
            dtype = tensors[f"{prefix}{next(iter(formats))}.weight"].dtype
            inputs, changed = self._method.change_block(block, run, inputs, formats, dtype)
            for layer in sorted(changed):
                for parameter, value in tree_flatten(get_submodule(block, layer).parameters()):
                    key = f"{name}.{layer}.{parameter}"
                    results[key] = value.astype(tensors[key].dtype)
        groups: dict[int, tuple[InputStats | ExpertInputs | None, list[tuple[str, mx.array, Format]]]] = {}
        for layer_name, fmt in formats.items():
            if fmt is not None:
                module, layer = f"{name}.{layer_name}", get_submodule(block, layer_name)
                weight = layer.weight.astype(tensors[f"{module}.weight"].dtype)
                read = inputs.get(layer_name)
                groups.setdefault(id(read), (read, []))[1].append((module, weight, fmt))
        for read, matrices in groups.values():
            for (module, _, fmt), packed in zip(matrices, self._quantize(matrices, read), strict=True):
                layer = get_submodule(block, module.removeprefix(prefix))
                layer.weight = dequantized(packed, fmt).astype(layer.weight.dtype)
                results |= packed.parts(module)
        if results:
            self._save(name, results)

    def result(self) -> QuantizedTensors:
        """All tensors in the source's order; matrices that weren't calibrated are rounded when they are read."""
        tensors = _rounded(self._checkpoint.tensors, self._plan, self._errors)
        stored = {name: self._stored.get(name, tensor) for name, tensor in tensors.items()}
        return QuantizedTensors(stored, self._errors, self._rounded_experts)

    def _quantize(
        self,
        matrices: Matrices,
        inputs: InputStats | ExpertInputs | None,
        measured: InputStats | None = None,
    ) -> list[PackedMatrix]:
        """Quantize matrices that read the same inputs, and record their errors, on inputs `measured` if given.

        What has no inputs is rounded to nearest: matrices of a kind that isn't calibrated, and experts that read less
        than `calibrate.MIN_EXPERT_TOKENS`.
        """
        if inputs is None:
            rounded = [quantize_rtn(weight, fmt) for _, weight, fmt in matrices]
            for (module, weight, fmt), packed in zip(matrices, rounded, strict=True):
                self._errors[module] = weight_error(weight, packed, fmt)
            return rounded
        try:
            if isinstance(inputs, InputStats):
                results = self._quantize_matrices(matrices, inputs, measured)
            else:
                results = self._quantize_experts(matrices, inputs)
        except CheckpointError as error:
            raise error.prefixed(" and ".join(module for module, _, _ in matrices)) from None
        for (module, _, _), (_, (change, size)) in zip(matrices, results, strict=True):
            self._errors[module] = float(np.sqrt(max(0.0, change) / size)) if size > 0 else 0.0
        return [packed for packed, _ in results]

    def _quantize_matrices(
        self, matrices: Matrices, inputs: InputStats, measured: InputStats | None = None
    ) -> list[tuple[PackedMatrix, np.ndarray]]:
        """Quantize matrices `[rows, width]`, or `[heads, rows, width]`.

        Returns:
            Each with the parts of its error, see `output_error`.
        """
        pieces = [
            (module, rows[start : start + count], fmt)
            for module, weight, fmt in matrices
            for rows in [weight.flatten(0, -2)]
            for count in [len(rows) if inputs.transposed else _ROWS]
            for start in range(0, len(rows), count)
        ]
        found: dict[str, list[tuple[PackedMatrix, np.ndarray]]] = {module: [] for module, _, _ in matrices}
        for (module, rows, fmt), packed in zip(pieces, self._method.quantize(pieces, inputs), strict=True):
            found[module].append((packed, output_error(rows, packed, fmt, measured or inputs)))
            mx.eval(packed)
            mx.clear_cache()
        results = []
        for module, weight, _ in matrices:
            packed, squared = _join(PackedMatrix.concatenate_rows, found[module])
            shaped = PackedMatrix(*(x if x is None else mx.unflatten(x, 0, weight.shape[:-1]) for x in packed))
            results.append((shaped, squared))
        return results

    def _quantize_experts(self, matrices: Matrices, inputs: ExpertInputs) -> list[tuple[PackedMatrix, np.ndarray]]:
        """Quantize matrices `[experts, rows, width]`; see `_quantize_matrices`."""
        experts: list[list[tuple[PackedMatrix, np.ndarray]]] = []
        for expert in range(matrices[0][1].shape[0]):
            tokens, stats = inputs.of(expert)
            own = [(module, weight[expert], fmt) for module, weight, fmt in matrices]
            if tokens >= calibrate.MIN_EXPERT_TOKENS:
                experts.append(self._quantize_matrices(own, stats))
                continue
            experts.append([])
            for module, rows, fmt in own:
                packed = quantize_rtn(rows, fmt)
                experts[-1].append((packed, output_error(rows, packed, fmt, stats) if tokens else np.zeros(2)))
                self._rounded_experts[module] = self._rounded_experts.get(module, 0) + 1
        return [_join(PackedMatrix.stack, parts) for parts in zip(*experts, strict=True)]

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

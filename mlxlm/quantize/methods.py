"""Quantize all tensors of a model in one pass over its layers: rounded as they are read, or by a calibrated method."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.checkpoint.lazy_tensor import LazyTensor, lazy_tensor
from mlxlm.checkpoint.load import LayerwiseModel
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint
from mlxlm.checkpoint.safetensors import file_tensors, write_file
from mlxlm.config.quantization import Format
from mlxlm.convert.verify import Progress
from mlxlm.quantize.awq import AWQ
from mlxlm.quantize.calibrate import CalibratedMethod, InputStats, calibrate_blocks, get_submodule
from mlxlm.quantize.calibration_text import QuantizationTexts
from mlxlm.quantize.gptq import GPTQ, output_error
from mlxlm.quantize.quantization_plan import QuantizationPlan
from mlxlm.quantize.rtn import PackedMatrix, dequantized, lazy_quantize, weight_error
from mlxlm.quantize.settings import QuantizationSettings
from mlxlm.quantize.source import Source
from mlxlm.utils.errors import ArgumentError, CheckpointError

# None rounds to nearest (rtn.py), which needs no calibration and streams.
METHODS: dict[str, type[CalibratedMethod] | None] = {"rtn": None, "gptq": GPTQ, "awq": AWQ}

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
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
    """

    tensors: dict[str, LazyTensor]
    errors: dict[str, float] = field(default_factory=dict)


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

        def on_matrix(module: str, weight: mx.array, packed: PackedMatrix, fmt: Format) -> None:
            errors[module] = weight_error(weight, packed, fmt)

        return QuantizedTensors(lazy_quantize(source.checkpoint_16bit.tensors, plan, on_matrix), errors)
    if isinstance(source.checkpoint_16bit, ModuleCheckpoint):
        kind = source.checkpoint_16bit.config.model_type
        raise ArgumentError(f"`method` {job.settings.method} isn't possible for {kind} models", "rtn")
    config = source.checkpoint.config
    tied = config.tie_word_embeddings and plan.formats[EMBEDDING] is not None
    untied_head = plan.formats.get(HEAD) is not None
    total = config.num_hidden_layers * (1 + tied) + untied_head
    done, phase = itertools.count(1), f"calibrating ({job.settings.method}){label}"
    windows = job.texts.calibration_windows
    return quantize_calibrated(
        source.checkpoint_16bit, plan, method(), windows, scratch, lambda name: job.progress(phase, next(done), total)
    )


def quantize_calibrated(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    method: CalibratedMethod,
    windows: np.ndarray,
    scratch: Path,
    progress: Callable[[str], None] = lambda name: None,
) -> QuantizedTensors:
    """Quantize with a calibrated method.

    The blocks are calibrated on the quantized embedding. A tied embedding is calibrated as the head, which takes a run
    through the source first, and as a table with the same weight. Other tables have no inputs: their rows are
    quantized for equal errors of all columns. Memory: one block or table in float32, the second moments of a block's
    inputs and a few matrices of their size, and the hidden states of the windows.

    Args:
        checkpoint: A model in 16 bits.
        plan: The format of each matrix.
        method: The method, for this model only.
        windows: Calibration tokens, int `[N, T]`.
        scratch: An empty folder for the result.
        progress: Called with the name of each finished block.
    """
    quantizer = _BlockQuantizer(checkpoint, plan, method, scratch)
    source, head_moments = LayerwiseModel(checkpoint), None
    if checkpoint.config.tie_word_embeddings and plan.formats[EMBEDDING] is not None:
        head_moments = calibrate_blocks(None, source, windows[::_TIED_SHARE], None, progress).moments
    embeddings = quantizer.quantize_embeddings(head_moments)
    calibrated = LayerwiseModel(replace(checkpoint, tensors={**checkpoint.tensors, **embeddings}))
    unquantized = source if method.runs_source else None
    head_inputs = calibrate_blocks(unquantized, calibrated, windows, quantizer.quantize_block, progress)
    if (head_format := plan.formats.get(HEAD)) is not None:
        quantizer.quantize_head(head_inputs, head_format)
        progress(HEAD)
    return quantizer.result()


class _BlockQuantizer:
    """Quantizes embeddings, blocks and head one after the other, and keeps the results in files of `scratch`."""

    def __init__(self, checkpoint: Checkpoint, plan: QuantizationPlan, method: CalibratedMethod, scratch: Path):
        self._checkpoint, self._plan, self._method, self._scratch = checkpoint, plan, method, scratch
        self._stored: dict[str, LazyTensor] = {}
        self._errors: dict[str, float] = {}

    def quantize_embeddings(self, head_moments: np.ndarray | None) -> dict[str, LazyTensor]:
        """Quantize the embeddings; returns them dequantized, by tensor name. `head_moments`: inputs of a tied head."""
        embeddings: dict[str, LazyTensor] = {}
        for module, fmt in self._plan.formats.items():
            if fmt is None or not module.startswith("model.embed"):
                continue
            tensor = self._checkpoint.tensors[f"{module}.weight"]
            moments: np.ndarray = np.eye(tensor.shape[1], dtype=np.float32)
            error_moments = moments
            if module == EMBEDDING and head_moments is not None:
                moments = moments + head_moments / max(float(np.mean(np.diag(head_moments))), 1e-30)
                error_moments = head_moments
            packed = self._quantize(module, tensor.read(), InputStats(moments), fmt, error_moments)
            stored = self._save(module, packed.parts(module))
            embeddings |= dequantize_tensors(stored, self._plan.quantization_config())
        return embeddings

    def quantize_head(self, inputs: InputStats, fmt: Format) -> None:
        """Quantize an untied head."""
        weight = self._checkpoint.tensors[f"{HEAD}.weight"].read()
        self._save(HEAD, self._quantize(HEAD, weight, inputs, fmt).parts(HEAD))

    def quantize_block(self, name: str, block: nn.Module, inputs: Mapping[str, InputStats]) -> None:
        """Quantize the layers of a block, and set its weights to the dequantized ones."""
        formats = {layer: self._plan.formats.get(f"{name}.{layer}") for layer in inputs}
        results: dict[str, mx.array] = {}
        dtype = self._checkpoint.tensors[f"{name}.self_attn.q_proj.weight"].dtype
        inputs, changed = self._method.change_block(block, self._checkpoint.config, inputs, formats, dtype)
        for layer in sorted(changed):
            for parameter, value in tree_flatten(get_submodule(block, layer).parameters()):
                results[f"{name}.{layer}.{parameter}"] = value.astype(dtype)
        for layer_name, fmt in formats.items():
            if fmt is None:
                continue
            layer, module = get_submodule(block, layer_name), f"{name}.{layer_name}"
            weight = layer.weight.astype(self._checkpoint.tensors[f"{module}.weight"].dtype)
            packed = self._quantize(module, weight, inputs[layer_name], fmt)
            layer.weight = dequantized(packed, fmt).astype(layer.weight.dtype)
            results |= packed.parts(module)
        self._method.end_block()
        if results:
            self._save(name, results)

    def result(self) -> QuantizedTensors:
        """All tensors in the source's order; matrices that weren't calibrated are rounded when they are read."""
        tensors = lazy_quantize(self._checkpoint.tensors, self._plan)
        return QuantizedTensors({n: self._stored.get(n, tensor) for n, tensor in tensors.items()}, self._errors)

    def _quantize(
        self, module: str, weight: mx.array, inputs: InputStats, fmt: Format, error_moments: np.ndarray | None = None
    ) -> PackedMatrix:
        """Quantize a matrix and record its error, on inputs with `error_moments` if they are given."""
        pieces, squared = [], np.zeros(2)
        error_moments = inputs.moments if error_moments is None else error_moments
        try:
            for start in range(0, weight.shape[0], _ROWS):
                rows = weight[start : start + _ROWS]
                piece = self._method.quantize(module, rows, inputs, fmt)
                squared += output_error(rows, piece, fmt, error_moments)
                mx.eval(*piece.parts(module).values())
                mx.clear_cache()
                pieces.append(piece)
        except CheckpointError as error:
            raise error.prefixed(module) from None
        change, size = squared
        self._errors[module] = float(np.sqrt(max(0.0, change) / size)) if size > 0 else 0.0
        return pieces[0] if len(pieces) == 1 else PackedMatrix.concatenate_rows(pieces)

    def _save(self, name: str, arrays: dict[str, mx.array]) -> dict[str, LazyTensor]:
        file = self._scratch / f"{name}.safetensors"
        write_file(file, {name: lazy_tensor(value) for name, value in arrays.items()})
        stored = file_tensors(file)
        self._stored |= stored
        return stored

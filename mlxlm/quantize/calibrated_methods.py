"""GPTQ or AWQ over a whole decoder: block by block, each result to disk before the next block is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors as in_float32
from mlxlm.checkpoint.layerwise import LayerwiseModel
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.safetensors import file_tensors, save_tensors
from mlxlm.quantize import awq
from mlxlm.quantize.calibrate import InputStats, calibrate_blocks
from mlxlm.quantize.gptq import gptq, inverse_hessian_cholesky, output_error
from mlxlm.quantize.lazy_quantize import quantized
from mlxlm.quantize.packed_matrix import PackedMatrix, dequantized
from mlxlm.quantize.quantization_plan import Format, QuantizationPlan
from mlxlm.utils.errors import CheckpointError, ConfigError

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
METHODS = ("rtn", "gptq", "awq")
_ROWS = 16_384  # of a matrix that are calibrated at once: tables have a quarter of a million
_TABLE_SHARE = 4  # a tied table is calibrated on every fourth window: its moments are added to those of the table


@dataclass
class CalibratedTensors:
    """Quantized tensors, most of them in files of a scratch folder, and the relative output error of each module on
    the calibration text, |ΔW X| / |W X|."""

    tensors: dict[str, LazyTensor]
    errors: dict[str, float] = field(default_factory=dict)


def check_method(method: str, plan: QuantizationPlan) -> None:
    """Raises ConfigError for an unknown method, and for GPTQ with a mode that it isn't made for."""
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}", f"one of {', '.join(METHODS)}")
    modes = {chosen.mode for chosen in plan.formats.values() if chosen is not None and not chosen.affine}
    if method == "gptq" and modes:
        raise ConfigError(f"GPTQ is made for affine quantization, not for {min(modes)}", "awq, or the affine mode")


def quantize_calibrated(
    checkpoint: Checkpoint, plan: QuantizationPlan, method: str, tokens: np.ndarray, scratch: Path,
    progress: Callable[[str], None] = lambda done: None,
) -> CalibratedTensors:  # fmt: skip
    """Quantize `checkpoint`, whose tensors have 16 bits, by `plan` with GPTQ or AWQ, for inputs like `tokens` int
    `[N, T]`.

    The blocks see what the embedding has become. A tied one is calibrated as the head, which takes a run through the
    source first; as a table it counts as much. Other tables are only fitted: their rows are used as they are.
    `scratch` is an empty folder that must stay until the tensors have been read. Memory: one block or table in
    float32, the moments of a block's inputs and a few matrices of their size, and the hidden states of `calibrate_blocks`.
    `progress` is told each block that is done.
    """
    check_method(method, plan)
    work = _Work(checkpoint, plan, method, scratch)
    source, moments = LayerwiseModel(checkpoint), None
    if checkpoint.config.tie_word_embeddings and plan.formats[EMBEDDING] is not None:
        moments = calibrate_blocks(None, source, tokens[::_TABLE_SHARE], None, scratch, progress).moments
    seen = replace(checkpoint, tensors={**checkpoint.tensors, **work.tables(moments)})
    inputs = calibrate_blocks(
        source if method == "gptq" else None, LayerwiseModel(seen), tokens, work.on_block, scratch, progress
    )
    if plan.formats.get(HEAD) is not None:
        work.head(inputs)
        progress(HEAD)
    return work.result()


class _Work:
    def __init__(self, checkpoint: Checkpoint, plan: QuantizationPlan, method: str, scratch: Path):
        self._checkpoint, self._plan, self._method, self._scratch = checkpoint, plan, method, scratch
        self._stored: dict[str, LazyTensor] = {}
        self._errors: dict[str, float] = {}
        self._factor: tuple[InputStats, np.ndarray] | None = None  # the last one: query, key and value share it

    def tables(self, moments: np.ndarray | None) -> dict[str, LazyTensor]:
        """Quantize the embeddings; what the model then computes with, by tensor name. `moments` of a tied head."""
        computed: dict[str, LazyTensor] = {}
        for module, chosen in self._plan.formats.items():
            if chosen is None or not module.startswith("model.embed"):
                continue
            tensor = self._checkpoint.tensors[f"{module}.weight"]
            sums = error_moments = np.eye(tensor.shape[1], dtype=np.float32)
            if module == EMBEDDING and moments is not None:
                sums, error_moments = sums + moments / max(float(np.mean(np.diag(moments))), 1e-30), moments
            packed = self._packed(module, tensor.read(), InputStats(sums), chosen, error_moments)
            kept = self._keep(module, packed.parts(module))
            computed |= in_float32(kept, self._plan.quantization_config())
        return computed

    def head(self, inputs: InputStats) -> None:
        """Quantize a head of its own."""
        weight = self._checkpoint.tensors[f"{HEAD}.weight"].read()
        self._keep(HEAD, self._packed(HEAD, weight, inputs, self._plan.formats[HEAD]).parts(HEAD))

    def on_block(self, name: str, block: nn.Module, inputs: Mapping[str, InputStats]) -> None:
        formats = {local: self._plan.formats.get(f"{name}.{local}") for local in inputs}
        results: dict[str, mx.array] = {}
        if self._method == "awq":
            dtype = self._checkpoint.tensors[f"{name}.self_attn.q_proj.weight"].dtype
            inputs, changed = awq.apply_best_scales(block, self._checkpoint.config, inputs, formats, dtype)
            for local in sorted(changed):
                for parameter, value in tree_flatten(awq.get_submodule(block, local).parameters()):
                    results[f"{name}.{local}.{parameter}"] = value.astype(dtype)
        for local, chosen in formats.items():
            if chosen is None:
                continue
            layer, module = awq.get_submodule(block, local), f"{name}.{local}"
            weight = layer.weight.astype(self._checkpoint.tensors[f"{module}.weight"].dtype)
            packed = self._packed(module, weight, inputs[local], chosen)
            layer.weight = dequantized(packed, chosen).astype(layer.weight.dtype)  # the block goes on with these
            results |= packed.parts(module)
        self._factor = None
        if results:
            self._keep(name, results)

    def _packed(
        self, module: str, weight: mx.array, inputs: InputStats, chosen: Format, error_moments: np.ndarray | None = None
    ) -> PackedMatrix:
        """`error_moments`: other moments to take the error from."""
        pieces, error = [], np.zeros(2)
        try:
            for start in range(0, weight.shape[0], _ROWS):
                rows = weight[start : start + _ROWS]
                if self._method == "gptq":
                    factor = self._factor_of(inputs)
                    pieces.append(gptq(rows, inputs.moments, chosen, inputs.dxxt, factor=factor))
                else:
                    pieces.append(awq.clipped(module, rows, inputs.moments, chosen))
                error += output_error(
                    rows, pieces[-1], chosen, inputs.moments if error_moments is None else error_moments
                )
                mx.eval(*pieces[-1].parts(module).values())
                mx.clear_cache()
        except CheckpointError as problem:
            raise CheckpointError(f"{module}: {problem.message}", problem.hint) from None
        changed, size = error
        self._errors[module] = float(np.sqrt(max(0.0, changed) / size)) if size > 0 else 0.0
        return pieces[0] if len(pieces) == 1 else PackedMatrix.concatenate_rows(pieces)

    def _factor_of(self, inputs: InputStats) -> np.ndarray:
        if self._factor is None or self._factor[0] is not inputs:
            self._factor = None  # room for the next one
            self._factor = inputs, inverse_hessian_cholesky(inputs.moments)
        return self._factor[1]

    def _keep(self, name: str, arrays: dict[str, mx.array]) -> dict[str, LazyTensor]:
        file = self._scratch / f"{name}.safetensors"
        save_tensors(file, arrays)
        kept = file_tensors(file)
        self._stored |= kept
        return kept

    def result(self) -> CalibratedTensors:
        """Everything in the source's order: what the walk has made, and the rest rounded when it is read."""
        tensors: dict[str, LazyTensor] = {}
        for name, tensor in quantized(self._checkpoint.tensors, self._plan).items():
            tensors[name] = self._stored.get(name, tensor)
        return CalibratedTensors(tensors, self._errors)

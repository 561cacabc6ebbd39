"""GPTQ or AWQ over a whole decoder: block by block, each result to disk before the next block is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from mlxlm._mlx import mx, nn, tree_flatten
from mlxlm.checkpoint.safetensors import save_tensors
from mlxlm.checkpoint.source import Checkpoint
from mlxlm.checkpoint.tensors import Tensor, of_array
from mlxlm.errors import CheckpointError, ConfigError
from mlxlm.quantize import awq
from mlxlm.quantize.calibrate import Inputs, head_moments, walk
from mlxlm.quantize.gptq import gptq, relative_error
from mlxlm.quantize.packed import Packed, dequantized
from mlxlm.quantize.plan import Format, Plan
from mlxlm.quantize.stream import quantized
from mlxlm.stages import Stages

EMBEDDING = "model.embed_tokens"
METHODS = ("round", "gptq", "awq")


@dataclass
class Calibrated:
    """Quantized tensors, most of them in files of a scratch folder, and the relative output error of each module on
    the calibration text, |ΔW X| / |W X|."""

    tensors: dict[str, Tensor]
    errors: dict[str, float] = field(default_factory=dict)


def check_method(method: str, plan: Plan) -> None:
    """Raises ConfigError for an unknown method, and for GPTQ with a mode that it isn't made for."""
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}", f"one of {', '.join(METHODS)}")
    modes = {chosen.mode for chosen in plan.formats.values() if chosen is not None and not chosen.affine}
    if method == "gptq" and modes:
        raise ConfigError(f"GPTQ is made for affine quantization, not for {min(modes)}", "awq, or the affine mode")


def calibrated(
    checkpoint: Checkpoint, plan: Plan, method: str, tokens: np.ndarray, scratch: Path,
    progress: Callable[[str], None] = lambda done: None,
) -> Calibrated:  # fmt: skip
    """Quantize `checkpoint`, whose tensors have 16 bits, by `plan` with GPTQ or AWQ, for inputs like `tokens` int
    `[N, T]`.

    The blocks see what the embedding has become. A tied one is calibrated as the head, which takes a run through the
    source first; as a table it counts as much. Other tables are only fitted: their rows are used as they are.
    `scratch` is an empty folder that must stay until the tensors have been read. Memory: one block, and the hidden
    states. `progress` is told each block that is done.
    """
    check_method(method, plan)
    work = _Work(checkpoint, plan, method, scratch)
    source, moments = Stages(checkpoint), None
    if checkpoint.config.tie_word_embeddings and plan.formats[EMBEDDING] is not None:
        moments = head_moments(source, tokens, progress)
    seen = replace(checkpoint, tensors={**checkpoint.tensors, **work.tables(moments)})
    walk(source if method == "gptq" else None, Stages(seen), tokens, work.on_block, progress)
    return work.result()


class _Work:
    def __init__(self, checkpoint: Checkpoint, plan: Plan, method: str, scratch: Path):
        self._checkpoint, self._plan, self._method, self._scratch = checkpoint, plan, method, scratch
        self._stored: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}

    def tables(self, moments: np.ndarray | None) -> dict[str, Tensor]:
        """Quantize the embeddings; what the model then computes with, by tensor name. `moments` of a tied head."""
        computed: dict[str, Tensor] = {}
        for module, chosen in self._plan.formats.items():
            if chosen is None or not module.startswith("model.embed"):
                continue
            weight = self._checkpoint.tensors[f"{module}.weight"].read()
            sums = np.eye(weight.shape[1], dtype=np.float32)
            if module == EMBEDDING and moments is not None:
                sums += moments / max(float(np.mean(np.diag(moments))), 1e-30)
            packed = self._packed(module, weight, Inputs(sums), chosen)
            self._keep(module, packed.parts(module))
            computed[f"{module}.weight"] = of_array(dequantized(packed, chosen))
        return computed

    def on_block(self, name: str, block: nn.Module, inputs: Mapping[str, Inputs]) -> None:
        prefix = f"{name}." if name else ""
        formats = {local: self._plan.formats.get(prefix + local) for local in inputs}
        changed: set[str] = set()
        if self._method == "awq" and name:  # no name: the head
            dtype = self._checkpoint.tensors[f"{prefix}self_attn.q_proj.weight"].dtype
            inputs, changed = awq.scale_block(block, self._checkpoint.config, inputs, formats, dtype)
        results: dict[str, mx.array] = {}
        for module in sorted(changed):
            for parameter, value in tree_flatten(awq.at(block, module).parameters()):
                tensor = f"{prefix}{module}.{parameter}"
                results[tensor] = value.astype(self._checkpoint.tensors[tensor].dtype)
        for local, chosen in formats.items():
            if chosen is None:
                continue
            layer, module = awq.at(block, local), prefix + local
            weight = layer.weight.astype(self._checkpoint.tensors[f"{module}.weight"].dtype)
            packed = self._packed(module, weight, inputs[local], chosen)
            layer.weight = dequantized(packed, chosen).astype(layer.weight.dtype)  # the block goes on with these
            results |= packed.parts(module)
        if results:
            self._keep(name or "head", results)

    def _packed(self, module: str, weight: mx.array, inputs: Inputs, chosen: Format) -> Packed:
        try:
            if self._method == "gptq":
                packed = gptq(weight, inputs.moments, chosen, inputs.drift)
            else:
                packed = awq.clipped(module, weight, inputs.moments, chosen)
        except CheckpointError as error:
            raise CheckpointError(f"{module}: {error.message}", error.hint) from None
        self._errors[module] = relative_error(weight, packed, chosen, inputs.moments)
        return packed

    def _keep(self, name: str, arrays: dict[str, mx.array]) -> None:
        file = self._scratch / f"{name}.safetensors"
        save_tensors(file, arrays)
        self._stored |= {key: _in_file(file, key, value) for key, value in arrays.items()}

    def result(self) -> Calibrated:
        """Everything in the source's order: what the walk has made, and the rest rounded when it is read."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in quantized(self._checkpoint.tensors, self._plan).items():
            tensors[name] = self._stored.get(name, tensor)
        return Calibrated(tensors, self._errors)


def _in_file(file: Path, name: str, value: mx.array) -> Tensor:
    kind = {mx.uint32: "U32", mx.uint8: "U8", mx.float16: "F16", mx.bfloat16: "BF16"}[value.dtype]
    return Tensor(tuple(value.shape), value.dtype, kind, value.nbytes, lambda: mx.load(str(file))[name])

"""The format of each matrix: uniform, mixed recipes, and the `quantization` entry of config.json."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.backend.mlx import nn
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.checkpoint.mlx_lm import ModuleCheckpoint, WritableCheckpoint
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import RECIPES, Format, compatible_format, gets_more_bits, quantization_settings
from mlxlm.families import quantizable_modules, weight_mappings

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Matrix:
    """A matrix of the files, which has one format.

    Attributes:
        name: Name in the files that mlx_lm reads.
        modules: The modules whose rows it holds.
        rows: Number of rows, of all experts.
        width: Number of columns.
        format: The format that mlx_lm's class requires, if it does: routers have 8 bits.
        quantized: False if it keeps 16 bits: in mlxlm's decoder routers, convolutions and DeepSeek V2's `kv_b_proj`,
            else what mlx_lm's class says.
    """

    name: str
    modules: tuple[str, ...]
    rows: int
    width: int
    format: Format | None = None
    quantized: bool = True

    @property
    def fixed(self) -> bool:
        """Whether mlx_lm's class decides about its format."""
        return self.format is not None or not self.quantized

    def nbytes(self, chosen: Format | None) -> int:
        """Bytes in a format; None is 16 bits."""
        return 2 * self.rows * self.width if chosen is None else chosen.nbytes(self.rows, self.width)


@dataclass(frozen=True)
class QuantizationPlan:
    """The format of each matrix.

    Attributes:
        default: The most frequent format.
        matrices: All matrices.
        formats: Module -> format; None for 16 bits.
        reduced_group_sizes: Matrix -> the group size it has because the requested one doesn't divide its width.
        skipped: Matrix -> its width, which no group size divides.
    """

    default: Format
    matrices: tuple[Matrix, ...]
    formats: Mapping[str, Format | None]
    reduced_group_sizes: Mapping[str, int]
    skipped: Mapping[str, int]

    def format_of(self, matrix: Matrix) -> Format | None:
        """The format of a matrix."""
        return self.formats[matrix.modules[0]]

    def quantization_config(self) -> dict[str, Any]:
        """The `quantization` of ModelConfig: the default, and the modules with another format."""
        return quantization_settings(self.formats, self.default)

    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(matrix.nbytes(self.format_of(matrix)) for matrix in self.matrices)

    def with_formats(self, chosen: Mapping[str, Format]) -> QuantizationPlan:
        """Replace formats by matrix name; the most frequent format becomes the default."""
        formats = dict(self.formats)
        for matrix in self.matrices:
            if matrix.name in chosen:
                formats |= dict.fromkeys(matrix.modules, chosen[matrix.name])
        used = Counter(f for f in formats.values() if f is not None)
        default = max(used, key=lambda f: (used[f], -f.bits), default=self.default)
        return replace(self, default=default, formats=formats)

    def to_dict(self) -> dict[str, Any]:
        """Matrix -> format as in config.json, None for 16 bits; for reports."""
        return {m.name: (f.to_dict() if (f := self.format_of(m)) else None) for m in self.matrices}


def matrices(checkpoint: WritableCheckpoint) -> tuple[Matrix, ...]:
    """All matrices of a model, with embeddings and head, as mlx_lm's files have them, in file order."""
    if isinstance(checkpoint, Checkpoint):
        return decoder_matrices(checkpoint.config, checkpoint.tensors)
    return tuple(_matrix(checkpoint, name, module) for name, module in checkpoint.quantizable().items())


def decoder_matrices(config: ModelConfig, tensors: LazyTensors) -> tuple[Matrix, ...]:
    """The matrices of mlxlm's decoder."""
    home = {module: stored for stored in weight_mappings(config, for_mlx=True) for module in stored.modules}
    found: dict[str, Matrix] = {}
    is_quantizable = quantizable_modules(config)
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(tensor.shape) < 2:
            continue
        stored = home.get(module)
        target, modules = (stored.name, stored.modules) if stored else (module, (module,))
        if target not in found:
            width = tensor.shape[-1]
            rows = sum(math.prod(tensors[f"{m}.weight"].shape) for m in modules) // width
            found[target] = Matrix(target, modules, rows, width, quantized=is_quantizable(module))
    return tuple(found.values())


def _matrix(checkpoint: ModuleCheckpoint, name: str, module: nn.Module) -> Matrix:
    """A matrix of mlx_lm's class, or a stack of matrices."""
    *rows, width = checkpoint.tensors[f"{name}.weight"].shape
    said = checkpoint.class_format(name, module)
    required = None
    if isinstance(said, Mapping):
        required = Format.of(said.get("mode", "affine"), said.get("bits"), said.get("group_size"))
    return Matrix(name, (name,), math.prod(rows), width, required, bool(said))


def uniform(matrices: Sequence[Matrix], wanted: Format) -> QuantizationPlan:
    """A plan with one format for all matrices."""
    return _plan(matrices, wanted, lambda matrix: wanted)


def recipe(matrices: Sequence[Matrix], name: str, group_size: int = 64) -> QuantizationPlan:
    """A plan with mixed bits: the head, and in some layers the value and down projections, get more.

    The layers are those of `gets_more_bits`. A value projection that is stored together with query and key gets the
    same bits as these.
    """
    low, high = (Format(bits, group_size) for bits in RECIPES[name])
    layers = 1 + max((layer for matrix in matrices if (layer := layer_index(matrix.modules[0])) is not None), default=0)

    def wanted(matrix: Matrix) -> Format:
        kind = matrix.modules[0].rpartition(".")[2] if len(matrix.modules) == 1 else ""
        if kind == "lm_head":
            return high
        index = layer_index(matrix.modules[0])
        if kind not in ("v_proj", "down_proj") or index is None:
            return low
        return high if gets_more_bits(index, layers) else low

    return _plan(matrices, low, wanted)


def layer_index(module: str) -> int | None:
    """The index of the layer that a module is in."""
    match = _LAYER.search(module)
    return None if match is None else int(match[1])


def _plan(matrices: Sequence[Matrix], default: Format, wanted: Callable[[Matrix], Format]) -> QuantizationPlan:
    formats: dict[str, Format | None] = {}
    reduced_group_sizes, skipped = {}, {}
    for matrix in matrices:
        requested = matrix.format or wanted(matrix)
        chosen = compatible_format(requested, matrix.width) if matrix.quantized else None
        if chosen is None and matrix.quantized:
            skipped[matrix.name] = matrix.width
        elif chosen is not None and chosen != requested:
            reduced_group_sizes[matrix.name] = chosen.group_size
        formats |= dict.fromkeys(matrix.modules, chosen)
    return QuantizationPlan(default, tuple(matrices), formats, reduced_group_sizes, skipped)

"""Which matrix is quantized to what: settings, mixed recipes, and the `quantization` entry of config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.checkpoint.lazy_tensor import LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import MODES, packed_bytes
from mlxlm.families import weight_mappings
from mlxlm.utils.errors import ConfigError

GROUP_SIZES, BITS = (tuple(sorted(allowed)) for allowed in MODES["affine"])

_SAID = ("groups of {}", "{} bits")

# Bits of most matrices, and of those that each recipe protects: those of mlx_lm.convert --quant-predicate.
RECIPES = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}


@dataclass(frozen=True)
class Format:
    """How MLX keeps a quantized matrix: `bits` each, and for `group_size` neighbours of a row one scale
    (and one bias in affine mode). Raises ConfigError for what MLX doesn't have."""

    bits: int
    group_size: int = 64
    mode: str = "affine"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"{self.mode!r} is not a mode", f"one of {', '.join(MODES)}")
        for allowed, value, what in zip(MODES[self.mode], (self.group_size, self.bits), _SAID, strict=True):
            if value not in allowed:
                choice = " or ".join(map(str, sorted(allowed)))
                raise ConfigError(f"{what.format(value)} are not a format of mode {self.mode}", choice)

    @classmethod
    def of(cls, mode: str = "affine", bits: int | None = None, group_size: int | None = None) -> Format:
        """A mode with its own bits and group size where they aren't given: 4 and 64 in affine mode."""
        if mode not in MODES:
            raise ConfigError(f"{mode!r} is not a mode", f"one of {', '.join(MODES)}")
        (default_group, *_), (default_bits, *_) = MODES[mode]
        return cls(default_bits if bits is None else bits, default_group if group_size is None else group_size, mode)

    @property
    def affine(self) -> bool:
        return self.mode == "affine"

    def nbytes(self, rows: int, width: int) -> int:
        """Of a matrix `[rows, width]`: its packed weights, and two 16-bit values a group or one of 8 bits."""
        return packed_bytes(rows * width, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As in config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Matrix:
    """What gets one format: a matrix of the files, and the decoder's modules whose rows it holds."""

    name: str  # in the files that mlx_lm reads
    modules: tuple[str, ...]
    rows: int
    width: int

    @property
    def parameters(self) -> int:
        return self.rows * self.width

    def nbytes(self, chosen: Format | None) -> int:
        """In a format; None is 16 bits."""
        return 2 * self.parameters if chosen is None else chosen.nbytes(self.rows, self.width)


@dataclass(frozen=True)
class QuantizationPlan:
    """A format for each matrix, or None for one left in 16 bits.

    `formats` is by the decoder's module, `reduced_group_sizes` and `skipped` by the file's matrix: the group size it got
    because the one asked for doesn't divide its rows, and the width that none divides.
    """

    default: Format
    matrices: tuple[Matrix, ...]
    formats: Mapping[str, Format | None]
    reduced_group_sizes: Mapping[str, int]
    skipped: Mapping[str, int]

    def format_of(self, matrix: Matrix) -> Format | None:
        return self.formats[matrix.modules[0]]

    def matrix_formats(self) -> list[Format | None]:
        """The format of each matrix of `matrices`."""
        return [self.format_of(matrix) for matrix in self.matrices]

    def quantization_config(self) -> dict[str, Any]:
        """ModelConfig's `quantization`: the default, and each exception by the decoder's module."""
        quantization_config: dict[str, Any] = self.default.to_dict()
        for module, chosen in self.formats.items():
            if chosen != self.default:
                quantization_config[module] = False if chosen is None else chosen.to_dict()
        return quantization_config

    def nbytes(self) -> int:
        """Of all matrices."""
        return sum(matrix.nbytes(self.format_of(matrix)) for matrix in self.matrices)

    def with_formats(self, chosen: Mapping[str, Format]) -> QuantizationPlan:
        """The same with other formats, by a matrix's name. The commonest one becomes the default."""
        formats = dict(self.formats)
        for matrix in self.matrices:
            if matrix.name in chosen:
                formats |= dict.fromkeys(matrix.modules, chosen[matrix.name])
        used = Counter(f for f in formats.values() if f is not None)
        default = max(used, key=lambda f: (used[f], -f.bits), default=self.default)
        return replace(self, default=default, formats=formats)

    def to_dict(self) -> dict[str, Any]:
        """For reports: matrix -> format, None for 16 bits."""
        return {m.name: (f.to_dict() if (f := self.format_of(m)) else None) for m in self.matrices}


def matrices(config: ModelConfig, tensors: LazyTensors) -> tuple[Matrix, ...]:
    """All matrices of a decoder, embeddings and head included, as mlx_lm's files hold them; in file order."""
    home = {module: stored for stored in weight_mappings(config, for_mlx=True) for module in stored.modules}
    found: dict[str, Matrix] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        if parameter != "weight" or len(tensor.shape) != 2:
            continue
        stored = home.get(module)
        target, modules = (stored.name, stored.modules) if stored else (module, (module,))
        if target not in found:
            rows = sum(tensors[f"{m}.weight"].shape[0] for m in modules)
            found[target] = Matrix(target, modules, rows, tensor.shape[1])
    return tuple(found.values())


def uniform(config: ModelConfig, tensors: LazyTensors, wanted: Format) -> QuantizationPlan:
    """Every matrix in one format."""
    return _plan(matrices(config, tensors), wanted, lambda matrix: wanted)


def recipe(config: ModelConfig, tensors: LazyTensors, name: str, group_size: int = 64) -> QuantizationPlan:
    """A mixed recipe by name: the head, and in some layers the value and down projections, get more bits.

    The layers are those of llama.cpp's Q4_K_M (its `use_more_bits`): the first and the last eighth, and each
    third between. A value projection that is stored with query and key can't have bits of its own.
    Raises ConfigError for an unknown name.
    """
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}", f"one of {', '.join(RECIPES)}")
    low, high = (Format(bits, group_size) for bits in RECIPES[name])
    eighth, layers = config.num_hidden_layers // 8, config.num_hidden_layers

    def wanted(matrix: Matrix) -> Format:
        kind = matrix.modules[0].rpartition(".")[2] if len(matrix.modules) == 1 else ""
        if kind == "lm_head":
            return high
        if kind not in ("v_proj", "down_proj"):
            return low
        index = int(matrix.modules[0].split(".")[2])
        more = index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2
        return high if more else low

    return _plan(matrices(config, tensors), low, wanted)


def _plan(found: Sequence[Matrix], default: Format, wanted: Callable[[Matrix], Format]) -> QuantizationPlan:
    formats: dict[str, Format | None] = {}
    reduced_group_sizes, skipped = {}, {}
    for matrix in found:
        asked = wanted(matrix)
        chosen = compatible_format(asked, matrix.width)
        if chosen is None:
            skipped[matrix.name] = matrix.width
        elif chosen != asked:
            reduced_group_sizes[matrix.name] = chosen.group_size
        formats |= dict.fromkeys(matrix.modules, chosen)
    return QuantizationPlan(default, tuple(found), formats, reduced_group_sizes, skipped)


def compatible_format(asked: Format, width: int) -> Format | None:
    """`asked`, or with the largest smaller group size that divides `width`; None if there is none."""
    sizes = [g for g in reversed(GROUP_SIZES) if g <= asked.group_size] if asked.affine else [asked.group_size]
    size = next((g for g in sizes if width % g == 0), None)
    return None if size is None else replace(asked, group_size=size)

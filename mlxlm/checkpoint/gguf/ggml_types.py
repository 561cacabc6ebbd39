"""ggml's tensor types that can be read, by their number in GGUF files."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

# Those that `gguf.quants` dequantizes.
_READABLE = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4",
)  # fmt: skip


@dataclass(frozen=True)
class GGMLType:
    """A tensor type: `block_size` weights of a row are stored together in `type_size` bytes."""

    name: str
    block_size: int
    type_size: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor; `block_size` divides its rows."""
        return math.prod(shape) // self.block_size * self.type_size


@functools.cache
def ggml_types() -> Mapping[int, GGMLType]:
    """All readable types by number."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # half a second

    kinds = (GGMLQuantizationType[name] for name in _READABLE)
    return {kind.value: GGMLType(kind.name, *GGML_QUANT_SIZES[kind]) for kind in kinds}


def ggml_type(name: str) -> GGMLType:
    """The type of a name ("Q8_0")."""
    return next(kind for kind in ggml_types().values() if kind.name == name)

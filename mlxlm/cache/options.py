"""Options of the key-value cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlxlm.backend.mlx import ON_CPU
from mlxlm.config.numbers import is_int_at_least
from mlxlm.utils.errors import GenerationError

KV_BITS = (8, 4)
_BITS_BY_NAME = {"none": None, **{str(bits): bits for bits in KV_BITS}}
# Tokens of a prompt in one forward pass. On a CPU, 512 bound the memory of attention's scores, [H, 512, S] per layer. A
# GPU has none in memory, and larger products use it better: mlx_lm has 2,048, too.
CPU_PREFILL_STEP_SIZE = 512
PREFILL_STEP_SIZE = CPU_PREFILL_STEP_SIZE if ON_CPU else 2048
NUM_SINK_TOKENS = 4  # enough attention sinks according to Xiao et al. 2023, "StreamingLLM"


@dataclass(frozen=True)
class KVOptions:
    """Options of the key-value cache. The default is unbounded and unquantized.

    Args:
        size: Maximum number of tokens per text; a full cache drops the oldest. None: unlimited.
        keep: Number of first tokens that are never dropped ("attention sinks", Xiao et al. 2023, "StreamingLLM").
        key_bits: 8 or 4 to quantize keys, None for the model's dtype.
        value_bits: The same for values.

    Raises:
        GenerationError: Names every invalid option.
    """

    size: int | None = None
    keep: int = NUM_SINK_TOKENS
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise GenerationError("invalid cache options: " + "; ".join(problems))

    def _problems(self) -> Iterator[str]:
        valid_keep = is_int_at_least(self.keep, 0)
        if not valid_keep:
            yield f"keep is {self.keep!r} (a whole number from 0, such as {NUM_SINK_TOKENS})"
        minimum = (self.keep if valid_keep else 0) + 2  # a new token and the one before it
        if self.size is not None and not is_int_at_least(self.size, minimum):
            yield f"size is {self.size!r} (a whole number from {minimum}, such as 4096, or none)"
        for name, bits in (("key bits", self.key_bits), ("value bits", self.value_bits)):
            if bits is not None and (isinstance(bits, bool) or bits not in KV_BITS):
                yield f"{name} are {bits!r} (8, 4 or none)"

    @classmethod
    def of(
        cls,
        size: int | None = None,
        keep: int | None = None,
        bits: int | str | tuple[int | None, int | None] | None = None,
    ) -> KVOptions:
        """Parse user input.

        Args:
            size: As in `KVOptions`.
            keep: As in `KVOptions`; None for the default.
            bits: One number for keys and values, or one for each: 8, (8, 4), "8", "8,4", "none,4".

        Raises:
            GenerationError: Names every invalid option.
        """
        sides: list[Any] = list(bits) if isinstance(bits, tuple | list) else [bits]
        if isinstance(bits, str):  # unknown names are reported by `KVOptions`
            sides = [_BITS_BY_NAME.get(name.strip().lower(), name) for name in bits.split(",")]
        if len(sides) not in (1, 2):
            raise GenerationError(f"cache bits are {bits!r}", "one number for both, or two: 8 or 8,4 or none,4")
        return cls(size, NUM_SINK_TOKENS if keep is None else keep, sides[0], sides[-1])

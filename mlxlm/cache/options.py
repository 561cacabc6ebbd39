"""Options of the key-value cache."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxlm.config.option import option, range_problems
from mlxlm.utils.errors import GenerationError

KV_BITS = (8, 4)
NUM_SINK_TOKENS = 4  # enough attention sinks according to Xiao et al. 2023, "StreamingLLM"
_BITS_BY_NAME = {"none": None, **{str(bits): bits for bits in KV_BITS}}
_memory = partial(option, section="Memory and speed")


@dataclass(frozen=True)
class KVOptions:
    """Options of the key-value cache. The default is unbounded and unquantized.

    Attributes:
        size: Maximum number of tokens per text; a full cache drops the oldest. None: unlimited.
        keep: Number of first tokens that are never dropped ("attention sinks", Xiao et al. 2023, "StreamingLLM").
        key_bits: 8 or 4 to quantize keys, None for the model's dtype.
        value_bits: The same for values.

    Raises:
        GenerationError: Names every invalid option.
    """

    size: int | None = _memory(
        None,
        "Limit the key-value cache to N tokens; the oldest are dropped.",
        low=2,  # a new token and the one before it
        names="--max-kv-size",
        metavar="N",
        default_text="unlimited",
    )
    keep: int = _memory(
        NUM_SINK_TOKENS,
        "With --max-kv-size: never drop the first N tokens (attention sinks).",
        low=0,
        names="--kv-keep",
        metavar="N",
    )
    key_bits: int | None = _memory(
        None,
        "Quantize the key-value cache to 8 or 4 bits; 8,4 or none,4 sets keys and values separately.",
        choices=KV_BITS,
        names="--kv-bits",
        metavar="BITS",
        default_text="none",
    )
    value_bits: int | None = _memory(None, "The same for values alone.", choices=KV_BITS)

    def __post_init__(self) -> None:
        problems = list(range_problems(self))
        if not problems and self.size is not None and self.size < self.keep + 2:
            problems.append(f"size is {self.size}, it must be at least {self.keep + 2}")
        if problems:
            raise GenerationError("invalid cache options: " + "; ".join(problems))

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

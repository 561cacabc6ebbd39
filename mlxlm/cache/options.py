"""How the keys and values of a text are kept: the settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlxlm.utils.errors import GenerationError

KV_BITS = (8, 4)
_WORDS = {"none": None, **{str(bits): bits for bits in KV_BITS}}
NUM_SINK_TOKENS = 4  # attention sinks that Xiao et al. found to be enough


@dataclass(frozen=True)
class KVOptions:
    """How keys and values of a text are kept; by default all of them, as they are.

    size: at most so many tokens of a text are held, the oldest making room for new ones (None: all are held).
    keep: the first tokens, which are then never dropped ("attention sinks", Xiao et al. 2023, "StreamingLLM").
    key_bits, value_bits: 8 or 4 to hold keys or values quantized, None for the model's own dtype.

    Raises GenerationError naming every setting that can't work.
    """

    size: int | None = None
    keep: int = NUM_SINK_TOKENS
    key_bits: int | None = None
    value_bits: int | None = None

    def __post_init__(self) -> None:
        if found := list(self._problems()):
            raise GenerationError("these cache settings can't work: " + "; ".join(found))

    def _problems(self) -> Iterator[str]:
        kept = is_int_at_least(self.keep, 0)
        if not kept:
            yield f"keep is {self.keep!r} (a whole number from 0, such as {NUM_SINK_TOKENS})"
        least = (self.keep if kept else 0) + 2  # a new token and the one before it
        if self.size is not None and not is_int_at_least(self.size, least):
            yield f"size is {self.size!r} (a whole number from {least}, such as 4096, or none)"
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
        """From what a person gives. `bits`: for both, or keys' and values': 8, (8, 4), "8", "8,4", "none,4".

        Raises GenerationError naming every setting that can't work.
        """
        keys, values = _both(bits)
        return cls(size, NUM_SINK_TOKENS if keep is None else keep, keys, values)


def is_int_at_least(value: object, least: int) -> bool:
    """Whether it is an int, and no bool, from `least` on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _both(bits: object) -> tuple[object, object]:
    """Bits of keys and of values; what isn't understood is left for KVOptions to name."""
    if isinstance(bits, str):
        parts = [part.strip().lower() for part in bits.split(",")]
        bits = tuple(_WORDS.get(part, part) for part in parts)
        bits = bits if len(bits) == 2 else bits[0] if len(bits) == 1 else bits
    if not isinstance(bits, tuple | list):
        return bits, bits
    if len(bits) != 2:
        raise GenerationError(f"cache bits are {bits!r}", "one number for both, or two: 8 or 8,4 or none,4")
    return bits[0], bits[1]

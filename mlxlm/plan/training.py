"""How a model would be trained, as far as work and memory depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from mlxlm.errors import ConfigError
from mlxlm.kernels.attention_paths import LINEAR_MEMORY_FROM
from mlxlm.kernels.cross_entropy import chunk_rows

OPTIMIZERS = ("adamw", "muon", "lion", "adafactor")  # of mlxlm.train.optimizers
DTYPES = {"float32": 4, "bfloat16": 2}  # bytes of a number
ATTENTION = ("plain", "blockwise", "fused")


@dataclass(frozen=True)
class Training:
    """Fields as in `mlxlm.train.TrainSettings`. `dtype`: of the products and activations; weights, gradients and
    optimizer are float32. `ema`: decay of the averaged weights, 0 for none. `attention`: "plain" keeps the
    probabilities `[B, H, T, T]` for the gradient, "blockwise" and "fused" compute them again (None: plain below 1,024
    tokens, blockwise from there on, as training chooses). `loss_chunk`: rows of logits that exist at a time (None: as
    training chooses, 0: all of them).

    Raises ConfigError naming every field that can't work.
    """

    batch_size: int = 16
    sequence_length: int = 256
    accumulate: int = 1
    optimizer: str = "adamw"
    ema: float = 0.0
    dtype: str = "float32"
    recompute: bool = False
    attention: str | None = None
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        if found := list(self._problems()):
            raise ConfigError("this training can't be planned: " + "; ".join(found))

    @classmethod
    def of(cls, settings: Any) -> Training:
        """As `mlxlm.train.TrainSettings` have it."""
        values = {field.name: getattr(settings, field.name) for field in fields(cls) if hasattr(settings, field.name)}
        return cls(**values)

    def _problems(self) -> Iterator[str]:
        for name, least in (("batch_size", 1), ("sequence_length", 1), ("accumulate", 1), ("loss_chunk", 0)):
            value = getattr(self, name)
            if name == "loss_chunk" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
                yield f"{name} is {value!r}, it must be a whole number from {least} up"
        for name, allowed in (("optimizer", OPTIMIZERS), ("dtype", tuple(DTYPES)), ("attention", (None, *ATTENTION))):
            if getattr(self, name) not in allowed:
                yield f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(filter(None, allowed))}"

    @property
    def path(self) -> str:
        """Of attention."""
        return self.attention or ("plain" if self.sequence_length < LINEAR_MEMORY_FROM else "blockwise")

    def loss_rows(self, vocab_size: int) -> int:
        """Rows of logits that exist at a time."""
        rows = self.batch_size * self.sequence_length
        return min(chunk_rows(vocab_size) if self.loss_chunk is None else self.loss_chunk or rows, rows)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length * self.accumulate

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

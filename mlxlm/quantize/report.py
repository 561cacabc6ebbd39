"""What a quantized model costs: sizes, divergence from its source, errors by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxlm.convert.metadata import Check


@dataclass(frozen=True)
class QuantizationMetrics:
    """Source and result on a text that calibration has not seen, in windows of `context_length` tokens that move on by
    `stride`. A search that ends at a KL divergence has measured its candidates on this text.

    kl: mean KL(source || result), nats per token. top1: share of tokens with the same most likely next one.
    hidden_state_errors: relative error of the hidden states after the embedding and each layer. speed: tokens per second of
    decoding, None where the two models don't fit into memory together; speed_note: what to know of it.
    """

    text: str
    tokens: int
    context_length: int
    stride: int
    kl: float
    top1_agreement: float
    bits_per_byte_before: float
    bits_per_byte_after: float
    hidden_state_errors: dict[str, float] = field(repr=False)
    speed_before: float | None
    speed_after: float | None
    speed_note: str | None

    @property
    def bits_per_byte_change(self) -> float:
        return self.bits_per_byte_after - self.bits_per_byte_before


@dataclass(frozen=True)
class QuantizationReport:
    """What was written and what it cost.

    formats: matrix (as in the files) -> group_size, bits and mode; None in 16 bits. regrouped and skipped: matrices
    whose rows the group size doesn't divide: the size they got, or the width that no size divides.
    errors: module -> relative error, of its "outputs" on the calibration text, or of its "weights" where there is
    none (`error_of` says which; a table that is no head has no outputs to err in, its weights' error is given).
    bits: module -> its bits. bytes: of all files that a runtime needs, so without those of this report.
    checks: what was compared after writing, see `check`.
    """

    source: str
    path: str
    method: str
    dtype: str
    parameters: int
    source_bytes: int
    bytes: int
    source_bits_per_weight: float
    bits_per_weight: float
    formats: dict[str, dict[str, Any] | None] = field(repr=False)
    reduced_group_sizes: dict[str, int]
    skipped: dict[str, int]
    bits: dict[str, int] = field(repr=False)
    errors: dict[str, float] = field(repr=False)
    error_of: str
    calibration_text: str | None
    metrics: QuantizationMetrics | None
    seconds: float
    checks: list[Check]
    warnings: list[str]

    def worst_layers(self, n: int = 5) -> list[str]:
        """The modules with the largest errors, worst first; of errors of outputs only those."""
        tables = {"model.embed_positions"} | ({"model.embed_tokens"} if "lm_head" in self.bits else set())
        ranked = [name for name in self.errors if self.error_of == "weights" or name not in tables]
        return sorted(ranked, key=self.errors.get, reverse=True)[:n]

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        if self.metrics is not None:
            values["metrics"]["bits_per_byte_change"] = self.metrics.bits_per_byte_change
        return {**values, "worst_layers": self.worst_layers()}

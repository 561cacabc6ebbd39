"""What a quantized model costs: sizes, divergence from its source, errors by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxlm.convert.metadata import Check


@dataclass(frozen=True)
class QuantizationMetrics:
    """The quantized model compared with its source on a text that isn't used for calibration.

    A search with `max_kl` measures its candidates on this text.

    Attributes:
        text: Name of the text.
        tokens: Number of predicted tokens.
        context_length: Tokens of a window.
        stride: Tokens from the start of one window to the next.
        kl: Mean KL(source || result), nats per token.
        top1_agreement: Share of tokens for which both have the same most likely next token.
        bits_per_byte_before: Of the source.
        bits_per_byte_after: Of the result.
        hidden_state_errors: Relative error of the hidden states after the embedding and each layer.
        speed_before: Decoding speed of the source, tokens per second; None if the two don't fit in memory together.
        speed_after: The same of the result.
        speed_note: Why the speed wasn't measured, or what limits it.
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
        """Increase of the bits per byte."""
        return self.bits_per_byte_after - self.bits_per_byte_before


@dataclass(frozen=True)
class QuantizationReport:
    """What was written and what it costs.

    Attributes:
        source: Path or hub id that was quantized.
        path: The output.
        method: "rtn", "gptq" or "awq".
        dtype: Dtype of scales, biases and everything that isn't quantized.
        parameters: Number of parameters.
        source_bytes: Bytes of the source's tensors.
        bytes: Bytes of all files that a runtime needs, without this report.
        source_bits_per_weight: Average over all parameters of the source.
        bits_per_weight: The same of the output.
        formats: Matrix, as in the files -> group_size, bits and mode; None for 16 bits.
        reduced_group_sizes: Matrix -> its group size, if the requested one doesn't divide its width.
        skipped: Matrix -> its width, if no group size divides it.
        bits: Module -> bits.
        errors: Module -> relative error of `error_of`.
        error_of: "outputs" on the calibration text, or "weights" for rtn. Embeddings have no outputs: the error of
            their weights is given.
        calibration_text: Name of the text; None without calibration.
        metrics: The evaluation; None if it was left out.
        seconds: Duration.
        checks: What was compared after writing; empty without verification.
        warnings: Reasons to read the report with care.
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
        """The modules with the largest errors, worst first; without embeddings if errors are of outputs."""
        tables = {"model.embed_positions"} | ({"model.embed_tokens"} if "lm_head" in self.bits else set())
        ranked = [name for name in self.errors if self.error_of == "weights" or name not in tables]
        return sorted(ranked, key=lambda name: self.errors[name], reverse=True)[:n]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        values = asdict(self)
        if self.metrics is not None:
            values["metrics"]["bits_per_byte_change"] = self.metrics.bits_per_byte_change
        return {**values, "worst_layers": self.worst_layers()}

"""The settings of one quantization, for Python and the command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mlxlm.quantize.quantization_plan import Format
from mlxlm.utils.errors import ArgumentError, ConfigError

METHODS = ("rtn", "gptq", "awq")
_SEARCHES = ("max_size", "target_bpw", "max_kl")


@dataclass(frozen=True)
class QuantizationSettings:
    """How to quantize, calibrate, evaluate and verify.

    At most one of `bits`, `recipe`, `max_size`, `target_bpw` and `max_kl` chooses the bits; without one, all matrices
    get the default bits of the mode.

    Attributes:
        bits: Bits of all matrices; 4 in affine mode.
        group_size: Weights that share a scale; 64 in affine mode. A matrix whose width it doesn't divide gets the
            largest smaller size that does, or stays in 16 bits.
        mode: MLX's quantization mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
        recipe: Mixed bits by a fixed rule, one of RECIPES.
        max_size: Search for the bits of each matrix so that the files take at most this many bytes.
        target_bpw: The same for an average of bits per weight.
        max_kl: The same for a KL divergence from the source on the evaluation text, in nats per token.
        method: "rtn" rounds to nearest, exactly as mlx_lm.convert does for a 16-bit source. "gptq" and "awq" are
            calibrated on a text.
        calibration_text: Text file for calibration and the search for bits. By default a run's training data, else
            part of a built-in text.
        eval_text: Text file to evaluate on. By default a run's validation data, the last tenth of `calibration_text`,
            or the rest of the built-in text.
        evaluate: Compare the result with the source on the evaluation text.
        verify: Read the output again and compare its tensors, tokenizer and configuration with what was computed.
        cross_check: Also run the output with mlx_lm, which must predict the same tokens.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    recipe: str | None = None
    max_size: int | None = None
    target_bpw: float | None = None
    max_kl: float | None = None
    method: str = "rtn"
    calibration_text: Path | str | None = None
    eval_text: Path | str | None = None
    evaluate: bool = True
    verify: bool = True
    cross_check: bool = False

    @property
    def format(self) -> Format:
        """The format of all matrices, or the one that a recipe or a search starts from."""
        return Format.of(self.mode, self.bits, self.group_size)

    @property
    def searches_bits(self) -> bool:
        """Whether the bits of each matrix are searched for."""
        return any(getattr(self, name) is not None for name in _SEARCHES)

    @property
    def needs_calibration_text(self) -> bool:
        """Whether a calibration text is read."""
        return self.method != "rtn" or self.searches_bits

    @property
    def needs_eval_text(self) -> bool:
        """Whether an evaluation text is read."""
        return self.evaluate or self.max_kl is not None

    def check(self) -> None:
        """Check the settings.

        Raises:
            ArgumentError: Two settings contradict each other, or one has no effect.
            ConfigError: A value that doesn't exist or can't work.
        """
        self._check_values()
        targets = [name for name in ("bits", "recipe", *_SEARCHES) if getattr(self, name) is not None]
        if len(targets) > 1:
            raise ArgumentError(f"`{targets[0]}` and `{targets[1]}` both choose the bits", "one of them")
        fixed = [name for name in (*targets, "group_size") if getattr(self, name) is not None]
        if self.mode != "affine" and fixed:
            raise ArgumentError(f"`{fixed[0]}` would have no effect: {self.mode} has fixed bits and a fixed group size")
        if self.mode != "affine" and self.method == "gptq":
            raise ArgumentError(f"`method` gptq needs `mode` affine, not {self.mode}", "awq")
        if self.calibration_text is not None and not self.needs_calibration_text:
            hint = "gptq, or an evaluation text"
            raise ArgumentError("`calibration_text` would have no effect with `method` rtn", hint)
        if self.eval_text is not None and not self.needs_eval_text:
            raise ArgumentError("`eval_text` would have no effect: nothing is evaluated")
        if self.cross_check and not self.verify:
            raise ArgumentError("`cross_check` would have no effect: the output is not verified")

    def _check_values(self) -> None:
        _ = self.format  # raises ConfigError
        if self.method not in METHODS:
            raise ConfigError(f"unknown method {self.method!r}", f"one of {', '.join(METHODS)}")
        for name in _SEARCHES:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ArgumentError(f"`{name}` must be a positive number, not {value!r}")

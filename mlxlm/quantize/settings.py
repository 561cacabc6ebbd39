"""The settings of one quantization, for Python and the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlxlm.config.option import option, range_problems
from mlxlm.config.quantization import BITS, GROUP_SIZES, MODES, RECIPES, Format
from mlxlm.utils.errors import ArgumentError

METHODS = ("rtn", "gptq", "awq")
_SEARCHES = ("max_size", "target_bpw", "max_kl")
_bits = partial(option, section="Bits")
_method = partial(option, section="Method")
_output = partial(option, section="Output")


@dataclass(frozen=True)
class QuantizationSettings:
    """How to quantize, calibrate, evaluate and verify.

    At most one of `bits`, `recipe`, `max_size`, `target_bpw` and `max_kl` chooses the bits; without one, all matrices
    get the default bits of the mode. A matrix whose width `group_size` doesn't divide gets the largest smaller size
    that does, or stays in 16 bits. `method` "rtn" gives exactly what mlx_lm.convert gives for a 16-bit source, if
    `mode` is affine.
    """

    bits: int | None = _bits(None, "Bits of all matrices.", common=True, choices=BITS, default_text="4")
    group_size: int | None = _bits(
        None,
        "Weights that share a scale. Smaller groups are more precise and larger.",
        choices=GROUP_SIZES,
        default_text="64; chosen with the bits, if they are",
    )
    mode: str = _bits(
        "affine",
        "Number format. affine has a scale and bias per group; the others are floating point, with fixed bits and "
        "groups.",
        common=True,
        choices=tuple(MODES),
    )
    recipe: str | None = _bits(None, "Mixed bits by a fixed rule, as in mlx_lm.", common=True, choices=tuple(RECIPES))
    max_size: int | None = _bits(
        None,
        "Choose bits per matrix so that the files have at most this many bytes: 2.0GB.",
        common=True,
        above=0,
        metavar="SIZE",
    )
    target_bpw: float | None = _bits(None, "Choose bits per matrix for this average of bits per weight: 4.5.", above=0)
    max_kl: float | None = _bits(
        None, "Choose bits per matrix for at most this KL divergence, in nats per token: 0.02.", above=0
    )
    method: str = _method(
        "gptq",
        "gptq and awq calibrate on a text. gptq is the closest to SOURCE at equal size. rtn rounds to nearest, in "
        "seconds.",
        common=True,
        choices=METHODS,
    )
    calibration_text: Path | str | None = _method(
        None,
        "Text for gptq, awq, --recover and the choice of bits, ideally like what the model will read.",
        common=True,
        metavar="PATH",
        default_text="a run's training data, else built in",
    )
    recover: bool = _method(
        False,
        "Then train scales, biases and norms on the calibration text, to the logits of SOURCE. Takes longer than gptq.",
        common=True,
    )
    eval_text: Path | str | None = _output(
        None,
        "Text to evaluate on, its first 4096 tokens.",
        common=True,
        metavar="PATH",
        default_text="a run's validation data, a part of --calibration-text, else built in",
    )
    evaluate: bool = _output(True, "Compare the result with SOURCE on the evaluation text.")
    verify: bool = _output(True, "Read the files again to check them.")

    @property
    def format(self) -> Format:
        """The format of all matrices, or the one that a recipe or a search starts from."""
        return Format.of(self.mode, self.bits, self.group_size)

    @property
    def searches_bits(self) -> bool:
        """Whether the bits of each matrix are chosen by what they cost."""
        return any(getattr(self, name) is not None for name in _SEARCHES)

    @property
    def needs_calibration_text(self) -> bool:
        """Whether a calibration text is read."""
        return self.method != "rtn" or self.searches_bits or self.recover

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
        if problems := [re.sub(r"^\w+", r"`\g<0>`", problem) for problem in range_problems(self)]:
            raise ArgumentError("; ".join(problems))
        _ = self.format  # raises ConfigError
        targets = [name for name in ("bits", "recipe", *_SEARCHES) if getattr(self, name) is not None]
        if len(targets) > 1:
            raise ArgumentError(f"`{targets[0]}` and `{targets[1]}` both choose the bits", "one of them")
        fixed = [name for name in (*targets, "group_size") if getattr(self, name) is not None]
        if self.mode != "affine" and fixed:
            raise ArgumentError(f"`{fixed[0]}` would have no effect: {self.mode} has fixed bits and a fixed group size")
        if self.calibration_text is not None and not self.needs_calibration_text:
            hint = "gptq, `recover`, or an evaluation text"
            raise ArgumentError("`calibration_text` would have no effect with `method` rtn", hint)
        if self.eval_text is not None and not self.needs_eval_text:
            raise ArgumentError("`eval_text` would have no effect: nothing is evaluated")

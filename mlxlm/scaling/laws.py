"""The form of a scaling law, what it predicts, and the best use of a budget that follows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

OPERATIONS = 6  # of training, for each parameter and token (Kaplan et al. 2020, 2.1)
_WORTH = 15.39  # passes after which a repeated token has lost most of its worth (Muennighoff et al. 2023, 3.1)
FEW_PASSES = 4.0  # up to here repeated text is nearly as good as new text (the same)

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = floor + scale / x^exponent, in nats per token; x: parameters, or tokens."""

    floor: float
    scale: float
    exponent: float

    def loss(self, x: Number) -> Number:
        return self.floor + self.scale * x**-self.exponent

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token, of N parameters trained on D tokens (Hoffmann et al.
    2022, "Training Compute-Optimal Large Language Models", equation 2)."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: Number, tokens: Number) -> Number:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def optimum(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss that `flops` = 6 N D operations reach (the same, equation 4):
        N = G (C/6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta))."""
        each = flops / OPERATIONS
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = scale * each ** (self.beta / (self.alpha + self.beta))
        return parameters, each / parameters

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def worth(tokens: float, unique: float) -> float:
    """How many new tokens `tokens` are worth when they are passes over a text of `unique` ones: U + 15.39 U
    (1 - exp(-R / 15.39)) with R passes after the first (Muennighoff et al. 2023, "Scaling Data-Constrained Language
    Models", equation 5). Four passes are worth 3.7 texts, and no number of them 16.4."""
    if tokens <= unique:
        return tokens
    again = tokens / unique - 1
    return unique * (1 + _WORTH * (1 - math.exp(-again / _WORTH)))

"""The form of a scaling law, what it predicts, and the best use of a budget that follows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

FLOPS_PER_PARAM_TOKEN = 6  # of training, for each parameter and token (Kaplan et al. 2020, 2.1)
# Repetitions after which another one adds little, of tokens and of parameters (Muennighoff et al. 2023, 6 and A).
_OF_TOKENS, _OF_PARAMETERS = 15.39, 5.31
FULL_VALUE_EPOCHS = 4.0  # up to here repeated text is nearly as good as new text (the same)

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = floor + scale / x^exponent, in nats per token; x: parameters, or tokens."""

    irreducible_loss: float
    scale: float
    exponent: float

    def loss(self, x: Number) -> Number:
        return self.irreducible_loss + self.scale * x**-self.exponent

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token, of N parameters trained on D tokens (Hoffmann et al.
    2022, "Training Compute-Optimal Large Language Models", equation 2)."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: Number, tokens: Number) -> Number:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def compute_optimal(self, flops: float) -> tuple[float, float]:
        """Parameters and tokens of the lowest loss that `flops` = 6 N D operations reach (the same, equation 4):
        N = G (C/6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta))."""
        each = flops / FLOPS_PER_PARAM_TOKEN
        parameters = _exp((self._ratio() + self.beta * math.log(each)) / (self.alpha + self.beta))
        return parameters, each / parameters

    def optimal_tokens(self, parameters: float) -> float:
        """Tokens on which a model of this size is compute-optimal: N's term falls as fast as D's."""
        return _exp((self.alpha * math.log(parameters) - self._ratio()) / self.beta)

    def optimal_parameters(self, tokens: float) -> float:
        """The inverse of `optimal_tokens`."""
        return _exp((self._ratio() + self.beta * math.log(tokens)) / self.alpha)

    def loss_with_repetition(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """The loss where the tokens are passes over a text of `unique_tokens` ones: those after the first count less and less,
        and so do parameters above the compute-optimal ones of the text, which learn it by heart (Muennighoff et al.
        2023, "Scaling Data-Constrained Language Models", equation 4)."""
        few = self.optimal_parameters(min(tokens, unique_tokens))
        return self.loss(effective_amount(parameters, few, _OF_PARAMETERS), effective_amount(tokens, unique_tokens))

    def _ratio(self) -> float:
        small = 1e-300  # a term that the runs don't show is fitted as none
        return math.log(self.alpha * self.A + small) - math.log(self.beta * self.B + small)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def _exp(x: float) -> float:
    """Of laws with exponents near 0, too: finite, and not 0."""
    return math.exp(min(300.0, max(-300.0, x)))


# Of text from the web (Hoffmann et al. 2022, equation 10). Its best models have 5 tokens a parameter at 0.03M
# parameters, 8 at 0.4M and 16 at 10M: 20 for each would make the smallest ones smaller than they should be.
CHINCHILLA_LAW = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)


def effective_amount(amount: float, unique_tokens: float, decay: float = _OF_TOKENS) -> float:
    """How many new tokens `amount` are worth when they are passes over a text of `unique_tokens` ones: U + f U
    (1 - exp(-R / f)) with R passes after the first and f = `decay` (Muennighoff et al. 2023, equation 5). Four passes
    are worth 3.7 texts, and no number of them 16.4."""
    if amount <= unique_tokens:
        return amount
    again = amount / unique_tokens - 1
    return unique_tokens * (1 + decay * (1 - math.exp(-again / decay)))

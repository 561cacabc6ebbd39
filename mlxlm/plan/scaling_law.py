"""Scaling laws: the loss as a function of parameters and tokens, and the compute-optimal model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

FLOPS_PER_PARAM_TOKEN = 6  # of training (Kaplan et al. 2020, section 2.1)
_TOKEN_DECAY = 15.39  # epochs after which another one adds little (Muennighoff et al. 2023, section 6)
# The same for the choice of a model, and for parameters as multiples of those that are compute-optimal for the text.
# Muennighoff et al. have 15.39 and 5.31 for models without dropout and with little weight decay. With more of both,
# larger models and fewer epochs were better, see docs/recipes.md.
_REGULARIZED_TOKEN_DECAY, _REGULARIZED_PARAMETER_DECAY = 7.0, 50.0
FULL_VALUE_EPOCHS = 4.0  # up to here, repeated text is nearly as good as new text (the same)

Number = TypeVar("Number", float, np.ndarray)


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = irreducible_loss + scale / x^exponent, in nats per token, for x parameters or tokens."""

    irreducible_loss: float
    scale: float
    exponent: float

    def loss(self, x: Number) -> Number:
        """Predict the loss at `x`."""
        return self.irreducible_loss + self.scale * x**-self.exponent


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token, for N parameters trained on D tokens.

    Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", equation 2.
    """

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: Number, tokens: Number) -> Number:
        """Predict the loss of a model."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def compute_optimal(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens of the lowest loss for a budget of `flops` = 6 N D operations.

        N = G (C/6)^(beta / (alpha + beta)), G = (alpha A / (beta B))^(1 / (alpha + beta)) (the same, equation 4).
        """
        product = flops / FLOPS_PER_PARAM_TOKEN
        parameters = _exp((self._log_ratio() + self.beta * math.log(product)) / (self.alpha + self.beta))
        return parameters, product / parameters

    def optimal_tokens(self, parameters: float) -> float:
        """Return the tokens for which a model of this size is compute-optimal."""
        return _exp((self.alpha * math.log(parameters) - self._log_ratio()) / self.beta)

    def optimal_parameters(self, tokens: float) -> float:
        """Return the compute-optimal model size for `tokens`, the inverse of `optimal_tokens`."""
        return _exp((self._log_ratio() + self.beta * math.log(tokens)) / self.alpha)

    def loss_with_repetition(self, parameters: float, tokens: float, unique_tokens: float) -> float:
        """Predict the loss if the tokens are several epochs of a text of `unique_tokens` tokens.

        Later epochs count less and less, and so do parameters beyond the compute-optimal ones of the text, which
        memorize it (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models", equation 4).
        """
        optimal = self.optimal_parameters(min(tokens, unique_tokens))
        effective_parameters = effective_amount(parameters, optimal, _REGULARIZED_PARAMETER_DECAY)
        return self.loss(effective_parameters, effective_amount(tokens, unique_tokens, _REGULARIZED_TOKEN_DECAY))

    def _log_ratio(self) -> float:
        small = 1e-300  # the fit can make a term 0
        return math.log(self.alpha * self.A + small) - math.log(self.beta * self.B + small)


def _exp(x: float) -> float:
    """Return e^x, finite and not 0 also for laws with exponents near 0."""
    return math.exp(min(300.0, max(-300.0, x)))


# Fitted on web text (Hoffmann et al. 2022, equation 10). Its compute-optimal models have 5 tokens per parameter at
# 0.03M parameters, 8 at 0.4M and 16 at 10M: 20 per parameter would make the smallest ones too small.
CHINCHILLA_LAW = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)


def effective_amount(amount: float, unique_tokens: float, decay: float = _TOKEN_DECAY) -> float:
    """Return how many new tokens `amount` tokens are worth, if they are epochs of `unique_tokens` tokens.

    U + f U (1 - exp(-R / f)) with R epochs after the first and f = `decay` (Muennighoff et al. 2023, equation 5). Four
    epochs are worth 3.7 texts, and any number of them less than 16.4.
    """
    if amount <= unique_tokens:
        return amount
    repetitions = amount / unique_tokens - 1
    return unique_tokens * (1 + decay * (1 - math.exp(-repetitions / decay)))

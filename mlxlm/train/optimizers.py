"""Building the optimizer of a run from `mlxlm.config.optimizers`, and defaults that depend on model and data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mlxlm.backend.mlx import mx, optim, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.config.mup import mup_factors
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.model import Decoder
from mlxlm.train.low_precision import LowPrecision, separate_kernels
from mlxlm.train.settings import TrainSettings

_MUON_MOMENTUM = 0.95  # Jordan et al. 2024; Liu et al. 2025
_MUON_UPDATE_RMS = 0.2  # of an AdamW update, usually between 0.2 and 0.4 (Liu et al. 2025, 2.2)
_MUP_LEARNING_RATE = 0.01  # of AdamW, at every size: that of the smallest models in `learning_rate_by_size`

Filter = Callable[[str, mx.array], bool]  # whether an optimizer updates the weight of this name


def make_optimizer(settings: TrainSettings, model: Decoder | None = None) -> optim.MultiOptimizer:
    """Build the optimizer that the settings name, for the weights of `model`, which only µP needs.

    With µP, weights with the same factor of the learning rate have optimizers of their own, with as much more weight
    decay: a step's decay, learning rate times weight decay, is the same for all sizes (Wang & Aitchison 2024, "How to
    set AdamW's weight decay as you scale model and dataset size").
    """
    if settings.parametrization == "standard":
        optimizers, filters = _optimizers(settings)
        return optim.MultiOptimizer(optimizers, filters[:-1])
    assert model is not None
    config, uses_muon = model.config, OPTIMIZERS[settings.optimizer].layer_matrices == "muon"

    def factor_of(name: str, weight: mx.array) -> float:
        return mup_factors(config, name, weight.ndim, uses_muon)[1]

    def is_updated(factor: float, updates: Filter, name: str, weight: mx.array) -> bool:
        return factor_of(name, weight) == factor and updates(name, weight)

    factors = sorted({factor_of(*item) for item in tree_flatten(model.trainable_parameters())})
    groups = [(factor, *pair) for factor in factors for pair in zip(*_optimizers(settings, factor), strict=True)]
    filters = [partial(is_updated, factor, updates) for factor, _, updates in groups]
    return _ScaledOptimizers([optimizer for _, optimizer, _ in groups], filters[:-1], [group[0] for group in groups])


class _ScaledOptimizers(optim.MultiOptimizer):
    """Several optimizers, each with a factor of the learning rate."""

    def __init__(self, optimizers: list[optim.Optimizer], filters: list[Filter], factors: list[float]):
        super().__init__(optimizers, filters)
        self._factors = factors

    @property
    def learning_rate(self) -> mx.array:
        """The learning rate without factors."""
        return self.optimizers[0].learning_rate / self._factors[0]

    @learning_rate.setter
    def learning_rate(self, learning_rate: mx.array) -> None:
        for optimizer, factor in zip(self.optimizers, self._factors, strict=True):
            optimizer.learning_rate = learning_rate * factor


def _optimizers(settings: TrainSettings, factor: float = 1.0) -> tuple[list[LowPrecision], list[Filter]]:
    """Return optimizers, and which weights each updates unless an earlier one does, for a factor of the learning rate.

    Weight decay applies to matrices only: pulling norms and biases to zero has no regularizing effect (nanoGPT and
    GPT-3 do the same). Muon updates the matrices of the layers; AdamW updates embeddings, head and vectors (Jordan et
    al. 2024).
    """
    spec = OPTIMIZERS[settings.optimizer]
    arguments, weight_decay = dict(spec.arguments), (settings.weight_decay or 0.0) / factor
    if spec.beta2 is not None:
        arguments["betas"] = [settings.beta1, settings.beta2]
    optimizer = {"AdamW": AdamW, "Lion": Lion, "Adafactor": Adafactor}[spec.mlx_class]
    optimizers: list[LowPrecision] = [
        optimizer(settings.learning_rate, weight_decay=w, **arguments) for w in (weight_decay, 0.0)
    ]
    filters: list[Filter] = [lambda _name, weight: weight.ndim >= 2, lambda _name, _weight: True]
    if spec.layer_matrices == "muon":
        optimizers.insert(0, Muon(settings.learning_rate, weight_decay))
        filters.insert(0, lambda name, weight: weight.ndim >= 2 and ".layers." in name)
    for each in optimizers:
        each.state_dtype = settings.optimizer_state
    return optimizers, filters


class _AdamW(optim.AdamW):
    """MLX's AdamW with bias correction, in three kernels that write over their arguments: see `separate_kernels`."""

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the updated `parameter`."""
        (beta1, beta2), rate, step = self.betas, self.learning_rate, self.step
        m = beta1 * state["m"] + (1 - beta1) * gradient
        v = beta2 * state["v"] + (1 - beta2) * gradient.square()
        state["m"], state["v"] = m, v = separate_kernels([m, v], gradient)
        corrected = rate / (1 - beta1**step) * m / (mx.sqrt(v) * mx.rsqrt(1 - beta2**step) + self.eps)
        return parameter * (1 - rate * self.weight_decay) - corrected


class _Muon(optim.Muon):
    """MLX's Muon (Jordan et al. 2024), with decoupled weight decay and updates as large as AdamW's.

    An orthogonal `[r, c]` matrix has the root mean square 1 / sqrt(max(r, c)). Times 0.2 · sqrt(max(r, c)), every
    matrix moves by 0.2 of the learning rate, like AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", 2.2).
    MLX's class scales by the shape only, and adds the decay to the gradient, which the orthogonalization undoes.
    """

    def __init__(self, learning_rate: float, weight_decay: float):
        super().__init__(learning_rate, momentum=_MUON_MOMENTUM, weight_decay=0.0)
        self.decoupled_decay = weight_decay

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the updated `parameter`, a matrix `[r, c]`, or those of experts, `[E, r, c]`."""
        if parameter.ndim == 3:
            states = [{"v": momentum} for momentum in state["v"]]
            experts = [_Muon.apply_single(self, g, p, s) for g, p, s in zip(gradient, parameter, states, strict=True)]
            state["v"] = mx.stack([s["v"] for s in states])
            return mx.stack(experts)
        rows, columns = parameter.shape
        update = super().apply_single(gradient, mx.zeros_like(parameter), state)
        scale = _MUON_UPDATE_RMS * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        return parameter * (1 - self.learning_rate * self.decoupled_decay) + scale * update


class AdamW(LowPrecision, _AdamW):
    """AdamW, see `LowPrecision`."""

    squares = ("v",)


class Muon(LowPrecision, _Muon):
    """Muon, see `LowPrecision`."""


class Lion(LowPrecision, optim.Lion):
    """MLX's Lion, see `LowPrecision`."""


class Adafactor(LowPrecision, optim.Adafactor):
    """MLX's Adafactor, see `LowPrecision`."""


def default_weight_decay(optimizer: str, epochs: float) -> float:
    """Return the default weight decay: ten times the usual one for more than `many_epochs` of the optimizer.

    For repeated text the best decay is many times the usual one (Kim et al. 2025, "Pre-training under infinite
    compute": 30 times). Measured, one run each of 0.7M to 0.9M parameters, bits per byte of the last tenth with 0.1 and
    with 1.0, the best of the run: about 30 epochs of tinyshakespeare 2.142 and 2.072, of 450 kB of WikiText-2 2.040 and
    1.956, of 450 kB of Python's library 2.040 and 1.928. About 10 epochs of WikiText-2 1.940 and 1.963, of Python's
    library 1.932 and 1.920; 6 of tinyshakespeare 2.128 and 2.146. Where the end of a text repeats its beginning, as in
    Python's language reference, memorizing is right: 15 epochs 1.145 and 1.345. All of these are for AdamW;
    docs/recipes.md has Muon's.
    """
    spec = OPTIMIZERS[optimizer]
    return (10 if epochs > spec.many_epochs else 1) * spec.weight_decay


def default_learning_rate(config: ModelConfig, optimizer: str = "adamw", parametrization: str = "standard") -> float:
    """Return the default peak learning rate: `learning_rate_by_size`, a third of it for post-norm models.

    Norms after the addition need a lower rate (Xiong et al. 2020). With them a run of 200 steps may still learn nothing
    but the frequencies of tokens. One seed each, 96 wide, validation in nats, frequencies being 5.39: 3 layers 4.10
    (pre-norm: 3.55), 12 layers 4.65 (4.03), 24 layers 5.39. The warmup matters as much: 3 layers at the whole rate stay
    at 5.40 with 50 warmup steps and reach 3.68 with 100.
    """
    if parametrization == "mup":
        return OPTIMIZERS[optimizer].lr_scale * _MUP_LEARNING_RATE
    rate = learning_rate_by_size(config.active_parameter_count(), optimizer)
    return rate / 3 if config.layer_norms.after_addition else rate


def learning_rate_by_size(parameters: int, optimizer: str = "adamw") -> float:
    """Return the default peak learning rate by model size, for AdamW 6e-4 · (N / 125M)^-0.39, at most 0.01.

    The power law runs near GPT-3's rates from 125M to 1.3B parameters (Brown et al. 2020, table 2.1), and through 6e-3
    at 0.4M parameters, where 1e-2 did no better on a megabyte of plays.
    """
    spec = OPTIMIZERS[optimizer]
    return max(spec.min_lr, spec.lr_scale * min(0.01, 6e-4 * (parameters / 125e6) ** -0.39))

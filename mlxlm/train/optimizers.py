"""The optimizers: MLX's own, which weights each of them moves, and what they do by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxlm.backend.mlx import mx, optim

if TYPE_CHECKING:
    from mlxlm.config import ModelConfig
    from mlxlm.train.settings import TrainSettings

_MUON_MOMENTUM = 0.95  # of Jordan et al. 2024 and of Moonshot 2025
_MANY_PASSES = 16  # over the text, see `default_weight_decay`
_MATCHED_RMS = 0.2  # of an AdamW update, usually between 0.2 and 0.4 (Liu et al. 2025, 2.2)


@dataclass(frozen=True)
class OptimizerDefaults:
    """weight_decay is decoupled. beta1 and beta2: averages of the gradient and of what it is divided by; beta2 None:
    there are none to choose. rate: the peak learning rate as a multiple of AdamW's, at least `min_lr`."""

    weight_decay: float
    beta1: float
    beta2: float | None
    rate: float = 1.0
    min_lr: float = 0.0


OPTIMIZER_DEFAULTS = {
    # 0.1 and 0.95 are GPT-3's: 0.999 averages over longer than a short run lasts (Brown et al. 2020, appendix B).
    "adamw": OptimizerDefaults(0.1, 0.9, 0.95),
    # Its updates are as large as AdamW's, so that rate and decay carry over (Liu et al. 2025, 2.2); betas of the rest.
    "muon": OptimizerDefaults(0.1, 0.9, 0.95),
    # A sign is larger than an AdamW update: 3 to 10 times less rate, as much more decay; betas for language models
    # (Chen et al. 2023, 5). A tenth did best: 2.66 bits per byte, a fifth 2.75, a twentieth 2.90 (see below).
    "lion": OptimizerDefaults(0.5, 0.95, 0.98, rate=0.1),
    # Rates are relative to the size of a weight: 0.01 (Shazeer & Stern 2018, 8), which is too little for a small
    # model: 2.82 bits per byte with 0.01, 2.54 with 0.04 (see below). No momentum and no decay, as in T5.
    "adafactor": OptimizerDefaults(0.0, 0.0, None, rate=5.0, min_lr=0.01),
}
# Measured, one run each: tinyshakespeare's last tenth after 400 steps of 1,024 tokens, 0.2M parameters, where AdamW at
# 0.008 gives 2.504, Muon at 0.008 2.503 and at 0.016 2.489. A Muon step took a third to a half more processor time.
OPTIMIZERS = tuple(OPTIMIZER_DEFAULTS)


def default_weight_decay(optimizer: str, passes: float) -> float:
    """The decay where the text is seen so many times: ten times the usual for many, which are learned by heart.

    For repeated text the best decay is many times the usual one (Kim et al. 2025, "Pre-training under infinite
    compute": 30 times). Measured, one run each of 0.7M to 0.9M parameters, bits per byte of the last tenth with 0.1 and
    with 1.0, the best of the run: about 30 passes over tinyshakespeare 2.142 and 2.072, over 450 kB of WikiText-2 2.040
    and 1.956, over 450 kB of Python's library 2.040 and 1.928. About 10 passes over WikiText-2 1.940 and 1.963, over
    Python's library 1.932 and 1.920; 6 over tinyshakespeare 2.128 and 2.146. Where the end of a text repeats its
    beginning, as in Python's language reference, learning by heart is right: 15 passes 1.145 and 1.345.
    """
    usual = OPTIMIZER_DEFAULTS[optimizer].weight_decay
    return 10 * usual if passes > _MANY_PASSES else usual


def default_learning_rate(config: ModelConfig, optimizer: str = "adamw") -> float:
    """A peak learning rate for the model: `learning_rate_by_size`, and a third of it where norms are after the addition, which
    asks for less (Xiong et al. 2020).

    With norms after the addition a run of 200 steps may still learn nothing but the frequencies of tokens. One seed
    each, 96 wide, validation in nats, frequencies being 5.39: 3 layers 4.10 (before the addition: 3.55), 12 layers 4.65
    (4.03), 24 layers 5.39. The warm-up matters as much: 3 layers at the whole rate stay at 5.40 with 50 steps of it
    and come to 3.68 with 100.
    """
    rate = learning_rate_by_size(config.parameter_count(), optimizer)
    return rate / 3 if config.norm_placement == "post" else rate


def learning_rate_by_size(parameters: int, optimizer: str = "adamw") -> float:
    """A peak learning rate by model size, for AdamW 6e-4 · (N / 125M)^-0.39, at most 0.01.

    The power law runs near GPT-3's rates from 125M to 1.3B parameters (Brown et al. 2020, table 2.1), and
    through 6e-3 at 0.4M parameters, where 1e-2 did no better on a megabyte of plays.
    """
    defaults = OPTIMIZER_DEFAULTS[optimizer]
    return max(defaults.min_lr, defaults.rate * min(0.01, 6e-4 * (parameters / 125e6) ** -0.39))


def make_optimizer(settings: TrainSettings) -> optim.MultiOptimizer:
    """The optimizer that the settings name, for the weights of a `Decoder`, by their names.

    Decay applies to matrices only: pulling norms and biases to zero has no regularising effect (nanoGPT and GPT-3 do
    the same). Muon moves the matrices of the layers; embeddings, head and vectors are AdamW's (Jordan et al. 2024).
    """
    kinds = {"adamw": _adamw, "muon": _adamw, "lion": _lion, "adafactor": _adafactor}
    make = kinds[settings.optimizer]
    optimizers = [make(settings, settings.weight_decay), make(settings, 0.0)]
    filters = [lambda _name, weight: weight.ndim >= 2]
    if settings.optimizer == "muon":
        optimizers.insert(0, Muon(settings.learning_rate, settings.weight_decay))
        filters.insert(0, lambda name, weight: weight.ndim >= 2 and ".layers." in name)
    return optim.MultiOptimizer(optimizers, filters)


class Muon(optim.Muon):
    """MLX's Muon (Jordan et al. 2024), with decoupled weight decay and updates as large as AdamW's.

    An orthogonal `[r, c]` matrix has the root mean square 1 / sqrt(max(r, c)); times 0.2 · sqrt(max(r, c)), every
    matrix moves by 0.2 of the learning rate, like AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", 2.2).
    MLX's class scales by the shape only, and adds the decay to the gradient, which orthogonalisation undoes.
    """

    def __init__(self, learning_rate: float, weight_decay: float):
        super().__init__(learning_rate, momentum=_MUON_MOMENTUM, weight_decay=0.0)
        self.decoupled_decay = weight_decay

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        rows, columns = parameter.shape
        moved = super().apply_single(gradient, mx.zeros_like(parameter), state)
        scale = _MATCHED_RMS * max(rows, columns) ** 0.5 / max(1, rows / columns) ** 0.5
        return parameter * (1 - self.learning_rate * self.decoupled_decay) + scale * moved


def _adamw(settings: TrainSettings, decay: float) -> optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return optim.AdamW(settings.learning_rate, betas=betas, weight_decay=decay, bias_correction=True)


def _lion(settings: TrainSettings, decay: float) -> optim.Optimizer:
    return optim.Lion(settings.learning_rate, betas=(settings.beta1, settings.beta2), weight_decay=decay)


def _adafactor(settings: TrainSettings, decay: float) -> optim.Optimizer:
    return optim.Adafactor(settings.learning_rate, weight_decay=decay, relative_step=False)

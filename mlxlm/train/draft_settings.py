"""The settings of a draft head's training, for Python and the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from mlxlm.config.option import option, range_problems
from mlxlm.utils.errors import ArgumentError

_training = partial(option, section="Training")


@dataclass(frozen=True)
class DraftSettings:
    """How much to generate, and how to train on it."""

    num_tokens: int = _training(
        100_000, "Tokens to train on: half of them text, half what MODEL writes after it.", common=True, low=4096
    )
    vocab_size: int = _training(
        8192, "Tokens that the head can draft, the most frequent ones; none other is ever drafted.", low=16
    )
    epochs: int = _training(4, "Passes over the tokens.", common=True, low=1)
    learning_rate: float = _training(1e-3, "Peak learning rate of AdamW.", above=0, high=1)
    seed: int = _training(0, "Random seed.", low=0)

    def __post_init__(self) -> None:
        if problems := [re.sub(r"^\w+", r"`\g<0>`", problem) for problem in range_problems(self)]:
            raise ArgumentError("; ".join(problems))

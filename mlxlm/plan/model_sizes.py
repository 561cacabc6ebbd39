"""A family of models that differ in size alone: one aspect ratio, so that a law of the size can hold for all."""

from __future__ import annotations

import math
import re

from mlxlm.config import ModelConfig
from mlxlm.utils.errors import ConfigError

_WIDTH_PER_LAYER = 32  # of the smaller presets; the loss hardly depends on it (Kaplan et al. 2020, figure 5)
_LARGEST = 2048  # hidden size
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def model_of_width(hidden_size: int, vocab_size: int) -> ModelConfig:
    """The member of this hidden size: a layer for each 32 of it, feed-forward 8/3 as wide as the stream, heads of 64
    (of 32 or 16 where the model is narrow), embedding and head tied."""
    head = 64 if hidden_size >= 256 and hidden_size % 64 == 0 else 32 if hidden_size % 32 == 0 else 16
    return ModelConfig(
        hidden_size=hidden_size,
        num_hidden_layers=int(hidden_size / _WIDTH_PER_LAYER + 0.5),
        num_attention_heads=hidden_size // head,
        intermediate_size=-(-8 * hidden_size // 3 // 16) * 16,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def model_family(vocab_size: int) -> list[ModelConfig]:
    """All members, from the smallest to the largest."""
    return [model_of_width(hidden_size, vocab_size) for hidden_size in (*range(32, 160, 16), *range(160, 512, 32),
                                                        *range(512, _LARGEST + 1, 64))]  # fmt: skip


def nearest_model(parameters: float, vocab_size: int) -> ModelConfig:
    """The member whose parameters, embedding included, are nearest to so many, as a ratio."""
    return min(model_family(vocab_size), key=lambda c: abs(math.log(c.parameter_count() / parameters)))


def parse_size(text: str) -> float:
    """A number of parameters: 0.3m, 300k, 1.2b, 5e6. Raises ConfigError otherwise."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)([kmb]?)\s*", text.lower())
    try:
        value = float(found[1]) * _UNITS[found[2]]
    except (TypeError, ValueError):
        value = 0.0
    if not 0 < value < 1e13:
        raise ConfigError(f"{text!r} is no number of parameters", "0.3m, 300k or 1.2b")
    return value


def vocab_size_for(parameters: float) -> int:
    """Tokens of a tokenizer for a model of about so many parameters: 512 at 0.1M, 1,024 at 0.4M and twice as many for
    each 4 times the parameters, up to 32,768, near the presets'. A larger one would take most of the parameters."""
    power = 9 + max(0.0, math.log(parameters / 1e5, 4))
    return 2 ** min(15, int(power + 0.5))

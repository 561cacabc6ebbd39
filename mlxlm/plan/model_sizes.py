"""A family of models that differ only in size, with one aspect ratio, for scaling laws."""

from __future__ import annotations

import math
import re
from functools import cache

from mlxlm.config import ModelConfig
from mlxlm.utils.errors import ConfigError

_WIDTH_PER_LAYER = 32  # as in the smaller presets; the loss hardly depends on it (Kaplan et al. 2020, figure 5)
_MAX_HIDDEN_SIZE = 2048
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}


def model_of_width(hidden_size: int, vocab_size: int) -> ModelConfig:
    """Return the model of this hidden size.

    One layer per 32 of hidden size, an intermediate size of 8/3 of it, heads of 64 dimensions (32 or 16 in narrow
    models), tied embeddings.
    """
    head_dim = 64 if hidden_size >= 256 and hidden_size % 64 == 0 else 32 if hidden_size % 32 == 0 else 16
    return ModelConfig(
        hidden_size=hidden_size,
        num_hidden_layers=int(hidden_size / _WIDTH_PER_LAYER + 0.5),
        num_attention_heads=hidden_size // head_dim,
        intermediate_size=-(-8 * hidden_size // 3 // 16) * 16,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


@cache
def model_family(vocab_size: int) -> tuple[ModelConfig, ...]:
    """List all models of the family, from the smallest to the largest."""
    widths = (*range(32, 160, 16), *range(160, 512, 32), *range(512, _MAX_HIDDEN_SIZE + 1, 64))
    return tuple(model_of_width(width, vocab_size) for width in widths)


def nearest_model(parameters: float, vocab_size: int) -> ModelConfig:
    """Return the model whose parameter count, embeddings included, is closest in ratio."""
    return min(model_family(vocab_size), key=lambda c: abs(math.log(c.parameter_count() / parameters)))


def parse_size(text: str) -> float:
    """Parse a number of parameters: 0.3m, 300k, 1.2b, 5e6.

    Raises:
        ConfigError: The text is no such number.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)([kmb]?)\s*", text.lower())
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e13:
        raise ConfigError(f"{text!r} is not a number of parameters", "0.3m, 300k or 1.2b")
    return value


def vocab_size_for(parameters: float) -> int:
    """Return a vocabulary size for a model of about this many parameters.

    1,024 at 0.1M, 2,048 at 0.4M, doubled for each 4 times the parameters, up to 32,768: twice that of the presets, see
    docs/recipes.md. The embeddings of a larger vocabulary would be most of the model.
    """
    power = 10 + max(0.0, math.log(parameters / 1e5, 4))
    return 2 ** min(15, int(power + 0.5))

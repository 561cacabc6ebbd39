"""How many tokens of a prompt are read at once while other texts are decoded."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.config import ModelConfig, counts

MIN_CHUNK_TOKENS = 32  # rows of a tile of MLX's quantized products; with fewer, reading the weights takes longer
_UNKNOWN_CHUNK = 512  # of models whose products aren't counted
# Of attention's matrix products, the softmax between them included, relative to those of the layers' weights. Measured
# on a CPU with two cores; not measured on a GPU.
_ATTENTION_COST = 6 if ON_CPU else 1
# Products in the time in which a GPU reads a byte: 26 to 49 by the specifications of M1 to M5, 295 of an H100.
_FLOPS_PER_BYTE = 32 if mx.metal.is_available() else 256


def chunk_size(config: object, weight_bytes: int, num_read: int) -> int:
    """How many tokens of a prompt are read between two decoding steps of other texts.

    On a GPU as many as take the time of a decoding step, which reads the weights, so that the longest gap between two
    tokens of another text is that of two steps; but at least `MIN_CHUNK_TOKENS`. On a CPU, where small products are
    slow, as many as take the time of the first `PREFILL_STEP_SIZE` tokens.

    Args:
        config: The model's configuration. Those of other classes than `ModelConfig` get constant chunks.
        weight_bytes: Bytes of the weights.
        num_read: The number of tokens before the chunk.
    """
    if not isinstance(config, ModelConfig):
        return _UNKNOWN_CHUNK
    half = PREFILL_STEP_SIZE // 2  # of the chunk: the mean position in it
    budget = PREFILL_STEP_SIZE * _token_cost(config, half) if ON_CPU else _FLOPS_PER_BYTE * weight_bytes
    size = budget / _token_cost(config, num_read + (half if ON_CPU else 0))
    return max(MIN_CHUNK_TOKENS, min(int(size), PREFILL_STEP_SIZE))


def _token_cost(config: ModelConfig, position: int) -> float:
    flops = counts.forward_flops(config, counts.attended_keys(config, position))
    attention = flops.pop("scores") + flops.pop("scores_values")
    return sum(flops.values()) - flops["head"] + _ATTENTION_COST * attention

"""How many tokens of a prompt are read at once."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.config import ModelConfig, counts

MIN_CHUNK_TOKENS = 32  # with fewer, reading the weights takes longer than the matrix products
# Of attention's matrix products, the softmax between them included, relative to those of the layers' weights. Measured
# on a CPU with two cores; not measured on a GPU.
_ATTENTION_COST = 6 if ON_CPU else 1


def chunk_size(config: object, num_read: int) -> int:
    """How many tokens of a prompt can be read in the time of its first `PREFILL_STEP_SIZE`.

    Args:
        config: The model's configuration. Those of other classes than `ModelConfig` get constant chunks.
        num_read: The number of tokens before the chunk.
    """
    if not isinstance(config, ModelConfig):
        return PREFILL_STEP_SIZE
    half = PREFILL_STEP_SIZE // 2  # of the chunk: the mean position in it
    size = PREFILL_STEP_SIZE * _token_cost(config, half) / _token_cost(config, num_read + half)
    return max(MIN_CHUNK_TOKENS, int(size))


def _token_cost(config: ModelConfig, position: int) -> float:
    flops = counts.forward_flops(config, counts.attended_keys(config, position))
    attention = flops.pop("scores") + flops.pop("scores_values")
    return sum(flops.values()) - flops["head"] + _ATTENTION_COST * attention

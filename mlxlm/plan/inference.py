"""Memory that a model takes when it is used: its weights at some number of bits, and the cache of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm import counting
from mlxlm.config import ModelConfig
from mlxlm.errors import ConfigError
from mlxlm.plan.machines import Machine

BITS = (32, 16, 8, 6, 5, 4, 3, 2)
CACHE_BITS = (32, 16, 8, 4)
WINDOW = 4096  # of the table's sliding window, for a model without one (Mistral 7B's)


@dataclass(frozen=True)
class Serving:
    """bits of a weight in memory, in groups of `group_size` where quantized; `texts` side by side, of `context` tokens
    each; kv_bits of a cached number. Raises ConfigError for what MLX doesn't have.

    mlxlm on a CPU computes in 32 bits: see `usual_serving`. A quantized model is loaded as 32 bits there, too, where
    these fit the memory."""

    bits: int = 16
    group_size: int = 64
    texts: int = 1
    context: int = 4096
    kv_bits: int = 16

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, it must be one of {', '.join(map(str, allowed))}"
            for name, value, allowed in (
                ("bits", self.bits, BITS), ("group_size", self.group_size, (32, 64, 128)),
                ("kv_bits", self.kv_bits, CACHE_BITS),
            )
            if value not in allowed
        ]  # fmt: skip
        problems += [
            f"{name} is {value!r}, it must be a whole number from 1 to {2**40 - 1:,}"
            for name, value in (("texts", self.texts), ("context", self.context))
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**40
        ]
        if problems:
            raise ConfigError("this use can't be planned: " + "; ".join(problems))


def usual_serving(machine: Machine, config: ModelConfig) -> Serving:
    """What mlxlm does there unless asked: on a CPU weights and cache have 32 bits, elsewhere 16. A text of 4,096
    tokens, or as many as the model has positions."""
    bits = 32 if machine.kind == "cpu" else 16
    return Serving(bits=bits, kv_bits=bits, context=min(Serving.context, config.max_position_embeddings))


@dataclass(frozen=True)
class InferenceMemory:
    """Bytes. `caches`: what the cache would be with other kinds of attention, this model's own among them."""

    weights: int
    bits_per_weight: float
    cache: int
    cache_per_token: int
    caches: dict[str, int]

    @property
    def total(self) -> int:
        return self.weights + self.cache


def inference_memory(config: ModelConfig, serving: Serving) -> InferenceMemory:
    weights = weight_bytes(config, serving.bits, serving.group_size)
    cache = cache_bytes(config, serving)
    return InferenceMemory(
        weights=weights,
        bits_per_weight=8 * weights / config.parameter_count(),
        cache=cache,
        cache_per_token=cache_bytes(config, Serving(context=1, kv_bits=serving.kv_bits)),
        caches={name: cache_bytes(other, serving) for name, other in _kinds(config).items()},
    )


def weight_bytes(config: ModelConfig, bits: int, group_size: int = 64) -> int:
    """All weights: in 32 or 16 bits, or matrices and embeddings quantized to fewer as `mlxlm quantize` does, with a
    16-bit scale and bias for each group of a row and everything else in 16 bits.

    The positions' table stays as it is, and so do matrices whose rows no group size divides.
    """
    count = config.parameter_count()
    if bits >= 16:
        return count * bits // 8
    total = 2 * count
    for width, parameters in _matrices(config):
        size = next((g for g in (128, 64, 32) if g <= group_size and width % g == 0), None)
        if size is not None:
            total += parameters * bits // 8 + parameters // size * 4 - 2 * parameters
    return total


def _matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """(width of a row, parameters) of each kind of matrix that is quantized."""
    found, hidden = counting.parameters(config), config.hidden_size
    down = found["feed_forward"] // (3 if config.mlp_gated else 2)
    inner = [(config.num_attention_heads * config.head_dim, found["output"]), (config.intermediate_size, down)]
    names = ("embedding", "head", "query", "key", "value")
    return [*((hidden, found[name]) for name in names), (hidden, found["feed_forward"] - down), *inner]


def cache_bytes(config: ModelConfig, serving: Serving) -> int:
    """Keys and values of all texts. Quantized ones have a scale and a bias of 16 bits for each group of a head's
    numbers, 64 of them or 32. Raises ConfigError for a head that neither divides."""
    values = counting.cached_values(config, serving.context) * serving.texts
    if serving.kv_bits >= 16:
        return values * serving.kv_bits // 8
    group = next((size for size in (64, 32) if config.head_dim % size == 0), None)
    if group is None:
        raise ConfigError(
            f"a cache of head dim {config.head_dim} can't be quantized, which takes a multiple of 32", "16 bits"
        )
    return values * serving.kv_bits // 8 + values // group * 4


def _kinds(config: ModelConfig) -> dict[str, ModelConfig]:
    """The same model with each kind of attention."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    plain = config.with_changes(sliding_window=None, layer_types=None)
    kinds = {"multi-head": plain.with_changes(num_key_value_heads=heads)}
    if 1 < kv < heads:
        kinds[f"grouped-query, {kv} key-value heads"] = plain
    kinds["multi-query"] = plain.with_changes(num_key_value_heads=1)
    if config.sliding_window is None:
        kinds[f"sliding window of {WINDOW} in all layers"] = config.with_changes(sliding_window=WINDOW)
    else:
        local = sum(config.window(layer) is not None for layer in range(config.num_hidden_layers))
        kinds[f"sliding window of {config.sliding_window} in {local} layers"] = config
    return kinds
